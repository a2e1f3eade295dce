"""A recurrent layer over a window: mlx-lm's forward pass as a pure function, split after the confirmed tokens, and recorded."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from ..caches.recurrent import recur


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
