"""Kernels of this device alone, with a model's heads and dimensions, beside the same by simple operations in float32.

Kernels of attention differ by the numbers of queries and keys. On some chips, faults were found from 1,024 keys on, for 9
queries, and for grouped queries of quantized keys and values.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_ops

from ...core.caches.recurrent import has_metal_kernel, inputs_of_recurrence, recur
from ...core.drafts.settings import quantized_group_size
from ...core.layers.attention import AttentionHeads, attend, by_products
from ...core.layers.passes import Pass
from ...core.layers.recurrence import RecurrentHeads
from ...errors import is_out_of_memory
from ...memory import CHUNK

QUERIES = (1, 2, 5, 9)
TOKENS = (1, 4, 9, 64)  # of a recurrence
PIECE, N_TIMES = 64, 3  # tokens of simple operations at a time, and runs of which the shortest counts
NATIVE = "MLX"
OF_MLX_LM = "mlx-lm"
SHORT, LONG = 1050, 4097  # numbers of keys, above those from which kernels divide them
FAR = 7000  # keys that take long beside the launch of a kernel, in the memory that the head's keys take in another part
SHORTER, BLOCK = 19, 16  # tokens by which the second row is shorter, and of a block that an indexer chooses
LARGEST = 4.5  # of the keys, which gives scores a deviation of 1.5: each key that is missed or added counts
WRONG = 1e9  # the difference from no numbers


def shortest(call: Callable[[], Any]) -> float:
    """The shortest of several times of a call, in seconds."""
    times = []
    for _ in range(N_TIMES):
        before = perf_counter()
        mx.eval(call())
        times.append(perf_counter() - before)
    return min(times)


def difference(a: mx.array, b: mx.array) -> float:
    """The largest difference of two arrays, as a share of the largest number of the second."""
    a = a.astype(mx.float32)
    b = b.astype(mx.float32)
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
    heads: AttentionHeads,
    dtype: mx.Dtype,
    max_queries: int | None,
    bits: int | None = None,
    n_queries: Sequence[int] = QUERIES,
) -> dict[str, float]:
    """The largest differences of attention by the number of queries, ``n_queries`` in order, with these heads.

    ``max_queries`` are ``attention_rows``, and ``bits`` those of keys and values, ``None`` if they are not quantized.
    """
    Hq, Hkv, D = heads
    cache = SimpleNamespace()
    key = mx.random.key(0)
    pass_ = Pass(attention_rows=max_queries)
    keys = mx.random.uniform(-LARGEST, LARGEST, (1, Hkv, LONG, D), dtype, key)
    queries = mx.random.uniform(-1, 1, (2, Hq, n_queries[-1], D), dtype, key)
    keys = mx.concatenate([keys, keys[..., ::-1]])  # [2, Hkv, N, D]
    # CUDA's attention takes no negative strides, which no cache has.
    exact: Any = [keys, mx.contiguous(keys[:, :, ::-1])]
    given = exact
    if bits is not None:
        cache.bits, cache.group_size = bits, quantized_group_size(queries)
        given = [mx.quantize(x, cache.group_size, bits) for x in exact]
        exact = [mx.dequantize(w, scales, biases, cache.group_size, bits) for w, scales, biases in given]
    found = dict.fromkeys(map(str, n_queries), 0.0)
    # Masks of quantized keys are no part of a kernel.
    for B, N, mask in _cases(n_queries[-1]) if bits is None else [(1, SHORT, "causal")]:
        keys, values = (x[:B, :, :N] for x in exact)
        want = by_products(queries[:B], keys, values, D**-0.5, mask)  # [B, Hq, T, D]
        k, v = ([x[:B, :, :N] for x in own] if bits else own[:B, :, :N] for own in given)
        for T in n_queries:  # the last ones
            own_mask = mask[..., -T:, :] if isinstance(mask, mx.array) else None if T == 1 else mask
            # mlx-lm scales quantized attention's queries in place.
            run = partial(attend, 1 * queries[:B, :, -T:], k, v, cache, D**-0.5, own_mask, pass_)
            found[str(T)] = max(found[str(T)], measured(lambda: difference(run(), want[:, :, -T:])))  # noqa: B023
    return found


def seconds_of_a_key(
    heads: AttentionHeads, dtype: mx.Dtype, max_queries: int | None, fused: bool, n_queries: Sequence[int]
) -> list[float]:
    """The seconds that a further key adds to attention, for each of ``n_queries``; the options are those of a pass."""
    Hq, Hkv, D = heads
    pass_ = Pass(attention_rows=max_queries, fused=fused)
    keys, values = (mx.random.uniform(-1, 1, (1, Hkv, FAR, D), dtype, mx.random.key(i)) for i in range(2))

    def seconds(T: int, N: int) -> float:
        queries = mx.ones((1, Hq, T, D), dtype)
        mask = None if T == 1 else "causal"
        of_n = keys[:, :, :N], values[:, :, :N]
        mx.eval(queries, *of_n)
        return shortest(lambda: attend(queries, *of_n, None, D**-0.5, mask, pass_))

    return [max(seconds(T, FAR) - seconds(T, SHORT), 0.0) / (FAR - SHORT) for T in n_queries]


def _cases(T: int) -> Iterator[tuple[int, int, Any]]:
    """The number of rows B and of keys N, and the mask of T queries, [B, 1, T, N], or that of rows of one length.

    The masks are those of windows, and of two rows: a shorter one, and one for which an indexer chooses keys.
    """
    yield 1, SHORT, "causal"
    yield 1, LONG, "causal"
    columns = mx.arange(SHORT)
    at = mx.arange(SHORT - T, SHORT)[:, None]
    is_chosen = mx.repeat(mx.random.bernoulli(0.5, (T, SHORT // BLOCK + 1), key=mx.random.key(1)), BLOCK, axis=-1)
    is_last = columns >= BLOCK * ((at + 1) // BLOCK)  # in no complete block
    sparse = (is_chosen[:, :SHORT] | is_last) & (columns <= at)  # [T, N]
    yield 2, SHORT, mx.stack([columns <= at - SHORTER, sparse])[:, None]


def recurrences(heads: RecurrentHeads, dtype: mx.Dtype) -> dict[str, dict[str, list[float]]]:
    """MLX's recurrence and, on Metal, mlx-lm's kernel, with these heads.

    Returns, by the number of tokens, the largest difference of the output and the state, and the seconds. On Metal also of a
    prompt's chunk: elsewhere simple operations, which mlx-lm has there, take long.
    """
    found: dict[str, dict[str, list[float]]] = {NATIVE: {}}
    if has_metal_kernel(heads.key_size):
        found[OF_MLX_LM] = {}
    for T in (*TOKENS, *([CHUNK] if OF_MLX_LM in found else [])):
        inputs, state, mask = _inputs_of_recurrence(heads, dtype, T)
        outs = []
        end = state
        for i in range(0, T, PIECE):  # since simple operations hold the state after each token
            of_piece = [x[:, i : i + PIECE].astype(mx.float32) for x in inputs]
            out, end = gated_delta_ops(*of_piece, end, None if mask is None else mask[:, i : i + PIECE])
            mx.eval(out, end)
            outs.append(out)
        for name, by_tokens in found.items():
            given = inputs_of_recurrence(name == NATIVE, *inputs)
            call = partial(recur, name == NATIVE, given, state, mask)
            by_tokens[str(T)] = [measured(partial(_difference, call, mx.concatenate(outs, axis=1), end, mask)), 0.0]
            if by_tokens[str(T)][0] < WRONG:
                by_tokens[str(T)][1] = shortest(call)
    return found


def _difference(call: Any, want: mx.array, want_state: mx.array, mask: mx.array | None) -> float:
    """The difference of a recurrence. Outputs that are masked have any values."""
    out, state = call()
    out = out if mask is None else mx.where(mask[..., None, None], out, want)
    return max(difference(out, want), difference(state, want_state))


def _inputs_of_recurrence(
    heads: RecurrentHeads, dtype: mx.Dtype, T: int
) -> tuple[list[mx.array], mx.array, mx.array | None]:
    """Random q, k, v, g, beta of T tokens, a state and, of few tokens, two rows and a mask of which one row is shorter."""
    Hk, Hv, Dk, Dv = heads
    B = 1 if T == 1 or T > PIECE else 2
    shapes = ((T, Hk, Dk), (T, Hk, Dk), (T, Hv, Dv), (T, Hv), (T, Hv), (Hv, Dv, Dk))
    q, k, v, g, beta, state = (mx.random.uniform(0, 1, (B, *s), key=mx.random.key(i)) for i, s in enumerate(shapes))
    q, k = ((x - 0.5) * (12 / Dk) ** 0.5 for x in (q, k))  # of a norm of about 1
    inputs = [*(x.astype(dtype) for x in (q, k, v)), 1 - 0.1 * g, beta.astype(dtype)]
    return inputs, state - 0.5, None if B == 1 else mx.arange(T) < mx.array([[T], [T - 1]])
