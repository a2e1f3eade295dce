"""Recurrent layers, with mlx-lm's ``GatedDeltaNet`` (0.32.2), which can roll back to any token of a window."""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from ..caches.recurrent import RecurrentCache, Split, State, inputs_of_recurrence, is_native, recur
from ..caches.validation import are_states
from ..pacing import MAX_WINDOW
from .layer import Layer
from .passes import Pass


class RecurrentHeads(NamedTuple):
    """The heads of a recurrence, on this rank, and their dimensions."""

    keys: int
    values: int
    key_size: int
    value_size: int


class RecurrentLayer(Layer):
    """A layer with the projections of Qwen3.5."""

    is_linear = True
    linear_attn: Any

    @property
    def heads(self) -> RecurrentHeads:
        delta = self.linear_attn
        return RecurrentHeads(delta.num_k_heads, delta.num_v_heads, delta.head_k_dim, delta.head_v_dim)

    @property
    def states(self) -> list[State]:
        """The arrays of the cache."""
        delta, heads = self.linear_attn, self.heads
        return [
            State((delta.conv_kernel_size - 1, delta.conv_dim)),  # the last inputs of the convolution
            State((heads.values, heads.value_size, heads.key_size), mx.float32),
        ]

    def make_cache(self) -> RecurrentCache:
        return RecurrentCache(size=len(self.states))

    def fits(self, cache: Any) -> bool:
        return are_states(cache, self.states)

    def project(self, normed: mx.array) -> tuple[mx.array, ...]:
        """[B, T, H] -> the inputs of the convolution [B, T, C], z [B, T, Hv, Dv], and those of decay and beta [B, T, Hv]"""
        delta = self.linear_attn
        z = delta.in_proj_z(normed).reshape(*normed.shape[:2], delta.num_v_heads, delta.head_v_dim)
        return delta.in_proj_qkv(normed), z, delta.in_proj_a(normed), delta.in_proj_b(normed)

    def embed(self, x: mx.array, arrays: list[mx.array], pass_: Pass) -> tuple[mx.array, list[mx.array]]:
        """Change the layer's input -> it, and the further last inputs that the layer holds, each with the new ones."""
        return x, []

    def is_ours(self, cache: Any, mask: Any, pass_: Pass) -> bool:
        return pass_.n_confirmed > 0 or (mask is None and bool(pass_.native or pass_.compiler is not None))

    def run(self, x: mx.array, mask: Any, cache: Any, pass_: Pass) -> mx.array:
        T = x.shape[1]
        arrays = cache.cache
        if arrays[0] is None:  # before the first token
            arrays = [mx.zeros((len(x), *s.shape), s.dtype or x.dtype) for s in self.states]
        x, further = self.embed(x, arrays, pass_)
        numbers = {"n_confirmed": pass_.n_confirmed, "native": pass_.native}
        x, conv_state, state, *split = pass_.call(recurrent_layer, self, x, *arrays[:2], **numbers)
        if split:
            n = pass_.n_confirmed
            conv_input, confirmed, *drafts = split
            last_inputs = (conv_input, *further)
            first, *others = (x[:, n : n + x.shape[1] - T] for x in last_inputs)
            cache.split = Split(T, n, [first, confirmed, *others], last_inputs, tuple(drafts), pass_.native)
        cache.cache = [conv_state, state, *(mx.contiguous(last[:, T:]) for last in further)]
        cache.advance(T)
        return x


def recurrent_layer(
    layer: Any, x: mx.array, conv_state: mx.array, state: mx.array, *, native: bool | None, n_confirmed: int = 0
) -> tuple[mx.array, ...]:
    """A recurrent layer, of x [B, T, H].

    Returns its output, and both states after all tokens. With drafts after n = ``n_confirmed`` tokens, the recurrence's call is
    split there, and returned are also the inputs of the convolution [B, K - 1 + T, C], the state between the two calls, and the
    inputs of the second: q, k, v and the gates g, beta, each [B, T - n, ...]. ``native`` is as of ``is_native``.
    """
    delta = layer.linear_attn
    B, T, _ = x.shape
    native = is_native(native, delta.head_k_dim)
    normed, *for_join = layer.enter(x)
    qkv, z, a, b = layer.project(normed)

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
    out = layer.feed_forward(layer.join(x, out, *for_join))
    return (out, conv_state, state, *split)
