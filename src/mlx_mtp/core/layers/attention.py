"""Attention layers: projections around the cache, and attention in groups of queries that a kernel of Metal takes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from ..caches.indexed import NAMES, IndexedKVCache
from ..caches.rows import MixedKVRows
from ..caches.validation import are_keys
from .layer import Layer
from .passes import Pass

# The routing of MLX 0.32.4, ``ScaledDotProductAttention::use_fallback`` in backend/metal/scaled_dot_product_attention.cpp.
FEW = 8  # queries of the kernel for few queries
HEADS = 32  # of all queries of such a call, for each key-value head
SIZES_OF_FEW, SIZES_OF_MANY = (64, 96, 128, 256), (64, 80, 128)  # dimensions of a head

Arrays = Sequence[mx.array]


class AttentionHeads(NamedTuple):
    """The heads of attention, on this rank, and their dimension."""

    queries: int
    keys: int
    size: int


class AttentionLayer(Layer):
    """A layer whose queries share keys and values in groups, with norms of both if it has them: mlx-lm's ``qwen3``."""

    is_linear = False
    self_attn: Any
    head_dim: int

    @property
    def heads(self) -> AttentionHeads:
        return AttentionHeads(self.self_attn.n_heads, self.self_attn.n_kv_heads, self.head_dim)

    @property
    def row_sizes(self) -> dict[str, tuple[int, int]]:
        """The heads and dimensions of the arrays of the cache, by name, in the order of ``project_keys``."""
        return dict.fromkeys(NAMES, (self.heads.keys, self.heads.size))

    def score_bytes(self, n: int) -> int:
        """The bytes of a query and a token before it in memory, with numbers of n bytes: the scores and the mask."""
        return self.heads.queries * n + 1

    def context_bytes(self, n: int) -> int:
        """The bytes of a token in the cache that a pass over a prompt's chunk makes of it, with numbers of n bytes."""
        return 0

    def make_cache(self) -> KVCache:
        return KVCache() if len(self.row_sizes) == len(NAMES) else IndexedKVCache()

    def fits(self, cache: Any) -> bool:
        return are_keys(cache, self)

    # Its parts. ``normed`` is the input of attention, [B, T, H].

    def project(self, normed: mx.array, last: bool = False) -> tuple[Arrays, Arrays, Arrays]:
        """Queries [B, Hq, T, D], with ``last`` of the last position alone; the cache's arrays, [B, Hkv, T, D]; gates.

        The first of the queries, and of the cache's arrays, is before rope.
        """
        queries, gates = self.project_queries(normed[:, -1:] if last else normed)
        return queries, self.project_keys(normed), gates

    def project_queries(self, normed: mx.array) -> tuple[Arrays, Arrays]:
        """Queries, and the gates that ``project_out`` takes."""
        attention = self.self_attn
        return [split_heads(attention.q_proj(normed), self.heads.queries, attention.get("q_norm"))], []

    def project_keys(self, normed: mx.array) -> Arrays:
        attention = self.self_attn
        n = self.heads.keys
        return [
            split_heads(attention.k_proj(normed), n, attention.get("k_norm")),
            split_heads(attention.v_proj(normed), n),
        ]

    def rotate(self, arrays: Arrays, offset: int | mx.array) -> Arrays:
        """Apply rope to queries, or to the cache's arrays, from a position on, also [B]."""
        first, *others = arrays
        return [self.self_attn.rope(first, offset=offset), *others]

    def attend(
        self, queries: Arrays, cached: Sequence[Any], mask: Any, cache: Any, first: int | mx.array, pass_: Pass
    ) -> mx.array:
        """Attention to all that the cache holds -> [B, Hq, T, D], given the index of the first query, also [B]."""
        keys, values = cached
        return attend(queries[0], keys, values, cache, self.self_attn.scale, mask, pass_)

    def project_out(self, out: mx.array, *gates: mx.array) -> mx.array:
        """The output of attention [B, T, Hq D] -> [B, T, H]"""
        return self.self_attn.o_proj(out)

    # A pass

    def is_ours(self, cache: Any, mask: Any, pass_: Pass) -> bool:
        is_plain = pass_.compiler is None and pass_.attention_rows == 0 and pass_.fused
        return not is_plain or isinstance(cache, MixedKVRows)

    def run(self, x: mx.array, mask: mx.array | str | None, cache: Any, pass_: Pass) -> mx.array:
        start = start_of(cache)
        x, for_join, queries, keys, gates = pass_.call(before_attention, self, x, *start)
        out = self.through_cache(queries, keys, mask, cache, pass_, is_rotated=bool(start))
        return pass_.call(after_attention, self, x, out, gates, for_join)

    def through_cache(
        self, queries: Arrays, keys: Arrays, mask: Any, cache: Any, pass_: Pass, *, is_rotated: bool
    ) -> mx.array:
        """Update the cache, and attend: the results of ``project`` -> [B, Hq, T, D]"""
        if isinstance(cache, MixedKVRows):  # the rows that are quantized, and the others, each by themselves
            out = mx.zeros_like(queries[0])
            for rows, part in cache.parts:
                b = mx.array(rows)
                part.ends = cache.ends.of(rows)
                n = part.ends.longest + keys[0].shape[2]
                mask_of_rows = mask[b, ..., :n] if isinstance(mask, mx.array) else mask
                of_rows = [x[b] for x in queries], [x[b] for x in keys]
                out[b] = self.through_cache(*of_rows, mask_of_rows, part, pass_, is_rotated=is_rotated)
            return out
        offset = cache.offset
        first = offset + (keys[0].shape[2] - queries[0].shape[2])
        if not is_rotated:
            queries, keys = self.rotate(queries, first), self.rotate(keys, offset)
        return self.attend(queries, cache.update_and_fetch(*keys), mask, cache, first, pass_)


class GatedAttentionLayer(AttentionLayer):
    """A layer with mlx-lm's ``Qwen3NextAttention`` (0.32.2), whose queries come with gates of the output."""

    @property
    def heads(self) -> AttentionHeads:
        attention = self.self_attn
        return AttentionHeads(attention.num_attention_heads, attention.num_key_value_heads, attention.head_dim)

    def project_queries(self, normed: mx.array) -> tuple[Arrays, Arrays]:
        B, T, _ = normed.shape
        attention = self.self_attn
        queries, gate = mx.split(attention.q_proj(normed).reshape(B, T, attention.num_attention_heads, -1), 2, axis=-1)
        return [attention.q_norm(queries).transpose(0, 2, 1, 3)], [gate.reshape(B, T, -1)]

    def project_out(self, out: mx.array, *gates: mx.array) -> mx.array:
        (gate,) = gates
        return self.self_attn.o_proj(out * mx.sigmoid(gate))


def split_heads(x: mx.array, n: int, norm: Any = None) -> mx.array:
    """[B, T, n D] -> [B, n, T, D], with a norm of each head if there is one."""
    B, T, _ = x.shape
    x = x.reshape(B, T, n, -1)
    return (x if norm is None else norm(x)).transpose(0, 2, 1, 3)


def before_attention(
    layer: Any, x: mx.array, start: mx.array | None = None, query_start: mx.array | None = None, *, last: bool = False
) -> tuple[Any, ...]:
    """The first part of an attention layer, with rope if ``start`` is given, [] or [B].

    Returns, of the positions with queries, x and what ``join`` takes; then the results of ``project``.
    """
    normed, *for_join = layer.enter(x)
    queries, keys, gates = layer.project(normed, last)
    if last:
        x, *for_join = (t[:, -1:] for t in (x, *for_join))
    if start is not None:
        queries = layer.rotate(queries, start if query_start is None else query_start)
        keys = layer.rotate(keys, start)
    return x, for_join, queries, keys, gates


def after_attention(layer: Any, x: mx.array, out: mx.array, gates: Arrays, for_join: Arrays) -> mx.array:
    """The last part of such a layer, given its input x [B, T, H] and the output of attention [B, Hq, T, D]."""
    B, T, _ = x.shape
    out = out.transpose(0, 2, 1, 3).reshape(B, T, -1)  # [B, T, Hq D]
    return layer.feed_forward(layer.join(x, layer.project_out(out, *gates), *for_join))


def start_of(cache: Any) -> tuple[mx.array, ...]:
    """The positions of the next tokens of rows, [B]; empty for a prompt cache, whose offset is an index in the text."""
    return (cache.offset,) if isinstance(cache.offset, mx.array) else ()


def append_to_cache(layer: Any, x: mx.array, cache: Any) -> None:
    """Append the arrays of x [B, T, H] to the cache of an attention layer, without its output."""
    normed, *_ = layer.enter(x)
    _, keys, _ = layer.project(normed, last=True)  # MLX computes no queries here, since nothing needs them
    cache.update_and_fetch(*layer.rotate(keys, cache.offset))


def group_size(n: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """The queries of an attention call, of the n in a window, that a fused kernel of Metal takes; n if none is fused."""
    max_queries = min(FEW, HEADS * kv_heads // heads)
    if max_queries == 0 or head_dim not in SIZES_OF_FEW or (n > FEW and head_dim in SIZES_OF_MANY):
        return n
    return min(n, max_queries)


def attend(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: mx.array | str | None, pass_: Pass
) -> mx.array:
    """mlx-lm's attention, of queries [B, H, T, D] in groups of ``attention_rows``; 0 for all, ``None`` for ``group_size``.

    Without a fused kernel, Metal writes the scores of all queries to memory, and may read the keys once for each query head.
    There is none for quantized keys, which are tuples.
    """
    _, H, T, D = queries.shape
    if not pass_.fused and isinstance(keys, mx.array):
        return by_products(queries, keys, values, scale, mask)
    n = pass_.attention_rows or T
    if pass_.attention_rows is None and isinstance(keys, mx.array):
        n = group_size(T, H, keys.shape[1], D)
    if n >= T or not isinstance(keys, mx.array):
        return scaled_dot_product_attention(queries, keys, values, cache, scale=scale, mask=mask)
    out = []
    for i in range(0, T, n):
        j = min(i + n, T)
        n_keys = keys.shape[2] - (T - j if isinstance(mask, str) else 0)  # causal: up to the last query of the group
        group = queries[:, :, i:j], keys[:, :, :n_keys], values[:, :, :n_keys]
        mask_of_group = mask[..., i:j, :] if isinstance(mask, mx.array) else mask  # [..., n, N]
        out.append(scaled_dot_product_attention(*group, cache, scale=scale, mask=mask_of_group))
    return mx.concatenate(out, axis=2)


def by_products(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """Attention of queries [B, Hq, T, D] to N keys by products and a softmax in float32, for a wrong kernel of the device."""
    (B, H, T, D), (_, Hkv, N, _) = queries.shape, keys.shape
    rows = scale * queries.astype(mx.float32).reshape(B, Hkv, -1, D)  # [B, Hkv, Hq / Hkv T, D]
    scores = (rows @ keys.astype(mx.float32).swapaxes(-1, -2)).reshape(B, Hkv, -1, T, N)
    if isinstance(mask, str):  # causal
        mask = mx.arange(N) <= mx.arange(N - T, N)[:, None]
    if mask is not None:
        # [T, N] for all heads, [B, 1, T, N], or one of each head to add, [B, Hq, T, N]
        if mask.ndim > 2:
            mask = mask.reshape(len(mask), -1, 1 if mask.shape[1] == 1 else H // Hkv, *mask.shape[2:])
        scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask
    out = mx.softmax(scores, axis=-1).reshape(B, Hkv, -1, N) @ values.astype(mx.float32)
    return out.reshape(B, H, T, D).astype(queries.dtype)
