"""Attention over a verify pass, a few rows at a time.

MLX's fused attention for short queries on Metal (0.32) takes up to 8 rows, and rows times query heads per key-value head up
to 32: 5 rows of Qwen3.5-27B, 4 of Qwen3.5-35B-A3B. See ``has_fused_kernel`` in its
backend/metal/scaled_dot_product_attention.cpp. More rows of head dimension 256 are computed without a fused kernel, which
writes the scores of all rows to memory; in groups they stay fused, but each group reads the keys and values again. Which is
faster depends on the device and the context: ``mlx_mtp.benchmark --tune`` measures it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.qwen3_next import Qwen3NextAttention

FUSED_ROWS, FUSED_QUERIES = 8, 32  # of MLX's fused attention: rows, and rows times query heads per key-value head

_most_rows: ContextVar[int | None] = ContextVar("most_rows", default=None)


def fused_rows(layer: Any) -> int:
    """The most rows that MLX's fused attention on Metal takes with the heads of an attention layer."""
    return max(1, min(FUSED_ROWS, FUSED_QUERIES * layer.num_key_value_heads // layer.num_attention_heads))


@contextmanager
def rows_at_once(n: int | None) -> Iterator[None]:
    """Inside, ``Attention`` takes at most ``n`` rows at a time; ``None`` for all."""
    token = _most_rows.set(n)
    try:
        yield
    finally:
        _most_rows.reset(token)


class Attention(Qwen3NextAttention):
    """mlx-lm's attention layer of Qwen3.5 and Qwen3-Next, which follows ``rows_at_once`` where the mask is causal."""

    def __call__(self, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
        n = _most_rows.get()
        if n is None or x.shape[1] <= n or cache is None or mask != "causal":
            return super().__call__(x, mask, cache)
        # As in mlx-lm's Qwen3NextAttention.__call__ (0.32.2).
        B, T, _ = x.shape
        queries, gate = mx.split(self.q_proj(x).reshape(B, T, self.num_attention_heads, -1), 2, axis=-1)
        keys = self.k_proj(x).reshape(B, T, self.num_key_value_heads, -1)
        values = self.v_proj(x).reshape(B, T, self.num_key_value_heads, -1)
        queries = self.rope(self.q_norm(queries).transpose(0, 2, 1, 3), offset=cache.offset)  # [B, H, T, D]
        keys = self.rope(self.k_norm(keys).transpose(0, 2, 1, 3), offset=cache.offset)  # [B, Hkv, T, D]
        keys, values = cache.update_and_fetch(keys, values.transpose(0, 2, 1, 3))
        out = attend_in_groups(queries, keys, values, cache, self.scale, n)
        out = out.transpose(0, 2, 1, 3).reshape(B, T, -1)  # [B, T, H D]
        return self.o_proj(out * mx.sigmoid(gate.reshape(B, T, -1)))


def attend_in_groups(queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, n: int) -> mx.array:
    """Causal attention of the last T of N positions, with at most ``n`` rows in a call.

    Args:
        queries (mx.array): [B, H, T, D]
        keys, values (mx.array): [B, Hkv, N, D]; from a quantized cache a tuple of arrays with these leading axes.
        cache (KVCache): Where keys and values are from, for mlx-lm to see whether they are quantized.

    Returns:
        mx.array: [B, H, T, D]
    """
    T, out = queries.shape[2], []
    for i in range(0, T, n):
        j = min(i + n, T)
        n_keys = cache.offset - T + j  # the last row of a group sees no further
        seen_keys, seen_values = tree_map(lambda a: a[..., :n_keys, :], (keys, values))  # noqa: B023
        rows = queries[:, :, i:j]
        out.append(scaled_dot_product_attention(rows, seen_keys, seen_values, cache, scale=scale, mask="causal"))
    return mx.concatenate(out, axis=2)
