"""Kernels of this device alone, with a model's heads and dimensions, beside the same by simple operations in float32.

Kernels of attention differ by the numbers of queries and keys. On some chips, faults were found from 1,024 keys on, for 9
queries, and for grouped queries of quantized keys and values.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from ...core.layers.drafting import quantized_group_size
from ...core.layers.layer import attend, by_products
from ...memory import is_out_of_memory

QUERIES = (1, 2, 5, 9)
SHORT, LONG = 1050, 4097  # numbers of keys, above those from which kernels divide them
SHORTER, BLOCK = 19, 16  # tokens by which the second row is shorter, and of a block that an indexer chooses
LARGEST = 4.5  # of the keys, which gives scores a deviation of 1.5: each key that is missed or added counts
WRONG = 1e9  # the difference from no numbers


def difference(a: mx.array, b: mx.array) -> float:
    """The largest difference of two arrays, as a share of the largest number of the second."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    largest = mx.abs(b).max()
    furthest = mx.nan_to_num(mx.abs(a - b), nan=WRONG, posinf=WRONG).max()
    return float(mx.minimum(mx.where(largest > 0, furthest / largest, WRONG), WRONG))


def measured(compare: Callable[[], float]) -> float:
    """A difference, or ``WRONG`` where a kernel fails, but not for lack of memory."""
    try:
        return compare()
    except (RuntimeError, ValueError) as e:
        if is_out_of_memory(e):
            raise
        return WRONG


def attention_differences(
    own: Any, dtype: mx.Dtype, max_queries: int | None, bits: int | None = None
) -> dict[str, float]:
    """The largest differences of attention by the number of queries, of a model's attention layer.

    ``max_queries`` is that of ``attend``, and ``bits`` those of keys and values, ``None`` if they are not quantized.
    """
    Hq, Hkv, D, cache = own.num_attention_heads, own.num_key_value_heads, own.head_dim, SimpleNamespace()
    key = mx.random.key(0)
    keys = mx.random.uniform(-LARGEST, LARGEST, (1, Hkv, LONG, D), dtype, key)
    queries = mx.random.uniform(-1, 1, (2, Hq, max(QUERIES), D), dtype, key)
    keys = mx.concatenate([keys, keys[..., ::-1]])  # [2, Hkv, N, D]
    exact: Any = [keys, keys[:, :, ::-1]]
    given = exact
    if bits is not None:
        cache.bits, cache.group_size = bits, quantized_group_size(queries)
        given = [mx.quantize(x, cache.group_size, bits) for x in exact]
        exact = [mx.dequantize(w, scales, biases, cache.group_size, bits) for w, scales, biases in given]
    found = dict.fromkeys(map(str, QUERIES), 0.0)
    # Masks of quantized keys are no part of a kernel.
    for B, N, mask in _cases(max(QUERIES)) if bits is None else [(1, SHORT, "causal")]:
        keys, values = (x[:B, :, :N] for x in exact)
        want = by_products(queries[:B], keys, values, D**-0.5, mask)  # [B, Hq, 9, D]
        k, v = ([x[:B, :, :N] for x in own] if bits else own[:B, :, :N] for own in given)
        for T in QUERIES:  # the last ones
            own_mask = mask[..., -T:, :] if isinstance(mask, mx.array) else None if T == 1 else mask
            # mlx-lm scales quantized attention's queries in place.
            run = partial(attend, 1 * queries[:B, :, -T:], k, v, cache, D**-0.5, own_mask, max_queries)
            found[str(T)] = max(found[str(T)], measured(lambda: difference(run(), want[:, :, -T:])))  # noqa: B023
    return found


def _cases(T: int) -> Iterator[tuple[int, int, Any]]:
    """The number of rows B and of keys N, and the mask of T queries, [B, 1, T, N], or that of rows of one length.

    The masks are those of windows, and of two rows: a shorter one, and one for which an indexer chooses keys.
    """
    yield 1, SHORT, "causal"
    yield 1, LONG, "causal"
    columns, at = mx.arange(SHORT), mx.arange(SHORT - T, SHORT)[:, None]
    is_chosen = mx.repeat(mx.random.bernoulli(0.5, (T, SHORT // BLOCK + 1), key=mx.random.key(1)), BLOCK, axis=-1)
    is_last = columns >= BLOCK * ((at + 1) // BLOCK)  # in no complete block
    sparse = (is_chosen[:, :SHORT] | is_last) & (columns <= at)  # [T, N]
    yield 2, SHORT, mx.stack([columns <= at - SHORTER, sparse])[:, None]
