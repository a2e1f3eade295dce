"""Compiled passes: the same bits as without, for weights that change, with a bounded number of traces."""

import copy
import itertools

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_mtp import BatchGenerator, batch_generate, load, make_prompt_cache, mtp_generate_step, stream_generate
from mlx_mtp.core import traces
from mlx_mtp.core.batch.generate_step import prefill
from mlx_mtp.core.decoding import planner
from mlx_mtp.core.layers import compiled
from mlx_mtp.core.layers.compiled import Compiler
from mlx_mtp.core.layers.mtp import run_head
from mlx_mtp.core.models.head_weights import quantize_head
from mlx_mtp.core.pacing.depth import Depth
from mlx_mtp.core.pacing.step_times import PLAIN_PLAN
from tests.support.batches import run
from tests.support.decoding import PROMPT, WINDOW, mtp, rows_of
from tests.support.models import FAMILIES, PACK, TRAINED, arrays_equal, deep_model, tiny_model, trace_anew

# The CPU backend multiplies gathered matrices in float32 alone, so experts are in float32. Each form takes kernels of its own.
SLOW_FORMS = [
    *((family, mx.float32, bits) for family, bits in zip(FAMILIES, (4, None, 4))),
    *(("qwen3_5", mx.bfloat16, bits) for bits in (None, 8)),
    *((family, mx.float16, None) for family in ("qwen3_5", PACK)),
]
FORMS = [
    *((family, mx.float32, bits) for family, bits in zip(FAMILIES, (None, 4, None, None))),
    *(pytest.param(*form, marks=pytest.mark.slow) for form in SLOW_FORMS),
]


def passes(model, is_compiled: bool, B: int = 1, lengths=(1, 2, 5), kv_bits: int | None = None) -> list:
    """What windows of these lengths, plain steps and the head return and leave in the caches, of B sequences."""
    compiler = Compiler() if is_compiled else None
    prompts, head = mx.stack([mx.roll(PROMPT, b) for b in range(B)]), KVCache()
    _, hidden = model(prompts, return_hidden=True)
    rows, seen = (
        rows_of(model, kv_bits, prompts),
        [run_head(model, hidden[:, :-1], prompts[:, 1:], head, compiler=compiler)],
    )
    for T in lengths:
        window = mx.broadcast_to(WINDOW[:T], (B, T))
        options = {"record": T > 1, "compiler": compiler}
        logits, hidden = rows.run(model, window, return_hidden=True, **options)
        seen += [logits, hidden, *rows.states, run_head(model, hidden, window, head, compiler=compiler)]
        rows.commit([max(T // 2, 1)] * B)
        seen += rows.state.recurrent
    mx.eval(seen)
    return seen


def assert_equal(model, **options) -> None:
    assert arrays_equal(passes(model, True, **options), passes(model, False, **options))


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


def doubled(linear):
    return Doubled(64, 64, False).update(linear.parameters()).eval()


CHANGES = {
    "other weights": lambda model: model.update(tree_map(lambda p: p * 0.9, model.parameters())),
    "an array": lambda model: setattr(model.layers[0].linear_attn, "A_log", model.layers[0].linear_attn.A_log + 1),
    "quantization": lambda model: nn.quantize(model, 32, 8),
    "of one module": lambda model: nn.quantize(model.layers[0].mlp, 32, 4),
    "of the head": lambda model: quantize_head(model.mtp, 4),
    "an adapter": lambda model: with_adapter(model, 2.0),
    "another class": lambda model: setattr(a := model.layers[1].self_attn, "o_proj", doubled(a.o_proj)),
    "another class in the head": lambda model: setattr(mlp := model.mtp.layers[0].mlp, "up_proj", doubled(mlp.up_proj)),
    "other bits of one": lambda model: setattr(mlp := model.layers[0].mlp, "up_proj", mlp.up_proj.to_quantized(32, 8).eval()),
    "a norm's eps": lambda model: setattr(model.layers[0].input_layernorm, "eps", 0.5),
    "the eps of the head's norm": lambda model: setattr(model.mtp.norm, "eps", 0.5),
    "the rope's base": lambda model: setattr(model.layers[1].self_attn.rope, "base", 10.0),
    "the base of the head's rope": lambda model: setattr(model.mtp.layers[0].self_attn.rope, "base", 10.0),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_is_seen(change):
    model = tiny_model("qwen3_5")
    before = passes(model, True, lengths=(1, 3))
    change(model)
    after = passes(model, True, lengths=(1, 3))
    assert not arrays_equal(after, before)
    assert arrays_equal(after, passes(model, False, lengths=(1, 3)))


def begin_with(prompt):
    return lambda model: lambda: mtp(prompt, model, max_tokens=8)


def begin_after_a_prompt_cache(model):
    before = make_prompt_cache(model)
    prefill(PROMPT, model, prompt_cache=before)
    return lambda: mtp(WINDOW[:1], model, max_tokens=8, prompt_cache=copy.deepcopy(before))


def begin_batch(model):
    generator = BatchGenerator(model, num_draft_tokens=2)

    def generate():
        uids = generator.insert([PROMPT.tolist(), [1]], max_tokens=[8, 8])
        texts = run(generator)
        return [texts[uid].tokens for uid in uids]

    return generate


def begin_joining(model):
    generator = BatchGenerator(model, num_draft_tokens=2)
    generator.insert([PROMPT.tolist()], max_tokens=[400])
    run(generator, n_steps=4)

    def generate():
        (uid,) = generator.insert([[3]], max_tokens=[8])
        texts = {}
        while uid not in texts or texts[uid].finish_reason is None:
            run(generator, texts, 1)
        return texts[uid].tokens

    return generate


GENERATIONS = {
    "with drafts": begin_with(PROMPT),
    "a prompt of one token": begin_with(PROMPT[:1]),
    "one token after a prompt cache": begin_after_a_prompt_cache,
    "a batch": begin_batch,
    "one joins": begin_joining,
}  # fmt: skip


@pytest.mark.parametrize("begin", GENERATIONS.values(), ids=GENERATIONS)
def test_a_number_that_changes_between_two_generations_is_seen(begin):
    model = tiny_model("qwen3_5")
    with_adapter(model, 4.0)
    generate = begin(model)
    before = generate()
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.scale = 2.0
    after = generate()
    model.drafting.compiled = False
    assert after == generate() != before


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


def test_a_step_that_was_traced_is_not_timed(monkeypatch):
    made, timed = itertools.accumulate(n == 4 for n in itertools.count()), []

    class Plain(Depth):
        def for_text(self):
            return self

        def next(self, *args, **kwargs):
            return PLAIN_PLAN

        def observe(self, plan, n_accepted, seconds, *args, **kwargs):
            timed.append(seconds is not None)

    monkeypatch.setattr(planner, "n_traces", lambda: next(made))
    steps = mtp_generate_step(mx.array([1, 2, 3]), tiny_model("qwen3_5"), max_tokens=9, num_draft_tokens=Plain(8))
    assert len([*steps]) == 9
    assert timed == [False, True, True, False, True, True, True]  # the first follows a step that nobody chose


def test_a_step_that_makes_a_trace_is_not_in_the_speed(trained, monkeypatch):
    """On a clock on which a step takes one second, and a trace 100 more."""
    trace_anew(monkeypatch)
    model, tokenizer = trained
    seen, now = 0, 0

    def clock():
        nonlocal seen, now
        now += 1 + 100 * (traces.n_traces() - seen)
        seen = traces.n_traces()
        return now

    monkeypatch.setattr(planner, "perf_counter", clock)
    options = dict(max_tokens=24, num_draft_tokens=2, copy_drafts="off")
    *_, last = stream_generate(model, tokenizer, "def f(x):\n", **options)
    assert 1 <= last.generation_tps <= 3
    assert now > 500
    prompts = [tokenizer.encode(text) for text in ("def f(x):\n", "import os\n")]
    for counts in batch_generate(model, tokenizer, prompts, **options).counts:
        assert 1 <= counts.tokens_per_second <= 3
        assert 3 < counts.seconds < 24
    *_, only = stream_generate(model, tokenizer, "def f(x):\n", **(options | {"max_tokens": 1}))
    assert only.generation_tps > 3  # of all of the time


@pytest.mark.parametrize("pieces", [1, 2])
def test_pieces_are_the_whole(monkeypatch, pieces):
    model, sent = deep_model("qwen3_5"), []
    want = [mtp(PROMPT, model, max_tokens=10, num_draft_tokens=k) for k in (0, 3)]
    model.drafting.pieces = pieces
    assert [mtp(PROMPT, model, max_tokens=10, num_draft_tokens=k) for k in (0, 3)] == want
    original = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (sent.append(arrays), original(*arrays)))
    model(WINDOW[None, :3], cache=model.make_cache(), record=True, compiler=Compiler())
    assert len(sent) == 2 // pieces  # of two attention layers
