"""The verify pass of a GatedDeltaNet layer: mlx-lm's forward, split where the confirmed tokens end, and recorded."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

from .cache import ArraysCache


def recorded_recurrence(layer: Any, qkv: mx.array, a: mx.array, b: mx.array, cache: ArraysCache) -> mx.array:
    """Convolution and gated delta rule over a window, as in mlx-lm's ``GatedDeltaNet.__call__`` (0.32.2).

    Args:
        layer (nn.Module): mlx-lm's ``GatedDeltaNet`` or ``Qwen3NextGatedDeltaNet``.
        qkv (mx.array): The projected inputs, [B, S, C].
        a, b (mx.array): The inputs of the decay and of beta, [B, S, Hv].
        cache (ArraysCache): Its open window says how many tokens are confirmed, and takes the record.

    Returns:
        mx.array: [B, S, Hv, Dv]
    """
    B, S, _ = qkv.shape
    window, n_keep = cache.window, layer.conv_kernel_size - 1
    assert window is not None
    n = min(window.n_confirmed, S)

    conv_state = cache[0]
    if conv_state is None:
        conv_state = mx.zeros((B, n_keep, layer.conv_dim), dtype=qkv.dtype)
    conv_input = mx.concatenate([conv_state, qkv], axis=1)  # [B, K - 1 + S, C]
    cache[0] = mx.contiguous(conv_input[:, -n_keep:])
    conv_out = nn.silu(layer.conv1d(conv_input))  # [B, S, C]

    q, k, v = (
        t.reshape(B, S, h, d)
        for t, h, d in zip(
            mx.split(conv_out, [layer.key_dim, 2 * layer.key_dim], -1),
            [layer.num_k_heads, layer.num_k_heads, layer.num_v_heads],
            [layer.head_k_dim, layer.head_k_dim, layer.head_v_dim],
        )
    )
    q, k = normalize_qk(q, k, inv_scale=layer.head_k_dim**-0.5, eps=1e-6)

    inputs = (q, k, v, a, b)
    gates = (layer.A_log, layer.dt_bias)
    out, state = gated_delta_update(*(x[:, :n] for x in inputs), *gates, cache[1])
    window.n_tokens, window.conv_input, window.state, window.gates = S, conv_input, state, gates
    if n < S:
        window.inputs = tuple(x[:, n:] for x in inputs)
        rest, state = gated_delta_update(*window.inputs, *gates, state)
        out = mx.concatenate([out, rest], axis=1)  # [B, S, Hv, Dv]
    cache[1] = state
    return out
