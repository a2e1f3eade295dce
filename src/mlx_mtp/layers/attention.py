"""Attention over the tokens of a verify pass, in groups of queries that MLX's fused attention takes on Metal.

Without a fused kernel, MLX writes the scores of all queries to memory, and may read the keys once for each query head. Each
group reads the keys and values once.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

# The routing of MLX 0.32.4, ``ScaledDotProductAttention::use_fallback`` in backend/metal/scaled_dot_product_attention.cpp.
FEW = 8  # queries of the kernel for few queries
HEADS = 32  # of all queries of such a call, for each key-value head
SIZES_OF_FEW, SIZES_OF_MANY = (64, 96, 128, 256), (64, 80, 128)  # dimensions of a head


def on_metal() -> bool:
    return mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)


def group_size(n: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """The queries of an attention call, of the n in a window, that a fused kernel of Metal takes; n if none is fused.

    The mask may be causal or an array: the rule is the same, as there are at least as many keys as queries. Examples: 5 for
    Qwen3.5-27B, 4 for 35B-A3B, 2 for 122B-A10B and 397B-A17B.
    """
    most = min(FEW, HEADS * kv_heads // heads)
    if most == 0 or head_dim not in SIZES_OF_FEW or (n > FEW and head_dim in SIZES_OF_MANY):
        return n
    return min(n, most)


def attend(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: mx.array | str | None, most: int | None
) -> mx.array:
    """mlx-lm's attention, in groups of queries.

    Args:
        queries (mx.array): Of the last T of N positions, [B, H, T, D].
        keys, values (mx.array): [B, Hkv, N, D]; from a quantized cache tuples of arrays, for which there is no fused kernel.
        mask (mx.array or str, optional): ``"causal"``, or [..., T, N].
        most (int, optional): The most queries of a group; 0 for all. ``None``: as ``group_size``.

    Returns:
        mx.array: [B, H, T, D]
    """
    _, H, T, D = queries.shape
    n = most or T
    if most is None and isinstance(keys, mx.array):
        n = group_size(T, H, keys.shape[1], D)
    if n >= T or not isinstance(keys, mx.array):
        return scaled_dot_product_attention(queries, keys, values, cache, scale=scale, mask=mask)
    out = []
    for i in range(0, T, n):
        j, mask_of_group = min(i + n, T), mask
        n_keys = keys.shape[2]
        if isinstance(mask, mx.array):
            mask_of_group = mask[..., i:j, :]  # [..., n, N]
        elif mask == "causal":
            n_keys += j - T  # up to the last query of the group
        group = queries[:, :, i:j], keys[:, :, :n_keys], values[:, :, :n_keys]
        out.append(scaled_dot_product_attention(*group, cache, scale=scale, mask=mask_of_group))
    return mx.concatenate(out, axis=2)
