"""The operations that a layer submits to the device, in a graph with one operation for the recurrence, as on Metal."""

import mlx.core as mx

from mlx_mtp.core.caches import recurrent
from mlx_mtp.core.layers import layer as layer_module
from tests.support.graphs import operations
from tests.support.models import model_of


def one_operation(native, inputs, state, mask=None):
    """Depends on all inputs of the recurrence, and has the shapes of its outputs."""
    v = inputs[2]
    out = mx.concatenate([x.reshape(*v.shape[:2], -1) for x in inputs], axis=-1)
    return out[..., : v[0, 0].size].reshape(v.shape), mx.depends(state, out)


def test_a_window_is_two_operations_more_than_a_token_and_a_rollback_two(monkeypatch):
    """The second call of the recurrence, and joining the outputs of both."""
    layer = model_of("qwen3_5").model.layers[0]
    delta, H = layer.linear_attn, layer.input_layernorm.weight.size
    states = [mx.zeros((1, delta.conv_kernel_size - 1, delta.conv_dim))]
    states += [mx.zeros((1, delta.num_v_heads, delta.head_v_dim, delta.head_k_dim))]
    one, four = mx.ones((1, 1, H)), mx.ones((1, 4, H))
    mx.eval(states, one, four)

    monkeypatch.setattr(layer_module, "recur", one_operation)
    monkeypatch.setattr(recurrent, "recur", one_operation)
    monkeypatch.setattr(recurrent, "_rewound", recurrent.rewind)
    plain = layer_module.recurrent_layer(layer, one, *states, native=True)
    window = layer_module.recurrent_layer(layer, four, *states, native=True, n_confirmed=1)
    assert len(operations(*window)) == len(operations(*plain)) + 2

    conv_input, state, *drafts = window[3:]
    mx.eval(conv_input, state, drafts)
    confirmed = recurrent.Split(4, 1, [conv_input[:, 1:4], state], (conv_input,), tuple(drafts), True)
    for kept, n in ((1, 0), (2, 2)):
        (rewound,) = recurrent.rewound([confirmed], [kept])
        assert len(operations(*rewound)) == n
