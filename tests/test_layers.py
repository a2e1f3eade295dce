"""Layers: compiled passes, attention in groups of queries as on Metal, and the operations that a recurrent layer submits."""

from dataclasses import replace

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_mtp import BatchGenerator, batch_generate, load, mtp_generate_step, stream_generate
from mlx_mtp.core import traces
from mlx_mtp.core.caches import recurrent
from mlx_mtp.core.decoding import planner
from mlx_mtp.core.layers import compiled, passes, recurrence
from mlx_mtp.core.layers.attention import attend, group_size
from mlx_mtp.core.layers.compiled import Compiler
from mlx_mtp.core.layers.mtp import run_head
from mlx_mtp.core.layers.passes import Pass
from mlx_mtp.core.models.head_weights import quantize_head
from mlx_mtp.core.pacing.depth import Depth
from mlx_mtp.core.pacing.step_times import Plan
from tests.support.batches import run
from tests.support.decoding import PROMPT, WINDOW, mtp, plain, rows_of
from tests.support.graphs import operations
from tests.support.models import GROUPED, PACK, QWEN, TRAINED, arrays_equal, deep_model, tiny_model, trace_anew

# The CPU backend multiplies gathered matrices in float32 alone, so experts are in float32. Each form takes kernels of its own.
SLOW_FORMS = [
    *((family, mx.float32, bits) for family, bits in zip(QWEN, (4, None, 4))),
    *(("qwen3_5", mx.bfloat16, bits) for bits in (None, 8)),
    *((family, mx.float16, None) for family in ("qwen3_5", PACK)),
]
FORMS = [
    *((family, mx.float32, bits) for family, bits in zip((*QWEN, PACK), (None, 4, None, None))),
    *(pytest.param(*form, marks=pytest.mark.slow) for form in SLOW_FORMS),
]


def run_passes(model, is_compiled: bool, B: int = 1, lengths=(1, 2, 5), kv_bits: int | None = None) -> list:
    """What windows of these lengths, plain steps and the head return and leave in the caches, of B sequences."""
    compiler = Compiler() if is_compiled else None
    prompts, head = mx.stack([mx.roll(PROMPT, b) for b in range(B)]), KVCache()
    _, hidden = model(prompts, return_hidden=True)
    rows = rows_of(model, kv_bits, prompts)
    seen = [run_head(model, hidden[:, :-1], prompts[:, 1:], head, compiler=compiler)]
    for T in lengths:
        window = mx.broadcast_to(WINDOW[:T], (B, T))
        logits, hidden = rows.run(model, window, return_hidden=True, n_confirmed=1, compiler=compiler)
        seen += [logits, hidden, *rows.states, run_head(model, hidden, window, head, compiler=compiler)]
        rows.keep([max(T // 2, 1)] * B)
        seen += rows.state.recurrent
    mx.eval(seen)
    return seen


def assert_equal(model, **options) -> None:
    moved = (
        "mlx-lm's attention layers compute otherwise, or a compiled layer does: core/layers/attention.py must follow"
    )
    assert arrays_equal(run_passes(model, True, **options), run_passes(model, False, **options)), moved


@pytest.mark.parametrize(("family", "dtype", "bits"), FORMS, ids=str)
def test_compiled_passes_have_the_same_bits(family, dtype, bits):
    model = deep_model(family, dtype=dtype)
    if bits is not None:
        nn.quantize(model, 32, bits)
    assert_equal(model)
    assert_equal(model, B=3, lengths=(1, 3))


def test_the_greatest_window_of_quantized_keys_and_a_trained_model_have_the_same_bits(trained):
    """The latter in bfloat16."""
    assert_equal(tiny_model("qwen3_5"), lengths=(17, 1), kv_bits=8)
    assert_equal(trained[0])


# What changes between two generations


def with_adapter(model, scale: float):
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": scale, "dropout": 0.0, "keys": ["mlp.down_proj"]})
    noise = lambda p: mx.random.normal(p.shape, key=mx.random.key(3)) * 0.5  # noqa: E731
    model.update(tree_map(noise, model.trainable_parameters(), is_leaf=lambda p: isinstance(p, mx.array)))
    model.eval()


class Doubled(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


CHANGES = {
    "other weights": lambda model: model.update(tree_map(lambda p: p * 0.9, model.parameters())),
    "an array": lambda model: setattr(model.layers[0].linear_attn, "A_log", model.layers[0].linear_attn.A_log + 1),
    "quantization": lambda model: nn.quantize(model, 32, 8),
    "of the head": lambda model: quantize_head(model.mtp, 4),
    "an adapter": lambda model: with_adapter(model, 2.0),
    "another class": lambda model: setattr(model.layers[1].self_attn.o_proj, "__class__", Doubled),
    "a norm's eps": lambda model: setattr(model.layers[0].input_layernorm, "eps", 0.5),
    "the base of the head's rope": lambda model: setattr(model.mtp.layers[0].self_attn.rope, "base", 10.0),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_is_seen(change):
    model = tiny_model("qwen3_5")
    before = run_passes(model, True, lengths=(1, 3))
    change(model)
    after = run_passes(model, True, lengths=(1, 3))
    assert not arrays_equal(after, before)
    assert arrays_equal(after, run_passes(model, False, lengths=(1, 3)))


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_number_that_changes_between_two_generations_is_seen(is_alone):
    """Also by a text that joins another one."""
    model = tiny_model("qwen3_5")
    with_adapter(model, 4.0)
    generator = BatchGenerator(model, num_draft_tokens=2)
    if not is_alone:
        generator.insert([PROMPT.tolist()], max_tokens=[400])
        run(generator, n_steps=4)

    def generate():
        (uid,) = generator.insert([[3]], max_tokens=[8])
        return run(generator, n_steps=12)[uid].tokens

    before = generate()
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.scale = 2.0
    after = generate()
    model.device = replace(model.device, compiled=False)
    assert after == generate() != before
    assert len(after) == 8


def test_modules_cannot_be_replaced_within_a_generation():
    model = tiny_model("qwen3_5")
    steps = mtp_generate_step(PROMPT, model, num_draft_tokens=2)
    next(steps)
    nn.quantize(model, 32, 4)
    with pytest.raises(ValueError, match="cannot be replaced while it generates"):
        list(steps)


LAYERS = {"recurrent_layer", "before_attention", "after_attention"}


def traced() -> set[str]:
    return {function.__name__ for function in traces._made.of}


def one_token(model):
    model(WINDOW[None, :1], cache=model.make_cache(), compiler=Compiler())


def test_layers_of_one_kind_share_a_trace_and_their_number_is_bounded(monkeypatch):
    trace_anew(monkeypatch)
    model = deep_model("qwen3_5")
    for _ in range(2):
        one_token(model)
        assert traces.n_traces() == 3  # a recurrent layer, and an attention layer before and after its cache
    monkeypatch.setattr(compiled, "MAX_TRACES", 5)
    trace_anew(monkeypatch)
    model = deep_model("qwen3_5")
    for _ in range(2):
        assert_equal(model, lengths=(2, 3, 4))
    assert compiled._traces.get.cache_info().currsize == 5
    assert traces.n_traces() > 10


def test_prompts_and_training_are_not_compiled(monkeypatch):
    trace_anew(monkeypatch)
    model = tiny_model("qwen3_5")
    model(WINDOW[None], cache=model.make_cache(), compiler=Compiler())
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 2.0, "dropout": 0.5})  # its dropout is in training
    one_token(model)
    assert traces.n_traces() == 0
    model.eval()
    one_token(model)
    assert traced() >= LAYERS
    trace_anew(monkeypatch)
    model = tiny_model("qwen3_5")
    model.shard(mx.distributed.init())
    one_token(model)
    assert not traced() & LAYERS  # sums over ranks are no part of a trace


def test_modules_that_do_not_differ_in_training_are_compiled(monkeypatch):
    """nn.quantize makes new modules, which are in training: those of a quantized head, and of a model."""
    model, tokenizer = load(TRAINED, mtp_bits=8, settings=False)
    trace_anew(monkeypatch)
    mtp(tokenizer.encode("def f(x):\n"), model, max_tokens=4, num_draft_tokens=2)
    assert traced() >= LAYERS | {"_before_attention", "_after_attention"}
    trace_anew(monkeypatch)
    model = tiny_model("qwen3_5")
    nn.quantize(model, 32, 4)
    one_token(model)
    assert traced() == LAYERS


def test_every_trace_is_counted(monkeypatch):
    """MLX traces a function again for inputs of another shape, number, dtype or stream, and for weights of another dtype."""
    trace_anew(monkeypatch)
    linear, x, counted = nn.Linear(32, 32), mx.ones((1, 32)), []

    def total(module, *inputs):
        return sum(map(module, inputs))

    def run_twice(*inputs):
        for _ in range(2):
            mx.eval(Compiler().run(total, linear, *inputs))
        counted.append(traces.n_traces())

    for inputs in ((x,), (mx.ones((2, 32)),), (x, x), (x.astype(mx.float16),), (x, mx.ones((1, 32), mx.float16))):
        run_twice(*inputs)
    with mx.stream(mx.new_stream(mx.default_device())):
        run_twice(x)
    linear.set_dtype(mx.float16)
    run_twice(x)
    assert counted == [1, 2, 3, 4, 5, 6, 7]
    want = Compiler().run(total, linear, x)
    mx.disable_compile()
    try:
        assert arrays_equal([Compiler().run(total, linear, x) for _ in range(2)], [want] * 2)
        assert traces.n_traces() == 7
    finally:
        mx.enable_compile()


def test_a_step_that_makes_a_trace_is_not_timed(trained, monkeypatch):
    """On a clock on which a step takes one second, and a trace 100 more."""
    trace_anew(monkeypatch)
    model, tokenizer = trained
    seen, now = 0, 0

    def clock():
        nonlocal seen, now
        now += 1 + 100 * (traces.n_traces() - seen)
        seen = traces.n_traces()
        return now

    observed = []
    monkeypatch.setattr(planner, "perf_counter", clock)
    monkeypatch.setattr(Depth, "next", lambda *args: Plan(2))
    monkeypatch.setattr(Depth, "observe", lambda self, plan, n, seconds, *args, **more: observed.append(seconds))
    options = dict(max_tokens=24, num_draft_tokens="auto", copy_drafts="off")
    *_, last = stream_generate(model, tokenizer, "def f(x):\n", **options)
    assert 1 <= last.generation_tps <= 3
    assert now > 500
    prompts = [tokenizer.encode(text) for text in ("def f(x):\n", "import os\n")]
    for counts in batch_generate(model, tokenizer, prompts, **options).counts:
        assert 1 <= counts.tokens_per_second <= 3
        assert 3 < counts.seconds < 24
    assert {type(seconds) for seconds in observed} == {int, type(None)}
    assert max(seconds for seconds in observed if seconds is not None) <= 3
    *_, only = stream_generate(model, tokenizer, "def f(x):\n", **(options | {"max_tokens": 1}))
    assert only.generation_tps > 3  # of all of the time


# Attention in groups of queries: what it is in one call, by the rule of Metal's fused kernels


def test_the_rule_of_metal():
    for heads, kv_heads, head_dim, sizes in (
        (24, 4, 256, {1: 1, 5: 5, 6: 5, 17: 5}),  # Qwen3.5-27B
        (16, 2, 256, {4: 4, 5: 4, 8: 4, 17: 4}),  # 35B-A3B, Qwen3-Next
        (24, 4, 128, {5: 5, 6: 5, 8: 5, 9: 9, 17: 17}),  # more than 8 have a kernel of their own
        (64, 1, 256, {1: 1, 2: 2, 17: 17}),  # not even one query is fused
        (24, 4, 192, {2: 2, 17: 17}),
    ):
        assert {n: group_size(n, heads, kv_heads, head_dim) for n in sizes} == sizes


@pytest.fixture
def calls(monkeypatch):
    """The number of queries and of keys of each call of attention."""
    calls, original = [], base.scaled_dot_product_attention

    def attention(queries, keys, *args, **kwargs):
        calls.append((queries.shape[2], (keys[0] if isinstance(keys, tuple | list) else keys).shape[2]))
        return original(queries, keys, *args, **kwargs)

    for module in ("mlx_mtp.core.layers.attention", "mlx_lm.models.qwen3_next"):
        monkeypatch.setattr(f"{module}.scaled_dot_product_attention", attention)
    return calls


@pytest.mark.parametrize("kind", ["causal", "bool", "float"])
@pytest.mark.parametrize("most", [None, 1, 17])
def test_groups_are_the_whole(calls, most, kind):
    B, T, N = 2, 9, 30
    shapes = (16, T), (2, N), (2, N)
    queries, keys, values = (mx.random.normal((B, H, n, 96), key=mx.random.key(n)) for H, n in shapes)
    may = mx.arange(N) <= mx.arange(N - T, N)[:, None]
    may = mx.stack([may, may & (mx.arange(N) >= 4)])[:, None]  # the second row is padded
    mask = {"causal": "causal", "bool": may, "float": mx.where(may, 0.0, -mx.inf)}[kind]
    got = attend(queries, keys, values, KVCache(), 0.125, mask, Pass(attention_rows=most))
    n = 4 if most is None else most or T
    ends = [min(i + n, T) for i in range(0, T, n)]
    assert calls == [(j - i * n, N - T + j if kind == "causal" else N) for i, j in enumerate(ends)]
    want = attend(queries, keys, values, KVCache(), 0.125, mask, Pass())
    # Sums in another order: a few roundings of float32.
    assert mx.abs(got - want).max() < 1e-5 * mx.abs(want).max()


@pytest.mark.parametrize(("bits", "metal"), [(None, True), (8, True), (None, False)])
def test_windows_alone_are_grouped_on_metal(calls, monkeypatch, bits, metal):
    """By the layer's own heads. There is no fused kernel for quantized keys, nor a reason to group on the CPU."""
    monkeypatch.setattr(passes, "on_metal", lambda: metal)
    model = deep_model("qwen3_5", **GROUPED)
    rows = rows_of(model, bits)
    assert calls == [(11, 11)] * 2  # two layers
    for n, before, kept in ((9, 11, 1), (4, 12, 4)):
        calls.clear()
        rows.run(model, WINDOW[None, :n], n_confirmed=1)
        grouped = [(4, 15), (4, 19), (1, 20)] if metal and not bits and n == 9 else [(n, before + n)]
        assert calls == grouped * 2
        rows.keep([kept])
    calls.clear()
    plain(PROMPT, model, max_tokens=2)  # keeps its operations
    assert {rows for rows, _ in calls} == {PROMPT.size - 1, 1}


# Operations, in a graph with one for the recurrence, as on Metal


def one_operation(native, inputs, state, mask=None):
    """Depends on all inputs of the recurrence, and has the shapes of its outputs."""
    v = inputs[2]
    out = mx.concatenate([x.reshape(*v.shape[:2], -1) for x in inputs], axis=-1)
    return out[..., : v[0, 0].size].reshape(v.shape), mx.depends(state, out)


def test_a_window_is_two_operations_more_than_a_token_and_a_rollback_two(monkeypatch):
    """The second call of the recurrence, and joining the outputs of both."""
    layer = tiny_model("qwen3_5").model.layers[0]
    delta, H = layer.linear_attn, layer.input_layernorm.weight.size
    states = [mx.zeros((1, delta.conv_kernel_size - 1, delta.conv_dim))]
    states += [mx.zeros((1, delta.num_v_heads, delta.head_v_dim, delta.head_k_dim))]
    one, four = mx.ones((1, 1, H)), mx.ones((1, 4, H))
    mx.eval(states, one, four)

    monkeypatch.setattr(recurrence, "recur", one_operation)
    monkeypatch.setattr(recurrent, "recur", one_operation)
    monkeypatch.setattr(recurrent, "_rewound", recurrent.rewind)
    plain = recurrence.recurrent_layer(layer, one, *states, native=True)
    window = recurrence.recurrent_layer(layer, four, *states, native=True, n_confirmed=1)
    assert len(operations(*window)) == len(operations(*plain)) + 2

    conv_input, state, *drafts = window[3:]
    mx.eval(conv_input, state, drafts)
    confirmed = recurrent.Split(4, 1, [conv_input[:, 1:4], state], (conv_input,), tuple(drafts), True)
    for kept, n in ((1, 0), (2, 2)):
        (rewound,) = recurrent.rewound([confirmed], [kept])
        assert len(operations(*rewound)) == n
