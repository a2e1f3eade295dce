"""The test of a device: what it finds, and that it runs once."""

import logging

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.checkpoint import load, self_test, settings
from mlx_mtp.layers import layer
from mlx_mtp.layers.compiled import Compiler
from mlx_mtp.pacing.step_times import times_of
from tests.support.checkpoints import DATA
from tests.support.models import FLASH, GROUPED, deep_model, tiny_model


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", FLASH])
def test_the_cpu_gives_the_same_bits(family):
    result = self_test.run(deep_model(family, **GROUPED))
    assert result[:5] == (0, 0, 0, 0.01, 0)
    assert len(result.seconds) == len(self_test.DEPTHS)
    assert min(result.seconds) > 0
    assert str(result).startswith("within rounding (1%); differences of logits: compiled 0.00%, grouped 0.00%,")


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """No results, and the test runs in ``load``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(load, "ensure_tested", self_test.ensure_tested)
    return tmp_path


def test_runs_once_for_a_model_and_a_version(cache_folder, monkeypatch, caplog):
    ran, result = [], self_test.SelfTest(0.0, 0.0, 0.0, 0.01, 0, [1.0, 1.2], 0.1)
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


@pytest.mark.parametrize("what", ["compiled", "grouped", "rolled_back"])
def test_what_is_wrong_is_off_and_told(cache_folder, monkeypatch, caplog, what):
    """By a wrong kernel, which may also give numbers that are none."""
    model = tiny_model("qwen3_5", **GROUPED)

    def wrong(self, function, module, *inputs, **numbers):
        out = function(module, *inputs, **numbers)
        return out * mx.nan if isinstance(out, mx.array) else out

    if what == "compiled":
        monkeypatch.setattr(Compiler, "run", wrong)
    elif what == "grouped":
        original = layer.mx.concatenate
        monkeypatch.setattr(layer.mx, "concatenate", lambda a, axis=0: original(a, axis) * (3 if axis == 2 else 1))
    else:
        monkeypatch.setattr(self_test, "rollback", lambda caches, offset, n: None)
    caplog.set_level(logging.WARNING)
    result = self_test.ensure_tested(model, "NAME")
    assert result.wrong == [what]
    assert f"wrong: {what}; " in str(result)
    assert caplog.text.count("\n") == 1
    assert "Please report it with the output of `mlx_mtp doctor --model NAME`" in caplog.text
    assert ("--no-mtp" in caplog.text) == (what == "rolled_back")
    assert model.drafting.compiled == (what != "compiled")
    assert model.drafting.attention_rows == (0 if what == "grouped" else None)


def test_copies_of_the_heads_cache_are_counted(monkeypatch):
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
