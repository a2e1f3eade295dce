"""Samplers whose distribution is known, and the noise of seeds: a hash of seed, position and token, not MLX's random state."""

import secrets
import struct
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple, get_args

import mlx.core as mx
from mlx_lm import sample_utils
from mlx_lm.sample_utils import Sampler as AnySampler
from mlx_lm.sample_utils import apply_min_p, apply_top_p, greedy_sampler

from ...errors import MTPError
from . import PARAMETERS, AcceptanceName, Sampling, fits, limits_of
from .processors import seed_of

MAX_SEED = 2**64 - 1
BLOCK = 64  # tokens
DRAFT_TOP_K = 1024  # tokens that drafts of top-p are sampled from


_thread = threading.local()


@cache
def _new_state() -> Any:
    return ThreadPoolExecutor(1).submit(lambda: mx.random.state[0].tolist()).result()  # type: ignore[index]


def _has_new_state() -> bool:
    """Whether nobody has seeded MLX's random state in this thread or drawn from it. One that has changed is evaluated once in a
    thread, so that no step waits for it.
    """
    try:
        _thread.is_new = getattr(_thread, "is_new", True) and mx.random.state[0].tolist() == _new_state()  # type: ignore[index]
    except ValueError:  # in a trace of ``mx.compile``, an argument of which is MLX's state
        return False
    return bool(_thread.is_new)


def uniform(*shape: int) -> mx.array:
    """Uniform numbers of this shape by MLX's random state of this thread or, while it is the same as in other new threads, by
    random keys, which leave it as it is.
    """
    return mx.random.uniform(shape=shape, key=mx.random.key(secrets.randbits(64)) if _has_new_state() else None)


def thread_seed() -> int:
    """The seed of this thread's random numbers, for other ranks; a random one where nobody has seeded it."""
    return secrets.randbits(64) if _has_new_state() else seed_of(mx.random.state[0])  # type: ignore[index]


def noise_words(seed: int, position: int) -> tuple[int, ...]:
    """Three random numbers of 32 bits for a position: the key of ``noise``, and one for XTC."""
    return struct.unpack("<III", blake2b(struct.pack("<QQ", seed, position), digest_size=12).digest())


def noise(words: mx.array, ids: mx.array) -> mx.array:
    """Uniform numbers in [0, 1) of tokens: a hash of a row's words [n, 2] and a token's id, [n, m] or [m] -> [n, m]"""
    return _mixed(_mixed(ids + words[:, :1]) ^ words[:, 1:]).astype(mx.float32) * 2.0**-32


def _mixed(x: mx.array) -> mx.array:
    """The finalizer of MurmurHash3 (Austin Appleby, public domain): each bit of x changes half of the bits."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * mx.array(factor, mx.uint32)
    return x ^ (x >> 16)


def sample(p: mx.array, u: mx.array) -> mx.array:
    """Sample from each row of probabilities, which need not be normalized, by uniform numbers, [n, m] each -> indices [n]

    Of independent exponential numbers with rates p, each is the smallest with its probability.
    """
    # float32 is finest near 0, where the exponential number is small: so even tokens with a probability of 1e-9 are drawn with
    # the right frequency. u has steps of 2**-32 there, and half a step is added, since 0 would beat any token.
    return mx.argmax(p / -mx.log1p(-mx.minimum(u + 2.0**-33, 1 - 2.0**-24)), axis=-1)


def draw(p: mx.array) -> mx.array:
    """``sample`` by ``uniform``: of many tokens first a block, then a token in it, with fewer random numbers."""
    n, m = p.shape
    if m % BLOCK > 0 or m < BLOCK**2:
        return sample(p, uniform(n, m))
    blocks = p.reshape(n, -1, BLOCK)
    chosen = draw(blocks.sum(axis=-1))
    return chosen * BLOCK + draw(mx.take_along_axis(blocks, chosen[:, None, None], axis=1).squeeze(1))


class Support(NamedTuple):
    """The tokens that rows may have."""

    ids: mx.array | None  # [B, m]; ``None`` for all tokens, m = V
    p: mx.array  # their probabilities after all filters and the temperature, float32, [B, m]; 0 where filtered out

    def tokens(self, index: mx.array) -> mx.array:
        """The token at an index of each row, [B] -> [B]"""
        return index if self.ids is None else mx.take_along_axis(self.ids, index[:, None], axis=-1).squeeze(-1)

    def draw(self) -> mx.array:
        """A token of each row, [B]"""
        return self.tokens(draw(self.p))

    def at(self, x: mx.array) -> mx.array:
        """The probability of a token of each row, [B] -> [B]"""
        if self.ids is None:
            return mx.take_along_axis(self.p, x[:, None], axis=-1).squeeze(-1)
        return (self.p * (self.ids == x[:, None])).sum(axis=-1)

    def of_all(self, V: int) -> mx.array:
        """The probabilities of all tokens, [B, V]"""
        return self.p if self.ids is None else mx.put_along_axis(mx.zeros((len(self.p), V)), self.ids, self.p, axis=-1)


def largest(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest values of each row [B, V], of equal ones the first, as mlx-lm's top-k -> their indices and values, [B, k]

    Of the blocks of a row, only those with the k largest maxima are partitioned.
    """
    B, V = x.shape
    if not isinstance(k, int) or not 0 < k < V:
        raise MTPError(f"top_k must be an integer below the vocabulary's size of {V}, not {k}.")
    if V % BLOCK > 0 or 3 * BLOCK * k > V:
        ids = mx.argpartition(-x, kth=k - 1, axis=-1)[:, :k]
        return ids, mx.take_along_axis(x, ids, axis=-1)
    blocks = x.reshape(B, -1, BLOCK)
    chosen, _ = largest(blocks.max(axis=-1), k)
    chosen = mx.sort(chosen, axis=-1)  # so that the order of equal values remains
    ids, values = largest(mx.take_along_axis(blocks, chosen[..., None], axis=1).reshape(B, -1), k)
    return mx.take_along_axis(chosen, ids // BLOCK, axis=-1) * BLOCK + ids % BLOCK, values


def within_sigmas(logits: mx.array, n: float) -> mx.array:
    """Top-n-sigma (https://arxiv.org/abs/2411.07641) of logits or log probabilities [B, V]: -inf for those that are more than n
    standard deviations below the row's largest; with n = 0, the logits.

    The deviation is that of the finite logits, as in llama.cpp: excluded tokens do not count. It is that before the
    temperature, which scales both sides.
    """
    if n == 0:
        return logits
    x, is_allowed = logits.astype(mx.float32), logits > -mx.inf
    count = is_allowed.sum(axis=-1, keepdims=True)
    mean = mx.where(is_allowed, x, 0).sum(axis=-1, keepdims=True) / count
    variance = mx.where(is_allowed, (x - mean) ** 2, 0).sum(axis=-1, keepdims=True) / count
    return mx.where(x < x.max(axis=-1, keepdims=True) - n * mx.sqrt(variance), -mx.inf, logits)


def known_ids(ids: Iterable[int], logits: mx.array) -> list[int]:
    """The ids for which there are logits [..., V]: a tokenizer may have more tokens than the model."""
    return [i for i in ids if 0 <= i < logits.shape[-1]]


N_VALUES = 2**16  # of a type of 16 bits


def nucleus(x: mx.array, top_p: float) -> mx.array:
    """mlx-lm's ``apply_top_p`` (0.32.2) of log probabilities [B, V] in 16 bits, without a sort: by the counts of their values.

    Equal values have one place in the order, so the mass above a token is that of the larger values.
    """
    rows = mx.arange(len(x), dtype=mx.uint32)[:, None] * N_VALUES
    places = _places(mx.view(x, mx.uint16)).astype(mx.uint32)
    counts = mx.zeros(len(x) * N_VALUES).at[(rows + places).flatten()].add(1.0).reshape(len(x), N_VALUES)
    values = mx.view(_places(mx.arange(N_VALUES, dtype=mx.uint16)), x.dtype).astype(mx.float32)
    mass = mx.where(counts > 0, counts * mx.exp(values), 0)  # [B, N_VALUES]
    above = mx.cumsum(mass, axis=-1, inclusive=False)
    n_kept = (above < top_p * (above[:, -1:] + mass[:, -1:])).sum(axis=-1, keepdims=True)  # of the values, [B, 1]
    return mx.where(places < n_kept, x, -mx.inf)


def _places(bits: mx.array) -> mx.array:
    """The place of each floating-point number of 16 bits in descending order, given its bits; and its inverse."""
    return mx.where(bits < N_VALUES // 2, N_VALUES // 2 - 1 - bits, bits)


@dataclass(frozen=True)
class Sampler(Sampling):
    """mlx-lm's sampler with the same arguments, without a state. Samplers with equal arguments are equal."""

    min_tokens_to_keep: int = 1
    xtc_special_tokens: tuple[int, ...] = ()
    keeps_state: ClassVar[bool] = False

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Log probabilities [B, V] -> tokens [B], as mlx-lm's samplers."""
        return self.support(logprobs, self.uniforms(len(logprobs))).draw()

    def uniforms(self, n: int) -> mx.array:
        """n uniform numbers, which decide whether XTC applies to a position, [n, 1]."""
        return uniform(n, 1) if self.xtc_probability > 0 else mx.zeros((n, 1))

    def support(self, logits: mx.array, uniforms: mx.array, are_drafts: bool = False) -> Support:
        """Apply the filters and the temperature to logits or log probabilities [B, V], with ``uniforms`` [B, 1] of XTC.

        Top-n-sigma is the first filter, as in llama.cpp; the others have mlx-lm's order. The distribution of drafts is free:
        there, top-p and min-p take the likeliest tokens alone.
        """
        logits = within_sigmas(logits, self.top_n_sigma)
        x, ids, k, top_p = logits, None, self.top_k, mx.array(self.top_p)
        has_top_p = 0 < self.top_p < 1
        if are_drafts and k == 0 and (has_top_p or self.min_p > 0):
            k = min(DRAFT_TOP_K, logits.shape[-1] - 1)
        # Top-p and min-p keep the first tokens in descending order, so top-k can come first.
        if k > 0 and self.xtc_probability == 0 and (self.min_p == 0 or self.min_tokens_to_keep == 1):
            ids, x = largest(logits, k)
            if has_top_p:
                # Top-p is a share of the mass of all tokens, and for drafts of these.
                whole = x if are_drafts else logits
                x = x.astype(mx.float32) - mx.logsumexp(whole.astype(mx.float32), axis=-1, keepdims=True)
                top_p = self.top_p / mx.exp(x).sum(axis=-1, keepdims=True)
        elif are_drafts:
            x = x - x.max(axis=-1, keepdims=True)  # logits may be too large for the exponentials of top-p
        if has_top_p:
            x = nucleus(x, self.top_p) if x.itemsize == 2 and ids is None else apply_top_p(x, top_p)
        if self.min_p > 0:
            x = apply_min_p(x, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability > 0:  # as in mlx-lm's ``apply_xtc`` (0.32.2), which takes a random number itself
            p = mx.softmax(x, axis=-1)
            is_top = p > mx.where(p > self.xtc_threshold, p, mx.inf).min(axis=-1, keepdims=True)
            if special := known_ids(self.xtc_special_tokens, logits):
                is_top[..., special] = False
            x = mx.where(is_top & (uniforms <= self.xtc_probability), -mx.inf, x)
        if self.top_k > 0 and ids is None:
            ids, x = largest(x, self.top_k)
        scale = min(max(1 / self.temperature, 1e-30), 1e30)  # at any temperature, logits are finite in float32
        return Support(ids, mx.softmax(x.astype(mx.float32) * scale, axis=-1))

    def sample(self, logits: mx.array, words: mx.array, are_drafts: bool = False) -> mx.array:
        """The tokens that ``noise_words`` [B, 3] sample from logits [B, V] -> [B]"""
        support = self.support(logits, words[:, 2:] * 2.0**-32, are_drafts)
        ids = mx.arange(logits.shape[-1], dtype=mx.uint32) if support.ids is None else support.ids
        return support.tokens(sample(support.p, noise(words[:, :2], ids)))


@dataclass(frozen=True)
class SeededSampler:
    """A sampler whose token at a position depends only on the seed, the position and the distribution there."""

    sampler: Sampler
    seed: int  # from 0 to 2**64 - 1
    keeps_state: ClassVar[bool] = False

    def __call__(self, logprobs: mx.array) -> mx.array:
        raise MTPError(
            "A sampler with a seed samples by position, which mlx-lm's functions do not tell: give them sampler.at(0), a new "
            "one for each text."
        )

    def at(self, position: int) -> "TextSampler":
        """A sampler for one text from this position on, for mlx-lm's functions or to continue a text."""
        return TextSampler(self, position)


class TextSampler:
    """A ``SeededSampler`` for one text: each call samples its next token, the first at position ``start``."""

    keeps_state = False  # in mlx_mtp, which asks its sampler by position

    def __init__(self, sampler: SeededSampler, start: int):
        if start < 0:
            raise MTPError(f"The position of a token must be 0 or more, not {start}.")
        self.sampler = sampler
        self.start = start
        self.n_sampled = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Log probabilities [1, V] -> the next token, [1]."""
        if len(logprobs) != 1:
            raise MTPError(
                f"sampler.at({self.start}) is for one text, not for {len(logprobs)}: give each its own, as `samplers` of "
                "BatchGenerator.insert, or use mlx_mtp.batch_generate."
            )
        words = noise_words(self.sampler.seed, self.start + self.n_sampled)
        self.n_sampled += 1
        return self.sampler.sampler.sample(logprobs, mx.array([words], mx.uint32))


def for_one_text(sampler: AnySampler | None) -> AnySampler | None:
    """The sampler of one text; with a seed, a ``TextSampler`` at its first position. Raises an MTPError if that has begun."""
    if isinstance(sampler, SeededSampler):
        return sampler.at(0)
    if isinstance(sampler, TextSampler):
        if sampler.n_sampled > 0:
            raise MTPError(
                f"sampler.at({sampler.start}) is for one text, and has sampled {sampler.n_sampled} of its tokens: give the "
                "sampler itself, or a new sampler.at(...)."
            )
        return sampler.sampler.at(sampler.start)
    return sampler


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: list[int] | None = None,
    *,
    top_n_sigma: float = 0.0,
    seed: int | None = None,
    acceptance: AcceptanceName | None = None,
) -> AnySampler:
    """Make a sampler function, as mlx-lm's ``make_sampler``, that also defines how drafts are accepted.

    Args:
        top_n_sigma (float, optional): Keep the tokens whose logits are at most this many standard deviations below the largest
          (https://arxiv.org/abs/2411.07641), before the other filters. Default: ``0``, all tokens.
        seed (int, optional): From 0 to 2**64 - 1. The seed and the prompt determine the text, with any number of drafts, with
          and without MTP, alone or in a batch. Default: ``None``.
        acceptance (str, optional): ``"rejection"`` accepts the most drafts, ``"coupled"`` works with a seed, ``"match"`` is
          mlx-lm's own sampler, which uses MLX's random state. Default: ``None``, ``"coupled"`` with a seed and ``"rejection"``
          without. ``"coupled"`` without a seed chooses a random one.

    The other arguments are mlx-lm's. The distribution is the same for every ``acceptance``.

    Returns:
        Sampler: A sampler which takes log-probabilities and returns tokens. A sampler with a seed works for any number of texts
        in the functions of ``mlx_mtp``. To mlx-lm's functions pass ``sampler.at(0)``, a new one for each text.

    Raises:
        MTPError: An argument is out of range, or the seed cannot be combined with ``acceptance``.
    """
    if acceptance is not None and acceptance not in get_args(AcceptanceName):
        raise MTPError(f"acceptance must be one of {', '.join(get_args(AcceptanceName))}, not {acceptance!r}.")
    acceptance = acceptance or ("rejection" if seed is None else "coupled")
    if seed is not None and acceptance != "coupled":
        raise MTPError(f'acceptance="{acceptance}" draws from MLX\'s random state: use mx.random.seed instead of seed.')
    if seed is not None and (type(seed) is not int or not 0 <= seed <= MAX_SEED):
        raise MTPError(f"seed must be an integer from 0 to 2**64 - 1, not {seed!r}.")
    sampling = Sampling(temp, top_p, top_k, min_p, xtc_probability, xtc_threshold, top_n_sigma)
    # Here, since an error of mlx-lm inside a compiled function invalidates the random state.
    for name, value in sampling.arguments.items():
        if not fits(PARAMETERS[name], value):
            raise MTPError(f"{name} must be {limits_of(PARAMETERS[name])}, not {value}.")
    if min_tokens_to_keep < 1:
        raise MTPError(f"min_tokens_to_keep must be 1 or more, not {min_tokens_to_keep}.")
    if temp == 0:
        return greedy_sampler
    special_tokens = xtc_special_tokens or []
    if acceptance == "match":
        args = (temp, top_p, min_p, min_tokens_to_keep, top_k, xtc_probability, xtc_threshold)
        return lambda x: sample_utils.make_sampler(*args, known_ids(special_tokens, x))(within_sigmas(x, top_n_sigma))
    sampler = Sampler(**vars(sampling), min_tokens_to_keep=min_tokens_to_keep, xtc_special_tokens=tuple(special_tokens))
    if acceptance == "coupled":
        return SeededSampler(sampler, secrets.randbits(64) if seed is None else seed)
    return sampler
