"""The test of a device: what it finds, and that it runs once."""

import itertools
import logging

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.checkpoint import load, settings
from mlx_mtp.checkpoint.checks import self_test
from mlx_mtp.core.caches.rows import Rows
from mlx_mtp.core.layers import layer
from mlx_mtp.core.layers.compiled import Compiler
from mlx_mtp.core.pacing.step_times import TYPICAL, StepTimes, times_of
from tests.support.checkpoints import DATA, write_tiny
from tests.support.models import FLASH, GROUPED, deep_model, tiny_model, trace_anew


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
    """No results, and the test runs in ``load``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(load, "ensure_tested", self_test.ensure_tested)
    return tmp_path


def test_runs_once_for_a_model_and_a_version(cache_folder, monkeypatch, caplog):
    ran, result = [], self_test.SelfTest(0.01, seconds=[1.0, 1.2], draft_cost=0.1)
    monkeypatch.setattr(self_test, "run", lambda model: ran.append(model) or result)
    for _ in range(2):
        model, _ = mlx_mtp.load(str(DATA / "dense"))
    assert (len(ran), model.drafting.compiled, model.drafting.attention_rows) == (1, True, None)
    assert [times_of(model).draft_cost, *times_of(model).estimate[:3]] == pytest.approx([0.1, 1.0, 1.2, 1.4])
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
    results, run = [], self_test.run
    monkeypatch.setattr(self_test, "run", lambda model: results.append(run(model)) or results[-1])
    model, _ = mlx_mtp.load(str(write_tiny(cache_folder / "model", "qwen3_5")))
    seconds, estimate = dict(zip(self_test.DRAFT_LENGTHS, results[0].seconds)), times_of(model).estimate
    assert [*seconds] == [*self_test.DRAFT_LENGTHS]
    assert estimate[: len(self_test.ROWS)] == pytest.approx([seconds[k] for k in range(len(self_test.ROWS))])


@pytest.mark.parametrize("n_calls", [2, 6, 20, 45])
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
    times = times_of(model).estimate
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


def test_a_pass_that_another_program_delayed_makes_no_deeper_step_shorter():
    """Otherwise longer passes seem to take less than no time, and so do all shorter steps with them."""
    seconds = [0.01 + 0.001 * k for k in range(9)]
    passes = {1: 0.01, 8: 0.09, 9: 0.018, **dict.fromkeys(self_test.ROWS, 0.02)}
    whole, _ = self_test.step_seconds(seconds, passes)
    assert min(whole[9:]) >= seconds[7]
    assert StepTimes(dict(zip(self_test.DRAFT_LENGTHS, whole))).estimate[:8] == seconds[:8]


@pytest.mark.parametrize(
    "error", [RuntimeError("[metal::malloc] Unable\nto allocate"), MemoryError(), ValueError("no kernel")]
)
def test_an_error_of_the_test_ends_no_load(cache_folder, monkeypatch, caplog, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(self_test, "_head_copies", fail)
    model, _ = mlx_mtp.load(str(DATA / "dense"))
    [record] = caplog.records
    assert "dense could not be tested on this device: " in record.message
    assert "\n" not in record.message
    assert model.drafting.times is None
    assert mlx_mtp.generate(model, mlx_mtp.load(str(DATA / "dense"), lazy=True)[1], "def", max_tokens=4)


def test_a_model_that_this_device_cannot_run_is_loaded(cache_folder, caplog):
    """MLX's CPU backend multiplies gathered matrices in float32 alone."""
    assert mlx_mtp.load(str(DATA / "moe35"))[0].mtp is not None
    [record] = caplog.records
    assert "moe35 could not be tested on this device: " in record.message


WRONG_PASSES = ["compiled passes", "groups of queries", "rollbacks"]


@pytest.mark.parametrize("what", WRONG_PASSES)
def test_what_is_wrong_is_off_and_told(cache_folder, untimed, monkeypatch, caplog, what):
    """By a wrong kernel, which may also give numbers that are none."""
    model = tiny_model("qwen3_5", **GROUPED)

    def wrong(self, function, module, *inputs, **numbers):
        out = function(module, *inputs, **numbers)
        return out * mx.nan if isinstance(out, mx.array) else out

    if what == "compiled passes":
        monkeypatch.setattr(Compiler, "run", wrong)
    elif what == "groups of queries":
        original = layer.mx.concatenate
        monkeypatch.setattr(layer.mx, "concatenate", lambda a, axis=0: original(a, axis) * (3 if axis == 2 else 1))
    else:
        monkeypatch.setattr(Rows, "_after", lambda self, kept: self.states)
    caplog.set_level(logging.WARNING)
    result = self_test.ensure_tested(model, "NAME")
    assert [*result.wrong] == [what]
    assert str(result).startswith(f"wrong: {what}\n")
    assert caplog.text.count("\n") == 1
    assert "Please report it with the output of `mlx_mtp doctor --model NAME --json`" in caplog.text
    drafting = model.drafting
    assert drafting.compiled == (what != "compiled passes")
    assert drafting.attention_rows == (0 if what == "groups of queries" else None)
    assert drafting.max_window(None) == (1 if what == "rollbacks" else 17)


def test_copies_of_the_heads_cache_are_counted(untimed, monkeypatch):
    """A reference that something else holds makes MLX copy the arrays at each write."""
    model, held = tiny_model("qwen3_5", **GROUPED), []
    original = self_test.run_head

    def holding(model, hidden, token, cache):
        if cache.keys is not None:
            held.append((cache.keys[:, :, :1], cache.values[:, :, :1]))
        return original(model, hidden, token, cache)

    assert self_test.run(model).head_copies == 0
    monkeypatch.setattr(self_test, "run_head", holding)
    assert self_test.run(model).head_copies == self_test.N_DRAFTS
