"""Attention in a verify pass, in groups of a few queries.

MLX's fused attention for short queries on Metal (0.32) takes up to 8 queries, and queries times query heads per key-value head
up to 32: 5 queries of Qwen3.5-27B, 4 of Qwen3.5-35B-A3B. See ``has_fused_kernel`` in its
backend/metal/scaled_dot_product_attention.cpp. More queries of head dimension 256 are computed without a fused kernel, which
writes the scores of all queries to memory. Groups of queries stay fused, but each group reads the keys and values again. The
faster way depends on the device and the context: ``mlx_mtp benchmark --tune`` measures it and sets ``attention_rows``.
"""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.base import scaled_dot_product_attention

# Limits of MLX's fused attention: queries, and queries times query heads per key-value head.
FUSED_QUERIES, FUSED_HEADS = 8, 32


def fused_queries(layer: Any) -> int:
    """The most queries of MLX's fused attention on Metal, given the heads of an attention layer."""
    return max(1, min(FUSED_QUERIES, FUSED_HEADS * layer.num_key_value_heads // layer.num_attention_heads))


def attend(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: mx.array | str | None, most: int | None
) -> mx.array:
    """mlx-lm's attention. With a causal mask, in groups of at most ``most`` queries, see ``attend_in_groups``."""
    if most is None or queries.shape[2] <= most or mask != "causal":
        return scaled_dot_product_attention(queries, keys, values, cache, scale=scale, mask=mask)
    return attend_in_groups(queries, keys, values, cache, scale, most)


def attend_in_groups(queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, n: int) -> mx.array:
    """Causal attention of the last T of N positions, with at most ``n`` queries in a call.

    Args:
        queries (mx.array): [B, H, T, D]
        keys, values (mx.array): [B, Hkv, N, D]; from a quantized cache a tuple of arrays with these leading axes.
        cache (KVCache): The cache of keys and values, which tells mlx-lm whether they are quantized.

    Returns:
        mx.array: [B, H, T, D]
    """
    T, out = queries.shape[2], []
    for i in range(0, T, n):
        j = min(i + n, T)
        n_keys = cache.offset - T + j  # up to the last query of the group
        seen_keys, seen_values = tree_map(lambda a: a[..., :n_keys, :], (keys, values))  # noqa: B023
        group = queries[:, :, i:j]
        out.append(scaled_dot_product_attention(group, seen_keys, seen_values, cache, scale=scale, mask="causal"))
    return mx.concatenate(out, axis=2)
