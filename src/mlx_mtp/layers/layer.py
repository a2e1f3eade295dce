"""A decoder layer as pure functions around its cache, which can be compiled: see ``compiled.py``.

A recurrent layer is one function, of its input and its states. An attention layer is two:

    x ── before_attention ── queries, keys, values ── cache, attention ──┐
    x ───────────────────────────────────────────────────────── after_attention ── x

Cache and attention are outside of the functions, since the number of tokens changes at every step. A pass that is neither
compiled nor recorded, and has no groups of queries, runs mlx-lm's own layer.

Attention over a verify pass is in groups of queries that MLX's fused attention takes on Metal. Without a fused kernel, MLX
writes the scores of all queries to memory, and may read the keys once for each query head. Each group reads them once.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from ..caches.recurrent import ArraysCache, recur
from ..caches.rows import MixedKVRows
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

    def __call__(self, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
        this = current_pass()
        if cache is not None and self.is_linear:
            if getattr(cache, "window", None) is not None or (this.compiler is not None and mask is None):
                return self.recur(x, cache, this)
        elif cache is not None and (
            this.compiler is not None or this.attention_rows != 0 or isinstance(cache, MixedKVRows)
        ):
            return self.attend(x, mask, cache, this)
        return super().__call__(x, mask, cache)  # type: ignore[misc]

    def recur(self, x: mx.array, cache: Any, this: Pass) -> mx.array:
        """Run a recurrent layer over a window or one token, and update its cache."""
        B, T, _ = x.shape
        delta, window = self.linear_attn, cache.window if isinstance(cache, ArraysCache) else None
        conv_state, state = cache[0], cache[1]
        if conv_state is None:
            conv_state = mx.zeros((B, delta.conv_kernel_size - 1, delta.conv_dim), x.dtype)
        if state is None:
            state = mx.zeros((B, delta.num_v_heads, delta.head_v_dim, delta.head_k_dim), mx.float32)
        n_confirmed = 0 if window is None else min(window.n_confirmed, T)
        x, conv_state, state, *record = this.call(recurrent_layer, self, x, conv_state, state, n_confirmed=n_confirmed)
        if window is not None:
            window.n_tokens, (window.conv_input, window.state, *inputs) = T, record
            window.inputs = tuple(inputs)
        cache[0], cache[1] = conv_state, state
        cache.advance(T)
        return x

    def attend(self, x: mx.array, mask: mx.array | str | None, cache: Any, this: Pass) -> mx.array:
        attention, start = self.self_attn, this.start(cache)
        queries, keys, values, gate = this.call(before_attention, self, x, *start)
        if not start:
            queries, keys = (attention.rope(t, offset=cache.offset) for t in (queries, keys))
        out = attend_to(cache, queries, keys, values, attention.scale, mask, this.attention_rows)
        x = this.call(after_attention, self, x, out, gate)
        this.count_attention(x)
        return x


def recurrent_layer(
    layer: Any, x: mx.array, conv_state: mx.array, state: mx.array, n_confirmed: int
) -> tuple[mx.array, ...]:
    """A decoder layer with a GatedDeltaNet, as in mlx-lm's ``DecoderLayer`` and ``GatedDeltaNet`` (0.32.2).

    Args:
        layer (nn.Module): Its ``linear_attn`` has ``project``.
        x (mx.array): [B, T, H]
        conv_state (mx.array): The last inputs of the convolution, [B, K - 1, C].
        state (mx.array): The state of the recurrence, [B, Hv, Dv, Dk].
        n_confirmed (int): The number of leading tokens that are final; 0 if the call is not recorded.

    Returns:
        Tuple[mx.array, ...]: The output [B, T, H] and both states after all tokens. If ``n_confirmed`` is above 0, also the
          inputs of the convolution [B, K - 1 + T, C], the state of the recurrence after the confirmed tokens, and q, k, v and
          the gates g, beta of the other tokens, each [B, T - n_confirmed, ...], if there are any.
    """
    delta, (B, T, _) = layer.linear_attn, x.shape
    qkv, z, a, b = delta.project(layer.input_layernorm(x))

    conv_input = mx.concatenate([conv_state, qkv], axis=1)  # [B, K - 1 + T, C]
    conv_state = mx.contiguous(conv_input[:, 1 - delta.conv_kernel_size :])
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

    inputs = (q, k, v, compute_g(delta.A_log, a, delta.dt_bias), mx.sigmoid(b))
    if 0 < n_confirmed < T:
        out, confirmed = recur([t[:, :n_confirmed] for t in inputs], state)
        others = [t[:, n_confirmed:] for t in inputs]
        rest, state = recur(others, confirmed)
        out = mx.concatenate([out, rest], axis=1)  # [B, T, Hv, Dv]
        record = [conv_input, confirmed, *others]
    else:
        out, state = recur(inputs, state)
        record = [conv_input, state] if n_confirmed > 0 else []

    out = delta.out_proj(delta.norm(out, z).reshape(B, T, -1))
    if delta.sharding_group is not None:
        out = mx.distributed.all_sum(out, group=delta.sharding_group)
    x = x + out
    return x + layer.mlp(layer.post_attention_layernorm(x)), conv_state, state, *record


def before_attention(layer: Any, x: mx.array, start: mx.array | None = None) -> tuple[mx.array, ...]:
    """The first part of a layer with mlx-lm's ``Qwen3NextAttention`` (0.32.2).

    Args:
        x (mx.array): [B, T, H]
        start (mx.array, optional): The position of the first token, [] or [B]. Default: ``None``, without rope.

    Returns:
        Tuple[mx.array, ...]: Queries [B, Hq, T, D], keys and values [B, Hkv, T, D], and the gate [B, T, Hq D].
    """
    x = layer.input_layernorm(x)
    queries, gate = queries_of(layer.self_attn, x)
    keys, values = keys_and_values_of(layer.self_attn, x)
    if start is not None:
        queries, keys = (layer.self_attn.rope(t, offset=start) for t in (queries, keys))
    return queries, keys, values, gate


def queries_of(attention: Any, x: mx.array) -> tuple[mx.array, mx.array]:
    """x [B, T, H] after the layer's norm -> queries before rope [B, Hq, T, D], and the gate [B, T, Hq D]"""
    B, T, _ = x.shape
    queries, gate = mx.split(attention.q_proj(x).reshape(B, T, attention.num_attention_heads, -1), 2, axis=-1)
    return attention.q_norm(queries).transpose(0, 2, 1, 3), gate.reshape(B, T, -1)


def keys_and_values_of(attention: Any, x: mx.array) -> tuple[mx.array, mx.array]:
    """x [B, T, H] after the layer's norm -> keys before rope, and values, [B, Hkv, T, D] each"""
    B, T, _ = x.shape
    keys, values = (p(x).reshape(B, T, attention.num_key_value_heads, -1) for p in (attention.k_proj, attention.v_proj))
    return attention.k_norm(keys).transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)


def after_attention(layer: Any, x: mx.array, out: mx.array, gate: mx.array) -> mx.array:
    """The last part of such a layer.

    Args:
        x (mx.array): The layer's input, [B, T, H].
        out (mx.array): The output of attention, [B, Hq, T, D].
        gate (mx.array): [B, T, Hq D]

    Returns:
        mx.array: [B, T, H]
    """
    B, T, _ = x.shape
    out = out.transpose(0, 2, 1, 3).reshape(B, T, -1)  # [B, T, Hq D]
    x = x + layer.self_attn.o_proj(out * mx.sigmoid(gate))
    return x + layer.mlp(layer.post_attention_layernorm(x))


def group_size(n: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """The queries of an attention call, of the n in a window, that a fused kernel of Metal takes; n if none is fused.

    The mask may be causal or an array: the rule is the same, as there are at least as many keys as queries. Examples: 5 for
    Qwen3.5-27B, 4 for 35B-A3B, 2 for 122B-A10B and 397B-A17B.
    """
    most = min(FEW, HEADS * kv_heads // heads)
    if most == 0 or head_dim not in SIZES_OF_FEW or (n > FEW and head_dim in SIZES_OF_MANY):
        return n
    return min(n, most)


def attend_to(
    cache: Any,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    most: int | None,
) -> mx.array:
    """Add keys and values [B, Hkv, T, D] to a cache, and attend to all of it: to each part of ``MixedKVRows`` by itself.

    Returns:
        mx.array: [B, H, T, D]
    """
    if not isinstance(cache, MixedKVRows):
        keys, values = cache.update_and_fetch(keys, values)
        return attend(queries, keys, values, cache, scale, mask, most)
    out = mx.zeros_like(queries)
    for rows, part in cache.parts:
        b, own_mask = mx.array(rows), mask
        if isinstance(mask, mx.array):
            own_mask = mask[b, ..., : part.ends.longest + keys.shape[2]]
        out[b] = attend_to(part, queries[b], keys[b], values[b], scale, own_mask, most)
    return out


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
