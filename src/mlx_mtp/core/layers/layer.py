"""A decoder layer as pure functions around its cache, which can be compiled: see ``compiled.py``.

A recurrent layer is one function, of its input and its states. An attention layer is two, before and after its cache and
attention, since the number of tokens changes at every step. A pass that is not compiled, and has neither drafts nor groups of
queries, runs mlx-lm's own layer.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from ..caches.indexed import NAMES, IndexedKVCache
from ..caches.recurrent import RecurrentCache, Split, State, inputs_of_recurrence, is_native, recur
from ..caches.rows import MixedKVRows
from .drafting import MAX_WINDOW
from .passes import Pass, current_pass

# The routing of MLX 0.32.4, ``ScaledDotProductAttention::use_fallback`` in backend/metal/scaled_dot_product_attention.cpp.
FEW = 8  # queries of the kernel for few queries
HEADS = 32  # of all queries of such a call, for each key-value head
SIZES_OF_FEW, SIZES_OF_MANY = (64, 96, 128, 256), (64, 80, 128)  # dimensions of a head


class Layer:
    """A decoder layer. List it before mlx-lm's ``DecoderLayer`` or ``Qwen3NextDecoderLayer`` in the bases."""

    is_linear: bool
    linear_attn: Any
    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    @property
    def dtype(self) -> mx.Dtype:
        return self.input_layernorm.weight.dtype

    @property
    def states(self) -> list[State]:
        """The arrays of the cache of a recurrent layer."""
        delta = self.linear_attn
        return [
            State((delta.conv_kernel_size - 1, delta.conv_dim)),  # the last inputs of the convolution
            State((delta.num_v_heads, delta.head_v_dim, delta.head_k_dim), mx.float32),
        ]

    @property
    def row_sizes(self) -> dict[str, tuple[int, int]]:
        """The heads and dimensions of the arrays of the cache of an attention layer, by name."""
        return dict.fromkeys(NAMES, (self.self_attn.num_key_value_heads, self.self_attn.head_dim))

    def make_cache(self) -> Any:
        if self.is_linear:
            return RecurrentCache(size=len(self.states))
        return KVCache() if len(self.row_sizes) == len(NAMES) else IndexedKVCache()

    def enter(self, x: mx.array) -> tuple[mx.array, ...]:
        """The input of the layer's first part, [B, T, H], and what ``join`` takes, given the layer's input x."""
        return (self.input_layernorm(x),)

    def join(self, x: mx.array, out: mx.array, *ways: mx.array) -> mx.array:
        """Add the output of the first part, [B, T, H]."""
        return x + out

    def feed_forward(self, x: mx.array) -> mx.array:
        """Run the second part, and add its output."""
        return x + self.mlp(self.post_attention_layernorm(x))

    def project_recurrent(self, normed: mx.array) -> tuple[mx.array, ...]:
        """[B, T, H] -> the inputs of a recurrent layer's convolution [B, T, C], z [B, T, Hv, Dv], and those of decay and beta
        [B, T, Hv], by default as in Qwen3.5.
        """
        delta = self.linear_attn
        z = delta.in_proj_z(normed).reshape(*normed.shape[:2], delta.num_v_heads, delta.head_v_dim)
        return delta.in_proj_qkv(normed), z, delta.in_proj_a(normed), delta.in_proj_b(normed)

    def embed(self, x: mx.array, held: list[mx.array], this: Pass) -> tuple[mx.array, list[mx.array]]:
        """Change the input of a recurrent layer -> it, and the further last inputs that it holds, each with the new ones."""
        return x, []

    def index(self, normed: mx.array) -> tuple[mx.array, ...]:
        """The queries [B, Hi, T, Di] and keys [B, 1, T, Di] of an attention layer's indexer; empty without one."""
        return ()

    def select(self, mask: Any, queries: mx.array, keys: mx.array, offset: int | mx.array) -> Any:
        """The mask of attention to the tokens that the indexer selects, given the index of the first query, [B]."""
        raise NotImplementedError

    def __call__(self, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
        this = current_pass()
        if cache is not None and self.is_linear:
            if this.n_confirmed > 0 or ((this.native or this.compiler is not None) and mask is None):
                return self.recur(x, cache, this)
        elif cache is not None:
            is_plain = this.compiler is None and this.attention_rows == 0 and this.fused
            if not is_plain or isinstance(cache, MixedKVRows):
                return self.attend(x, mask, cache, this)
        return super().__call__(x, mask, cache)  # type: ignore[misc]

    def recur(self, x: mx.array, cache: Any, this: Pass) -> mx.array:
        """Run a recurrent layer over a window or one token, and update its cache."""
        T, held = x.shape[1], cache.cache
        if held[0] is None:  # before the first token
            held = [mx.zeros((len(x), *s.shape), s.dtype or x.dtype) for s in self.states]
        x, further = self.embed(x, held, this)
        numbers = {"n_confirmed": this.n_confirmed, "native": this.native}
        x, conv_state, state, *split = this.call(recurrent_layer, self, x, *held[:2], **numbers)
        if split:
            n, (conv_input, confirmed, *drafts) = this.n_confirmed, split
            last_inputs = (conv_input, *further)
            first, *others = (x[:, n : n + x.shape[1] - T] for x in last_inputs)
            cache.split = Split(T, n, [first, confirmed, *others], last_inputs, tuple(drafts), this.native)
        cache.cache = [conv_state, state, *(mx.contiguous(own[:, T:]) for own in further)]
        cache.advance(T)
        return x

    def attend(self, x: mx.array, mask: mx.array | str | None, cache: Any, this: Pass) -> mx.array:
        start = start_of(cache)
        x, gate, ways, arrays = this.call(before_attention, self, x, *start)
        out = self.attention(arrays, mask, cache, this, is_rotated=bool(start))
        x = this.call(after_attention, self, x, out, gate, *ways)
        this.n_attended += 1
        if this.pieces is not None and this.n_attended % this.pieces == 0:
            mx.async_eval(x)
        return x

    def attention(self, arrays: Any, mask: Any, cache: Any, this: Pass, *, is_rotated: bool) -> mx.array:
        """Update an attention layer's cache, and attend: by the arrays of ``before_attention``."""
        if isinstance(cache, MixedKVRows):  # the rows that are quantized, and the others, each by themselves
            out = mx.zeros_like(arrays[0])  # [B, Hq, T, D]
            for rows, part in cache.parts:
                b, own_mask, part.ends = mx.array(rows), mask, cache.ends.of(rows)
                if isinstance(mask, mx.array):
                    own_mask = mask[b, ..., : part.ends.longest + arrays[1].shape[2]]
                out[b] = self.attention([x[b] for x in arrays], own_mask, part, this, is_rotated=is_rotated)
            return out
        queries, keys, values, *index = arrays
        offset, rope, skipped = cache.offset, self.self_attn.rope, keys.shape[2] - queries.shape[2]
        if not is_rotated:
            queries, keys = rope(queries, offset=offset + skipped), rope(keys, offset=offset)
        keys, values, *index_keys = cache.update_and_fetch(keys, values, *index[1:])
        if index:
            queries = mx.depends(queries, index_keys)  # otherwise they would not be computed where none are needed
            mask = self.select(mask, index[0][:, :, skipped:], index_keys[0], offset + skipped)
        return attend(queries, keys, values, cache, self.self_attn.scale, mask, this)


def recurrent_layer(
    layer: Any, x: mx.array, conv_state: mx.array, state: mx.array, *, native: bool | None, n_confirmed: int = 0
) -> tuple[mx.array, ...]:
    """A decoder layer with mlx-lm's ``GatedDeltaNet`` (0.32.2), of x [B, T, H].

    Returns its output, and both states after all tokens. With drafts after n = ``n_confirmed`` tokens, the recurrence's call is
    split there, and returned are also the inputs of the convolution [B, K - 1 + T, C], the state between the two calls, and the
    inputs of the second: q, k, v and the gates g, beta, each [B, T - n, ...]. ``native`` is as of ``is_native``.
    """
    delta, (B, T, _) = layer.linear_attn, x.shape
    native = is_native(native, delta.head_k_dim)
    normed, *ways = layer.enter(x)
    qkv, z, a, b = layer.project_recurrent(normed)

    conv_input = mx.concatenate([conv_state, qkv], axis=1)  # [B, K - 1 + T, C]
    conv_state = conv_input[:, 1 - delta.conv_kernel_size :]
    if T > MAX_WINDOW:  # a slice keeps the whole array alive
        conv_state = mx.contiguous(conv_state)
    conv_out = nn.silu(delta.conv1d(conv_input))  # [B, T, C]
    q, k, v = (
        t.reshape(B, T, h, d)
        for t, h, d in zip(
            mx.split(conv_out, [delta.key_dim, 2 * delta.key_dim], -1),
            [delta.num_k_heads, delta.num_k_heads, delta.num_v_heads],
            [delta.head_k_dim, delta.head_k_dim, delta.head_v_dim],
        )
    )
    q, k = normalize_qk(q, k, inv_scale=delta.head_k_dim**-0.5, eps=1e-6)

    inputs = inputs_of_recurrence(native, q, k, v, compute_g(delta.A_log, a, delta.dt_bias), mx.sigmoid(b))
    split: tuple[mx.array, ...] = ()
    if n_confirmed > 0:
        confirmed, state = recur(native, [t[:, :n_confirmed] for t in inputs], state)
        drafts = tuple(t[:, n_confirmed:] for t in inputs)
        split = (conv_input, state, *drafts)
        out, state = recur(native, drafts, state)
        out = mx.concatenate([confirmed, out], axis=1)  # [B, T, Hv, Dv]
    else:
        out, state = recur(native, inputs, state)  # [B, T, Hv, Dv]
    out = delta.out_proj(delta.norm(out.astype(v.dtype), z).reshape(B, T, -1))
    if (group := getattr(delta, "sharding_group", None)) is not None:  # in Qwen3-Next, ``out_proj`` sums by itself
        out = mx.distributed.all_sum(out, group=group)
    out = layer.feed_forward(layer.join(x, out, *ways))
    return (out, conv_state, state, *split)


def before_attention(
    layer: Any, x: mx.array, start: mx.array | None = None, query_start: mx.array | None = None, *, last: bool = False
) -> tuple[Any, ...]:
    """The first part of a layer with mlx-lm's ``Qwen3NextAttention`` (0.32.2), with rope if ``start`` is given, [] or [B].

    Returns, of the positions with queries, x, the gate [B, T, Hq D] and what ``join`` takes; then queries [B, Hq, T, D], keys
    and values [B, Hkv, T, D], and those of ``index``.
    """
    normed, *ways = layer.enter(x)
    keys, values = keys_and_values_of(layer.self_attn, normed)
    index = layer.index(normed)
    if last:
        x, normed, *ways = (t[:, -1:] for t in (x, normed, *ways))
    (B, T, _), own = normed.shape, layer.self_attn
    queries, gate = mx.split(own.q_proj(normed).reshape(B, T, own.num_attention_heads, -1), 2, axis=-1)
    queries, gate = own.q_norm(queries).transpose(0, 2, 1, 3), gate.reshape(B, T, -1)
    if start is not None:
        queries = own.rope(queries, offset=start if query_start is None else query_start)
        keys = own.rope(keys, offset=start)
    return x, gate, ways, (queries, keys, values, *index)


def start_of(cache: Any) -> tuple[mx.array, ...]:
    """The positions of the next tokens of rows, [B]; empty for a prompt cache, whose offset is an index in the text."""
    return (cache.offset,) if isinstance(cache.offset, mx.array) else ()


def keys_and_values_of(attention: Any, x: mx.array) -> tuple[mx.array, mx.array]:
    """x [B, T, H] after the layer's norm -> keys before rope, and values, [B, Hkv, T, D] each"""
    B, T, _ = x.shape
    keys, values = (p(x).reshape(B, T, attention.num_key_value_heads, -1) for p in (attention.k_proj, attention.v_proj))
    return attention.k_norm(keys).transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)


def append_to_cache(layer: Any, x: mx.array, cache: Any) -> None:
    """Append the arrays of x [B, T, H] to the cache of an attention layer, without its output."""
    normed, *_ = layer.enter(x)
    keys, values = keys_and_values_of(layer.self_attn, normed)
    cache.update_and_fetch(layer.self_attn.rope(keys, offset=cache.offset), values, *layer.index(normed)[1:])


def after_attention(layer: Any, x: mx.array, out: mx.array, gate: mx.array, *ways: mx.array) -> mx.array:
    """The last part of such a layer, given its input x [B, T, H] and the output of attention [B, Hq, T, D]."""
    B, T, _ = x.shape
    out = out.transpose(0, 2, 1, 3).reshape(B, T, -1)  # [B, T, Hq D]
    return layer.feed_forward(layer.join(x, layer.self_attn.o_proj(out * mx.sigmoid(gate)), *ways))


def group_size(n: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """The queries of an attention call, of the n in a window, that a fused kernel of Metal takes; n if none is fused."""
    max_queries = min(FEW, HEADS * kv_heads // heads)
    if max_queries == 0 or head_dim not in SIZES_OF_FEW or (n > FEW and head_dim in SIZES_OF_MANY):
        return n
    return min(n, max_queries)


def attend(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: mx.array | str | None, this: Pass
) -> mx.array:
    """mlx-lm's attention, of queries [B, H, T, D] in groups of ``attention_rows``; 0 for all, ``None`` for ``group_size``.

    Without a fused kernel, Metal writes the scores of all queries to memory, and may read the keys once for each query head.
    There is none for quantized keys, which are tuples.
    """
    _, H, T, D = queries.shape
    if not this.fused and isinstance(keys, mx.array):
        return by_products(queries, keys, values, scale, mask)
    n = this.attention_rows or T
    if this.attention_rows is None and isinstance(keys, mx.array):
        n = group_size(T, H, keys.shape[1], D)
    if n >= T or not isinstance(keys, mx.array):
        return scaled_dot_product_attention(queries, keys, values, cache, scale=scale, mask=mask)
    out = []
    for i in range(0, T, n):
        j = min(i + n, T)
        n_keys = keys.shape[2] - (T - j if isinstance(mask, str) else 0)  # causal: up to the last query of the group
        group = queries[:, :, i:j], keys[:, :, :n_keys], values[:, :, :n_keys]
        own_mask = mask[..., i:j, :] if isinstance(mask, mx.array) else mask  # [..., n, N]
        out.append(scaled_dot_product_attention(*group, cache, scale=scale, mask=own_mask))
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
        scores = mx.where(mask if mask.ndim == 2 else mask[:, :, None], scores, -mx.inf)
    out = mx.softmax(scores, axis=-1).reshape(B, Hkv, -1, N) @ values.astype(mx.float32)
    return out.reshape(B, H, T, D).astype(queries.dtype)
