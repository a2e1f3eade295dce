"""--tune: what it recommends, what it tries, and that it leaves the model unchanged."""

import json
import statistics

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn

import mlx_mtp
from mlx_mtp.benchmark import __main__ as benchmark
from mlx_mtp.benchmark import tune
from mlx_mtp.benchmark.tune import AUTO, FIXED, FIXED_GAIN, OFF, Measured, cheaper, combine, recommend, show
from mlx_mtp.checkpoint import settings
from mlx_mtp.checkpoint.load import DEMO
from mlx_mtp.core.layers.drafting import Settings
from tests.support.commands import run_command
from tests.support.models import DATA, arrays_equal, tiny_model

CHEAPER = [Settings(mtp_bits=8), Settings(draft_head_bits=4), Settings(draft_vocab=99)]


@given(st.lists(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3), min_size=1, max_size=8))
def test_recommends_what_nothing_beats(rounds):
    every = [OFF, AUTO, *FIXED, *CHEAPER]
    measured = [Measured(s, r) for s, r in zip(every, [[1.0] * 3, *rounds])]

    best = recommend(measured)
    assert best.settings == OFF or min(best.ratios) > 1
    for other in measured:
        fixed = other.settings in (OFF, *FIXED) and best.settings in (AUTO, *CHEAPER)
        assert min(other.ratios) <= max(best.ratios) * (1 + FIXED_GAIN * fixed)


def test_the_settings_are_those_faster_beyond_the_spread():
    for others, best in (
        ([(AUTO, 0.99, 1.2)], OFF),  # within the spread
        ([(AUTO, 1.01, 1.2)], AUTO),
        ([(AUTO, 1.5, 1.6), (FIXED[1], 1.62, 1.66)], AUTO),  # which follows a text of another kind
        ([(AUTO, 1.5, 1.6), (FIXED[1], 1.7, 1.8)], FIXED[1]),
        ([(AUTO, 0.9, 0.95), (FIXED[0], 0.8, 0.9)], OFF),
        ([(AUTO, 1.5, 1.6), (CHEAPER[0], 1.58, 1.9), (CHEAPER[2], 1.61, 1.7)], CHEAPER[2]),
    ):
        measured = [Measured(s, list(ratios)) for s, *ratios in [(OFF, 1, 1), *others]]
        assert recommend(measured).settings is best
        assert show(measured).endswith(f": {best}")


def test_tries_cheaper_forms_and_combines_those_that_gained():
    model = tiny_model("qwen3_5", vocab_size=64)
    vocab = Settings(draft_vocab=16)
    bits = [Settings(mtp_bits=8), Settings(mtp_bits=4)]
    surer = [Settings(draft_p_min=0.3), Settings(draft_p_min=0.6)]
    assert cheaper(model) == [*bits, Settings(draft_head_bits=8), Settings(draft_head_bits=4), vocab, *surer]
    nn.quantize(model, 64, 8, class_predicate=lambda path, m: hasattr(m, "to_quantized") and "mtp." not in path)
    assert cheaper(model) == [*bits, Settings(draft_head_bits=4), vocab, *surer]
    nn.quantize(model.mtp, 64, 4)
    assert cheaper(model) == [Settings(draft_head_bits=4), vocab, *surer]
    base = Measured(FIXED[1], [1.0, 1.1])

    def of(gain, **form):
        return Measured(Settings(2, **form), [gain, gain])

    one = [of(1.2, mtp_bits=8), of(1.3, mtp_bits=4), of(1.05, draft_vocab=9)]
    assert combine(base, one) == []
    assert combine(base, [*one, of(1.15, draft_p_min=0.3)]) == [Settings(2, mtp_bits=4, draft_p_min=0.3)]


@pytest.mark.parametrize(("whole", "faster"), [([1.8, 1.9], True), ([1.8, 2.05], False), ([2.2, 2.3], False)])
def test_attention_is_whole_on_metal_where_that_is_faster(monkeypatch, whole, faster):
    model, asked = tiny_model("qwen3_5", num_attention_heads=24, num_key_value_heads=4, head_dim=96), []

    def time_ways(model, prompt, windows, every, repeat):
        if windows == tune.WINDOWS:
            return {(n, way): [1.0] for n in windows for way in every}
        asked.append((prompt.size, windows, every, repeat))
        seconds = {(n, way): t for n in windows for way, t in zip(every, ([2.0, 2.1], whole))}
        return seconds | {(windows[0], every[1]): [1.0, 1.1]}  # one window alone does not decide

    monkeypatch.setattr(tune, "time_ways", time_ways)
    assert tune.fastest_way(model, mx.array([5, 6, 7]), 2) == Settings()  # on a CPU
    assert asked == []
    monkeypatch.setattr(tune, "on_metal", lambda: True)
    assert tune.fastest_way(model, mx.array([5, 6, 7]), 2) == Settings(attention_rows=0 if faster else None)
    assert asked == [(tune.CONTEXT, (6, 17), [Settings(), Settings(attention_rows=0)], 2)]


def test_runs_passes_the_way_that_is_faster(monkeypatch):
    model = tiny_model("qwen3_5", num_hidden_layers=18)  # nine of attention

    def time_ways(model, prompt, windows, every, repeat):
        if windows == tune.WINDOWS:
            assert every == [Settings(), Settings(compiled=False), Settings(pieces=4), Settings(pieces=8)]
        return {(n, way): times.get(way, [9.0, 9.0]) for n in windows for way in every}

    monkeypatch.setattr(tune, "time_ways", time_ways)
    for others, best in (
        ({}, Settings()),
        ({Settings(compiled=False): [1.8, 1.9]}, Settings(compiled=False)),
        ({Settings(pieces=4): [1.8, 2.05]}, Settings()),  # within the spread
        ({Settings(pieces=4): [1.8, 1.9], Settings(pieces=8): [1.5, 1.6]}, Settings(pieces=8)),
    ):
        times = {Settings(): [2.0, 2.1], **others}
        assert tune.fastest_way(model, mx.array([5, 6, 7]), 2) == best


def test_times_ways_in_turn(monkeypatch):
    monkeypatch.setattr(tune, "N_CALLS", 1)
    model = tiny_model("qwen3_5")
    every = [Settings(), Settings(compiled=False), Settings(pieces=1), Settings(attention_rows=4)]
    seconds = tune.time_ways(model, mx.array([5, 6, 7]), (1, 9), every, 2)
    assert {kind: len(s) for kind, s in seconds.items()} == {(n, way): 2 for n in (1, 9) for way in every}
    assert all(t > 0 for s in seconds.values() for t in s)
    assert (model.drafting.compiled, model.drafting.pieces, model.drafting.attention_rows) == (True, None, None)


@pytest.mark.slow
def test_measures_all_and_leaves_the_model_unchanged(monkeypatch):
    monkeypatch.setattr(tune, "fastest_way", lambda *_: Settings(pieces=1, attention_rows=2))
    folder = DATA / "dense"
    model, tokenizer = mlx_mtp.load(str(folder), draft_vocab=0, settings=False)
    before = dict(model.parameters())
    measured = tune.tune(model, tokenizer, {"a": mx.array([5, 6, 7])}, max_tokens=12, repeat=2)
    assert arrays_equal(model.parameters(), before)
    assert model.drafting.lm_head is None
    assert (model.drafting.compiled, model.drafting.pieces, model.drafting.attention_rows) == (True, None, None)
    assert {(m.settings.attention_rows, m.settings.compiled, m.settings.pieces) for m in measured} == {(2, True, 1)}
    assert [m.settings.num_draft_tokens for m in measured[:6]] == [0, "auto", 1, 2, 3, 4]
    assert [m.counts.drafted != [] for m in measured[:6]] == [False, True, True, True, True, True]
    assert len(measured) >= 11
    assert all(len(m.ratios) == 2 and m.tps > 0 for m in measured)
    assert measured[0].ratios == [1.0, 1.0]
    assert all(m.low <= statistics.median(m.ratios) <= m.high for m in measured)
    assert all((m.settings.seconds != {}) == (m.settings.num_draft_tokens == "auto") for m in measured)
    lines = show(measured).splitlines()
    assert all(line.startswith(str(m.settings)) for line, m in zip(lines[1:], measured))
    assert lines[-1].endswith(f": {recommend(measured).settings}")


@pytest.mark.parametrize("best", [OFF, Settings("auto", draft_vocab=512, seconds={0: 0.1, 1: 0.2})], ids=str)
def test_command_writes_its_recommendation(monkeypatch, capsys, tmp_path, best):
    monkeypatch.setattr(tune, "tune", lambda *args, **kwargs: [Measured(OFF, [1.0, 1.0]), Measured(best, [1.1, 1.2])])
    file = tmp_path / "new" / "s.json"
    assert str(file) in run_command(benchmark.main, capsys, "--tune", file, "--json", tmp_path / "m.json")[1]
    assert settings.read(file) == (settings.key_of(DEMO), best)
    assert mlx_mtp.load(str(DEMO), settings=file)[0].drafting.tuned == best
    assert [m["ratios"] for m in json.loads((tmp_path / "m.json").read_text())] == [[1.0, 1.0], [1.1, 1.2]]
