"""Random numbers by position in a text, which depend only on the seed and the position.

MLX's generator has one state for the process, so its numbers depend on earlier draws of other requests and drafts. Here each
position has its own key, hashed from (seed, position).
"""

import struct
from hashlib import blake2b

import mlx.core as mx

MAX_SEED = 2**64 - 1


def check_seed(seed: int) -> None:
    """Raise a ValueError if the seed is not an integer from 0 to 2**64 - 1."""
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be an integer from 0 to 2**64 - 1, not {seed!r}.")


def gumbel(seed: int, position: int, size: int) -> mx.array:
    """Standard Gumbel noise of a position, float32, [size]. ``argmax(log p + noise)`` is a draw from p."""
    high, low, _ = _words(seed, position)
    u = mx.random.uniform(shape=(size,), key=mx.array([high, low], mx.uint32))  # [size], in steps of 2**-32 near 0
    # 1 - u instead of u: float32 is finest near 0, where the exponential is small and the noise large. So even tokens with a
    # probability of 1e-9 are drawn with the right frequency. Half a step is added, since log(0) would beat any token.
    exponential = -mx.log1p(-(u + 2.0**-33))
    return -mx.log(exponential)


def uniform(seed: int, position: int) -> float:
    """A uniform number of a position in [0, 1), independent of its Gumbel noise."""
    return _words(seed, position)[2] / 2.0**32


def _words(seed: int, position: int) -> tuple[int, int, int]:
    # The third number is always 0, so that a seed gives the same text as in earlier versions.
    digest = blake2b(struct.pack("<QQQ", seed, position, 0), digest_size=12).digest()
    high, low, more = struct.unpack("<III", digest)
    return high, low, more
