"""The test of a device: what it finds, and that it runs once."""

import itertools
import logging
import math
from contextlib import closing
from unittest.mock import Mock

import mlx.core as mx
import pytest
from mlx_lm.models import base

import mlx_mtp
from mlx_mtp import BatchGenerator
from mlx_mtp.checkpoint import load, settings
from mlx_mtp.checkpoint.checks import kernels, self_test
from mlx_mtp.checkpoint.checks.kernels import WRONG
from mlx_mtp.core.caches.rows import Rows
from mlx_mtp.core.layers import attention as attention_module
from mlx_mtp.core.layers.compiled import Compiler
from mlx_mtp.core.pacing.step_times import TYPICAL, StepTimes
from mlx_mtp.errors import NotANumberError
from tests.support.batches import AT_ONCE, run
from tests.support.checkpoints import DATA, accepting, write_tiny
from tests.support.commands import refused
from tests.support.decoding import PROMPT, mtp, plain
from tests.support.models import FLASH, GROUPED, deep_model, tiny_model, trace_anew
from tests.support.profiles import LONG


@pytest.fixture(autouse=True)
def _few_keys(monkeypatch):
    """Attention to 4,097 keys takes seconds here."""
    monkeypatch.setattr(kernels, "LONG", 1100)


@pytest.fixture
def untimed(monkeypatch):
    """Passes are compared, and steps not timed."""
    monkeypatch.setattr(self_test, "_step_seconds", lambda *_: ([], 0.0))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", FLASH])
def test_the_cpu_gives_the_same_bits(untimed, family):
    result = self_test.run(deep_model(family, **GROUPED))
    assert (result.compiled, result.grouped, result.rolled_back, result.head_copies) == (0, 0, 0, 0)
    assert result.windows == dict.fromkeys(map(str, self_test.WIDTHS), 0.0)
    assert max(max(of.values()) for of in result.attention.values()) < 1e-5
    first, logits, windows, *_ = str(result).splitlines()
    assert first == "within rounding (1%)"
    assert logits == "differences of logits: compiled 0.00%, grouped 0.00%, rolled_back 0.00%"
    assert windows == "windows: the same bits up to 17 tokens, equal up to rounding up to 17"


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """No results, and the test runs in ``load``; the head's drafts are not counted."""
    accepting(monkeypatch, 0.9)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(load, "ensure_tested", self_test.ensure_tested)
    return tmp_path


def test_runs_once_for_a_model_and_a_version(cache_folder, monkeypatch, caplog):
    ran, result = [], self_test.SelfTest(0.01, seconds=[1.0, 1.2], draft_cost=0.1)
    monkeypatch.setattr(self_test, "run", lambda model: ran.append(model) or result)
    for _ in range(2):
        model, _ = mlx_mtp.load(str(DATA / "dense"))
    assert (len(ran), model.device.compiled, model.device.attention_rows) == (1, True, None)
    assert [model.pace.times.draft_cost, *model.pace.times.estimate[:3]] == pytest.approx([0.1, 1.0, 1.2, 1.4])
    monkeypatch.setattr(settings, "version", lambda package: "9.9")
    mlx_mtp.load(str(DATA / "dense"))
    assert len(ran) == 2
    (cache_folder / "mlx_mtp" / "self-test.json").write_text("{")
    mlx_mtp.load(str(DATA / "dense"))
    assert len(ran) == 3
    mlx_mtp.load(str(DATA / "dense"), lazy=True)
    assert (len(ran), caplog.text) == (3, "")


def test_its_times_serve_the_process_that_measured_them(cache_folder, monkeypatch):
    monkeypatch.setattr(self_test, "MAX_SECONDS", 300)
    monkeypatch.setattr(kernels, "seconds_of_a_key", lambda *_: [1e-7, 3e-7])
    results, run = [], self_test.run
    monkeypatch.setattr(self_test, "run", lambda model: results.append(run(model)) or results[-1])
    model, _ = mlx_mtp.load(str(write_tiny(cache_folder / "model", "qwen3_5")))
    seconds, estimate = dict(zip(self_test.DRAFT_LENGTHS, results[0].seconds)), model.pace.times.estimate
    assert [*seconds] == [*self_test.DRAFT_LENGTHS]
    assert estimate[: len(self_test.ROWS)] == pytest.approx([seconds[k] for k in range(len(self_test.ROWS))])
    (none, several), n_layers = results[0].key_seconds.values(), len(model.attention_layers)
    assert (none, several) == pytest.approx((n_layers * 1e-7, n_layers * 3e-7 + self_test.N_DRAFTS * 1e-7))
    of_long = model.pace.times.of_size(1, 50_000).estimate
    added = [of_long[k] - estimate[k] for k in (0, self_test.N_DRAFTS)]
    assert added == pytest.approx([50_000 * none, 50_000 * several])


def test_the_time_of_a_key_is_that_of_the_keys_between_two_numbers(monkeypatch):
    """Of attention that takes a nanosecond for each query and key."""
    monkeypatch.setattr(kernels, "attend", lambda queries, keys, *_: mx.array(queries.shape[2] * keys.shape[2]))
    monkeypatch.setattr(kernels, "shortest", lambda call: 1e-9 * call().item())
    (layer,) = tiny_model("qwen3_5").attention_layers
    assert kernels.seconds_of_a_key(layer.heads, mx.float32, None, True, (1, 5)) == pytest.approx([1e-9, 5e-9])


@pytest.mark.parametrize("n_calls", [2, 6, 20, 45] if LONG else [2, 20])
def test_it_ends_when_its_time_is_over(cache_folder, monkeypatch, n_calls):
    """What was measured until then serves, and the rest is guessed from it."""
    trace_anew(monkeypatch)  # a step that makes traces is not timed
    monkeypatch.setattr(self_test, "perf_counter", itertools.count(0, self_test.MAX_SECONDS / n_calls).__next__)
    n_steps, original = [], self_test.mtp_generate_step
    steps = lambda *args, **options: (n_steps.append(1) or step for step in original(*args, **options))  # noqa: E731
    monkeypatch.setattr(self_test, "mtp_generate_step", steps)
    model = tiny_model("qwen3_5")
    result = self_test.ensure_tested(model, "NAME")
    assert result.wrong == {}
    assert len(n_steps) <= n_calls + 1  # the step after which it ends
    times = model.pace.times.estimate
    assert times == sorted(times)
    assert bool(result.seconds) == (n_calls > 10)
    assert (cache_folder / "mlx_mtp" / "self-test.json").exists() == bool(result.seconds)
    assert times[:1] == (result.seconds[:1] or [TYPICAL[0]])


def test_times_that_were_not_measured_follow_from_the_others():
    seconds, passes = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8], {1: 1.0, 8: 1.35, 9: 1.4}
    whole, draft = self_test.step_seconds(seconds, passes | dict.fromkeys(self_test.ROWS, 2.0))
    assert len(whole) == len(self_test.DRAFT_LENGTHS)
    assert draft == pytest.approx(0.05)
    assert self_test.step_seconds(seconds, passes) == (whole[:9], draft)
    assert self_test.step_seconds(seconds, {1: 1.0, 8: 1.35}) == (seconds, 0.0)
    # A pass that another program delayed makes no deeper step shorter: longer passes would seem to take less than no time.
    seconds = [0.01 + 0.001 * k for k in range(9)]
    passes = {1: 0.01, 8: 0.09, 9: 0.018, **dict.fromkeys(self_test.ROWS, 0.02)}
    whole, _ = self_test.step_seconds(seconds, passes)
    assert min(whole[9:]) >= seconds[7]
    assert StepTimes(dict(zip(self_test.DRAFT_LENGTHS, whole))).estimate[:8] == seconds[:8]


@pytest.mark.parametrize("error", [RuntimeError("[metal::malloc] Unable\nto allocate"), MemoryError()])
def test_an_error_of_the_test_ends_no_load(cache_folder, monkeypatch, caplog, error):
    monkeypatch.setattr(self_test, "_head_copies", Mock(side_effect=error))
    model, _ = mlx_mtp.load(str(DATA / "dense"))
    [record] = caplog.records
    assert "dense could not be tested on this device: " in record.message
    assert "\n" not in record.message
    assert model.pace.times.estimate[0] == TYPICAL[0]
    assert mlx_mtp.generate(model, mlx_mtp.load(str(DATA / "dense"), lazy=True)[1], "def", max_tokens=4)


def test_a_model_whose_weights_are_no_numbers_tells_nothing_of_the_device(cache_folder, untimed, caplog):
    """The result would be kept for sound weights of the same kind."""
    model = tiny_model("qwen3_5")
    model.model.norm.weight = mx.full(model.model.norm.weight.shape, math.nan)
    assert self_test.ensure_tested(model, "NAME") is None
    assert "NAME could not be tested on this device: The model's output is not a number" in caplog.text
    refused(
        r"does not run in float16 \(its logits are not finite\)", self_test.ensure_tested, model, "NAME", must_pass=True
    )
    assert not self_test.ensure_tested(tiny_model("qwen3_5"), "NAME").wrong


def test_what_is_wrong_is_off_and_told(cache_folder, untimed, monkeypatch, caplog):
    model, original = tiny_model("qwen3_5", **GROUPED), attention_module.mx.concatenate
    monkeypatch.setattr(
        attention_module.mx, "concatenate", lambda a, axis=0: original(a, axis) * (3 if axis == 2 else 1)
    )
    caplog.set_level(logging.WARNING)
    result = self_test.ensure_tested(model, "NAME")
    assert [*result.wrong] == ["groups of queries"]
    assert str(result).startswith("wrong: groups of queries\n")
    assert caplog.text.count("\n") == 1
    assert "Please report it with the output of `mlx_mtp doctor --model NAME --json`" in caplog.text
    assert (model.device.compiled, model.device.attention_rows) == (True, 0)


def flipped(out):
    return out[..., ::-1]


def spoiled(module, name, is_wrong, spoil=flipped):
    """A function that is wrong for some arguments, for ``monkeypatch.setattr``."""
    right = getattr(module, name)

    def call(*args, **options):
        out = right(*args, **options)
        return spoil(out) if is_wrong(*args) else out

    return module, name, call


def attention(is_wrong, spoil=flipped):
    """MLX's fused attention, which is wrong for some numbers of queries and keys."""
    wrong_at = lambda q, k, v: is_wrong(q.shape[2], k.shape[2])  # noqa: E731
    return spoiled(mx.fast, "scaled_dot_product_attention", wrong_at, spoil)


def quantized_attention(is_wrong):
    return spoiled(base, "quantized_scaled_dot_product_attention", lambda queries, *_: is_wrong(queries.shape[2]))


def recurrence(is_wrong):
    spoil = lambda found: [flipped(found[0]), 0.5 * found[1]]  # noqa: E731
    return spoiled(mx.fast, "gated_delta_update", lambda q, *_: is_wrong(q.shape[1]), spoil)


def compiled_pass(self, function, module, *inputs, **numbers):
    """As by a kernel that gives numbers that are none."""
    out = function(module, *inputs, **numbers)
    return out * mx.nan if isinstance(out, mx.array) else out


FAILS = Mock(side_effect=RuntimeError("[metal] The kernel has too many threads."))
KV = dict(kv_bits=4, kv_group_size=32, quantized_kv_start=0)
LONG_PROMPT = [i * i % 29 for i in range(1040)]
# A kernel, what is found wrong, the widest window, the options of a text, and its prompt.
FAULTS = {
    "zeros": (lambda: attention(lambda T, N: 4 < T <= 9, mx.zeros_like), "passes over more than 4 tokens", 4, {}, PROMPT),
    "an error": (lambda: attention(lambda T, N: T == 9, FAILS), "passes over more than 8 tokens", 8, {}, PROMPT),
    "many keys": (lambda: attention(lambda T, N: T <= 8 and N > 1024), "attention kernels", 17, {}, LONG_PROMPT),
    "windows on many keys": (
        lambda: attention(lambda T, N: 1 < T <= 17 and N > 1024), "passes over more than 1 tokens", 1, {}, LONG_PROMPT
    ),
    "quantized": (lambda: quantized_attention(lambda T: 2 <= T <= 4), "keys and values of 4 bits", 17, KV, PROMPT),
    "recurrence": (lambda: recurrence(lambda T: T == 4), "the recurrence of MLX", 17, {}, PROMPT),
    "compiled": (lambda: (Compiler, "run", compiled_pass), "compiled passes", 17, {}, PROMPT),
    "rollbacks": (lambda: (Rows, "_after", lambda self, kept: self.states), "rollbacks", 1, {}, PROMPT),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_found_and_avoided(cache_folder, untimed, monkeypatch, caplog, fault):
    """The text is that of plain decoding without the fault, whatever drafts are asked for; with the fault it was another."""
    kernel, what, widest, options, prompt = FAULTS[fault]
    trace_anew(monkeypatch)
    model = tiny_model("qwen3_5")
    asked = dict(num_draft_tokens=4 if fault == "recurrence" else 8, copy_drafts=16, max_tokens=24)
    want = plain(prompt, model, max_tokens=24, **options)
    assert mtp(prompt, model, **asked, **options) == want
    monkeypatch.setattr(*kernel())
    trace_anew(monkeypatch)
    for is_avoided in (False, True):
        if is_avoided:
            assert what in self_test.ensure_tested(model, "NAME").wrong
        try:
            got = mtp(prompt, model, **asked, **options)
        except (RuntimeError, NotANumberError) as e:
            got = str(e)
        assert (got == want) is is_avoided
    assert f"{what}: " in caplog.text
    assert model.device.max_window(None) == widest


def test_bits_of_keys_that_are_wrong_for_one_token_are_refused(cache_folder, untimed, monkeypatch):
    model = deep_model("qwen3_5")
    monkeypatch.setattr(*quantized_attention(lambda T: True))
    result = self_test.ensure_tested(model, "NAME")
    assert result.wrong["keys and values of 4 bits"] == "kv_bits=4 is refused"
    with pytest.raises(ValueError, match="kv_bits=4 is refused"):
        mtp(PROMPT, model, max_tokens=2, **KV)
    assert mtp(PROMPT, model, max_tokens=2) == plain(PROMPT, model, max_tokens=2)


def test_rows_of_which_one_is_quantized_share_its_windows(cache_folder, untimed, monkeypatch):
    """A row has the columns of the longest window, and attention takes them all."""
    model = deep_model("qwen3_5")
    monkeypatch.setattr(*quantized_attention(lambda T: T > 1))
    self_test.ensure_tested(model, "NAME")
    kv = dict(kv_bits=8, kv_group_size=32, quantized_kv_start=12)
    prompts = [[3, 1, 4], [*range(20)]]
    with closing(BatchGenerator(model, num_draft_tokens=3, max_tokens=24, **kv, **AT_ONCE)) as generator:
        generator.insert(prompts)
        texts = run(generator)
    for prompt, text in zip(prompts, texts.values()):
        assert text.tokens == plain(prompt, model, max_tokens=24, **kv)
    assert not texts[0].last.counts.drafted


def test_an_interrupt_ends_the_test_and_nothing_is_kept(cache_folder, untimed, monkeypatch):
    model = tiny_model("qwen3_5")
    monkeypatch.setattr(kernels, "difference", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        self_test.ensure_tested(model, "NAME")
    assert not (cache_folder / "mlx_mtp" / "self-test.json").exists()


METAL = {
    "MLX": {"1": [0.0, 1.0], "64": [0.0, 5.0], "2048": [0.0, 9.0]},
    "mlx-lm": {"1": [0.0, 2.0], "64": [0.0, 4.0], "2048": [0.0, 3.0]},
}


def test_the_faster_recurrence_that_is_right_is_used():
    """On Metal, in steps and in prompts; elsewhere MLX's own in steps, if it is right."""
    cases = ("MLX", "9", True, False), ("MLX", "1", False, False), ("mlx-lm", "2048", True, True)
    for kernel, tokens, steps, prompts in cases:
        found = {name: {**of} for name, of in METAL.items()}
        found[kernel][tokens] = [WRONG if tokens != "9" else 0.0, 0.0]
        device = self_test.SelfTest(0.01, recurrence=found).device
        assert (device.native_steps, device.native_prompts) == (steps, prompts)
    for difference, native in ((0.0, None), (1.0, False)):
        found = {"MLX": {"1": [difference, 1.0]}}
        assert self_test.SelfTest(0.01, recurrence=found).device.native_steps is native


def test_copies_of_the_heads_cache_are_counted(untimed, monkeypatch):
    """A reference that something else holds makes MLX copy the arrays at each write."""
    model, held = tiny_model("qwen3_5", **GROUPED), []
    original = self_test.run_head

    def holding(model, hidden, token, cache):
        if cache.keys is not None:
            held.append((cache.keys[:, :, :1], cache.values[:, :, :1]))
        return original(model, hidden, token, cache)

    monkeypatch.setattr(self_test, "run_head", holding)
    assert self_test.run(model).head_copies == self_test.N_DRAFTS
