"""The benchmark: its prompts, its arithmetic, and what it prints and recommends."""

import json
import math
import shutil
from dataclasses import replace
from unittest.mock import Mock

import mlx.core as mx
import pytest
from mlx import nn

import mlx_mtp
from benchmarks.synthetic import scripted
from mlx_mtp import prompts
from mlx_mtp.benchmark import __main__ as benchmark
from mlx_mtp.benchmark import measure as runs
from mlx_mtp.benchmark import tune
from mlx_mtp.benchmark.measure import AUTO, COPIES, NO_COPIES, NO_DRAFTS, OVERALL, PLAIN, TARGET
from mlx_mtp.benchmark.tune import FIXED, OFF, Measured, cheaper, combine, recommend
from mlx_mtp.checkpoint import settings
from mlx_mtp.core.drafts.settings import Settings
from tests.support.checkpoints import first_layers
from tests.support.commands import run_command
from tests.support.models import DATA, TRAINED, arrays_equal, tiny_model

HEAD, COPIED = "head", "copies"
RUNS = (NO_DRAFTS, 1, 3, NO_COPIES, COPIES, AUTO)
TWO = {"a": mx.array([5, 6, 7]), "b": mx.array([9, 8, 7, 6, 5])}


def made_up(acceptance: float = 0.8, text: list[int] | None = None):
    """A small model that says a text, drafted with this acceptance rate."""
    model = scripted(tiny_model("qwen3_5", vocab_size=512), acceptance, 512, 200)
    model.texts = {0: text or model.texts[0]}
    return model


# Prompts


def test_kinds_of_prompts(demo, tmp_path):
    nine, copying = prompts.nine_kinds(), prompts.copying_kinds()
    assert len({*nine.values()}) == 9
    assert list(copying) == list(prompts.COPYING)
    assert {f"{name}.txt" for name in (*nine, *copying)} == {file.name for file in prompts.FOLDER.glob("*.txt")}
    sizes = {name: prompts.encode(demo[1], text).size for name, text in (nine | copying).items()}
    assert max(nine, key=sizes.__getitem__) == "code_review"
    assert sizes["code_review"] > 2000
    for name, text in copying.items():
        answer = (DATA / "answers" / f"{name}.txt").read_text(encoding="utf-8")
        words = [answer[i : i + 12] for i in range(0, len(answer) - 12, 12)]
        assert sizes[name] > 1000, name
        assert sum(word in text for word in words) > 0.25 * len(words), name
    # Those of a file keep their numbers
    (tmp_path / "p.txt").write_text("one\n---\n\n---\nthree --- still\n")
    assert prompts.read_prompts(tmp_path / "p.txt") == {"prompt_1": "one", "prompt_3": "three --- still\n"}


@pytest.mark.parametrize("n", [300, *(pytest.param(n, marks=pytest.mark.slow) for n in (5000, 50000))])
def test_context_lengthens_a_prompt_at_its_start(demo, n):
    _, tokenizer = demo
    text = "def the_end(of, the, prompt):"
    tokens = prompts.encode(tokenizer, text, n)
    assert abs(tokens.size - n) <= 0.02 * n
    assert tokenizer.decode(tokens.tolist()).endswith(text)
    assert prompts.encode(tokenizer, text, 3).tolist() == tokenizer.encode(text)


# Arithmetic


def of_head(result):
    return result.counts.get(HEAD, ([], []))


def test_figures_agree():
    report = runs.measure(made_up(), TWO, RUNS, max_tokens=8, repeat=2)
    assert [(r.prompt, r.run) for r in report.results] == [(p, k) for k in RUNS for p in ("a", "b", OVERALL)]
    for r in report.results:
        assert r.identical
        assert r.ratio_low <= r.ratio <= r.ratio_high
        n_tokens = 2 * (7 if r.prompt != OVERALL else 14)
        drafted, accepted = of_head(r)
        assert n_tokens / r.tokens_per_step + sum(accepted) == pytest.approx(n_tokens)
        assert r.origins == {name: n for name, n in ((TARGET, n_tokens - sum(accepted)), (HEAD, sum(accepted))) if n}
        assert sum(map(r.percent, r.origins)) == 100
        assert all(0 <= a <= d for a, d in zip(accepted, drafted))
        assert r.plain_first_token > 0
        assert r.mtp_peak_memory > 0
    for k in RUNS:
        a, b, overall = (r for r in report.results if r.run == k)
        width = len(of_head(overall)[0])
        assert k in (AUTO, NO_COPIES) or width == (0 if k in (NO_DRAFTS, COPIES) else k)  # auto looks at the clock
        padded = [[*x, *[0] * (width - len(x))] for x in (of_head(a)[0], of_head(b)[0])]
        assert of_head(overall)[0] == [x + y for x, y in zip(*padded)]
        assert overall.prompt_tokens == 8
    # The gain is that of compiled passes and that of drafts
    ratios = {AUTO: (1.4, 1.5, 1.6), NO_DRAFTS: (1.1, 1.2, 1.3)}
    names = ("ratio_low", "ratio", "ratio_high")
    results = [replace(r, **dict(zip(names, ratios.get(r.run, (9, 9, 9))))) for r in report.of(OVERALL)]
    line = "times as fast as plain mlx-lm (1.40 to 1.60 by round): compiled passes 1.20, drafts 1.25"
    assert benchmark.gain(replace(report, results=results), "all") == f"all: 1.50 {line}"


ANSWER = [*range(20, 24), *range(2, 12), 24, 25, *range(3, 11), *range(26, 32)]  # copies from the prompt, twice


def copying(monkeypatch, acceptance: float):
    """A model that says ``ANSWER`` behind the prompt 0, 1, ..., 11, and drafts the same way whatever the clock says."""
    original = runs.mtp_generate_step

    def with_numbers(*args, **options):
        k = 4 if options["copy_drafts"] == "auto" else "off"
        return original(*args, **options | {"copy_drafts": k, "num_draft_tokens": 2})

    monkeypatch.setattr(runs, "mtp_generate_step", with_numbers)
    text = [*range(12), *ANSWER, *range(140, 240)]
    return made_up(acceptance, text), mx.array(text[:12])


@pytest.mark.parametrize("acceptance", [0.0, 0.7])
def test_tokens_are_counted_by_what_drafted_them(monkeypatch, acceptance):
    model, prompt = copying(monkeypatch, acceptance)
    for run in (PLAIN, NO_COPIES, AUTO):
        got = runs.generate(model, prompt, len(ANSWER), run)
        assert got.tokens == ANSWER
        assert got.origins.count(HEAD) == sum(got.counts.accepted)
        assert got.origins.count(COPIED) == sum(got.counts.of("copies").accepted)
        assert (HEAD in got.origins) == (acceptance > 0 and run != PLAIN)
        assert (COPIED in got.origins) == (run == AUTO)
        assert got.n_steps == got.origins[1:].count(TARGET)
        assert {ANSWER[i] for i, o in enumerate(got.origins) if o == COPIED} <= set(range(3, 12))


@pytest.mark.parametrize(("end", "origin", "n_steps"), [(9, COPIED, 9), (24, TARGET, 10)])
def test_a_text_stops_at_its_end(monkeypatch, end, origin, n_steps):
    model, prompt = copying(monkeypatch, 0.0)
    with pytest.raises(ValueError, match="ends its text at once on a prompt of 12 tokens"):
        runs.generate(model, prompt, 40, AUTO, stop={20})
    got = runs.generate(model, prompt, 40, AUTO, stop={end, 999})
    assert got.tokens == ANSWER[: ANSWER.index(end) + 1] == runs.generate(model, prompt, 40, PLAIN, stop={end}).tokens
    assert (got.origins[-1], got.n_steps) == (origin, n_steps)
    report = runs.measure(model, {"a": prompt}, (NO_COPIES, AUTO), max_tokens=40, repeat=1, stop={end})
    for r in report.results:
        assert sum(r.origins.values()) == len(got.tokens) - 1
        assert r.tokens_per_step == (len(got.tokens) - 1) / (n_steps if r.run == AUTO else len(got.tokens) - 1)
        assert r.identical


def test_warns_of_texts_that_repeat_themselves():
    for prompt, text, share in [
        ([1, 2, 3], [*range(40)], 0.0),
        ([1, 2, 3], [*range(10)] * 5, 0.7),  # 50 less the first turn and the five tokens that a match begins with
        ([*range(10)] * 2, [*range(10)] * 5, 0.0),  # copied from the prompt
        ([1, 2, 3], [7] * 12, 0.5),
        ([], [1, 2, 3], 0.0),
    ]:
        assert runs.repeated_share(prompt, text) == share
    model = made_up(text=[13, 420, 315, 210, 105, 0, *(i % 7 for i in range(6, 200))])
    report = runs.measure(model, TWO, (NO_COPIES, AUTO), max_tokens=40, repeat=1)
    warning = "Warning: texts that repeat themselves, and how much of each: a 62%, b 68%."
    assert benchmark.show(report).splitlines()[-1].startswith(warning)
    report.repeated = {"a": 1 / 3, "b": 0.2}
    assert "Warning" not in benchmark.show(report)


def test_reports_a_different_token(monkeypatch):
    model = made_up()
    original = runs.mtp_generate_step

    def wrong_once(prompt, *args, **kwargs):
        for i, (token, *others) in enumerate(original(prompt, *args, **kwargs)):
            yield (token + (i == 5 and prompt.size == 5), *others)

    monkeypatch.setattr(runs, "mtp_generate_step", wrong_once)
    results = runs.measure(model, TWO, (1,), max_tokens=10, repeat=1).results
    assert {r.prompt: r.identical for r in results} == {"a": True, "b": False, OVERALL: False}


def test_command_prints_and_writes_its_figures(capsys, tmp_path):
    (tmp_path / "p.txt").write_text("import os\n")
    first_layers(folder := shutil.copytree(TRAINED, tmp_path / "model"), 4)
    common = "--repeat", 1, "-m", 8, "--model", folder
    common += "--prompts", tmp_path / "p.txt", "--json", tmp_path / "b.json"
    flags = ("--compare-depths", 1, "--context", 40, "--plot", tmp_path / "b.png", "--prefill", 70, 90)
    _, out, _ = run_command(benchmark.main, capsys, *common, *flags)
    report = json.loads((tmp_path / "b.json").read_text())
    assert [r["run"] for r in report["results"][::2]] == [NO_DRAFTS, 1, NO_COPIES, AUTO]
    assert [r["prompt"] for r in report["results"]] == ["prompt_1", OVERALL] * 4
    assert {39 <= r["prompt_tokens"] <= 41 for r in report["results"]} == {True}
    assert all(f"{r['mtp_tps']:.1f}" in out for r in report["results"])
    for n, p in zip((70, 90), report["prefill"], strict=True):
        assert abs(p["prompt_tokens"] - n) <= 1
        assert f"{p['prompt_tokens']:,}  {p['plain']:.2f}".split() in [line.split()[:2] for line in out.splitlines()]
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"
    assert out.splitlines()[-1].startswith(f"auto: {report['results'][-1]['ratio']:.2f} times as fast as plain mlx-lm")
    assert report["machine"].keys() == {"chip", "device", "cores", "memory_gb", "os"}
    assert not any(text in json.dumps(report) for text in (str(tmp_path), "import os"))
    # Several lengths
    _, out, _ = run_command(benchmark.main, capsys, *common, "--context", 20, 50)
    reports = json.loads((tmp_path / "b.json").read_text())
    assert all(abs(report["results"][0]["prompt_tokens"] - n) <= 1 for n, report in zip((20, 50), reports, strict=True))
    assert [line[:18] for line in out.splitlines()[-2:]] == ["auto, --context 20", "auto, --context 50"]


def test_prompts_are_chosen_by_name(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "measure", measure := Mock(side_effect=SystemExit))
    for flags in ((), ("--prompts", "copying"), ("--prompts", "nine")):
        run_command(benchmark.main, capsys, *flags)
    asked = [[*prompts_of] for (_, prompts_of, _), _ in measure.call_args_list]
    assert asked == [list(prompts.python_beginnings()), list(prompts.COPYING), list(prompts.KINDS)]


# --tune: what it recommends, what it tries, and that it leaves the model unchanged

CHEAPER = [Settings(mtp_bits=8), Settings(draft_head_bits=4), Settings(draft_vocab=99)]


def test_the_settings_are_those_faster_beyond_the_spread():
    for others, best in (
        ([(tune.AUTO, 0.99, 1.2)], OFF),  # within the spread
        ([(tune.AUTO, 1.01, 1.2)], tune.AUTO),
        ([(tune.AUTO, 1.5, 1.6), (FIXED[1], 1.62, 1.66)], tune.AUTO),  # which follows a text of another kind
        ([(tune.AUTO, 1.5, 1.6), (FIXED[1], 1.7, 1.8)], FIXED[1]),
        ([(tune.AUTO, 0.9, 0.95), (FIXED[0], 0.8, 0.9)], OFF),
        ([(tune.AUTO, 1.5, 1.6), (CHEAPER[0], 1.58, 1.9), (CHEAPER[2], 1.61, 1.7)], CHEAPER[2]),
    ):
        measured = [Measured(s, list(ratios)) for s, *ratios in [(OFF, 1, 1), *others]]
        assert recommend(measured).settings is best
        assert tune.show(measured).endswith(f": {best}")


def test_tries_cheaper_forms_and_combines_those_that_gained():
    model = tiny_model("qwen3_5", vocab_size=64)
    vocab, uncompiled = Settings(draft_vocab=16), Settings(compiled=False)
    heads, outputs = ([Settings(**{name: bits}) for bits in (8, 4)] for name in ("mtp_bits", "draft_head_bits"))
    surer = [Settings(draft_p_min=0.3), Settings(draft_p_min=0.6)]
    assert cheaper(model) == [uncompiled, *heads, *outputs, vocab, *surer]
    nn.quantize(model, 64, 8, class_predicate=lambda path, m: hasattr(m, "to_quantized") and "mtp." not in path)
    assert cheaper(model) == [uncompiled, *heads, outputs[1], vocab, *surer]
    nn.quantize(model.mtp, 64, 4)
    assert cheaper(model) == [uncompiled, outputs[1], vocab, *surer]
    base = Measured(FIXED[1], [1.0, 1.1])

    def of(gain, **form):
        return Measured(Settings(2, **form), [gain, gain])

    one = [of(1.2, mtp_bits=8), of(1.3, mtp_bits=4), of(1.05, draft_vocab=9)]
    assert combine(base, one) == []
    assert combine(base, [*one, of(1.15, compiled=False)]) == [Settings(2, mtp_bits=4, compiled=False)]


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_measures_all_and_leaves_the_model_unchanged(is_whole, equal_steps):
    model, tokenizer = mlx_mtp.load(str(DATA / "dense"), draft_vocab=0, settings=False)
    before, prompts = dict(model.parameters()), {"a": mx.array([5, 6, 7])}
    other = Settings(1, mtp_bits=4, draft_vocab=32, compiled=False)
    if is_whole:
        measured = tune.tune(model, tokenizer, prompts, max_tokens=12, repeat=2)
        assert [m.settings.num_draft_tokens for m in measured[:6]] == [0, "auto", 1, 2, 3, 4]
        assert len(measured) >= 11
    else:
        measured = tune.measure(model, tokenizer, prompts, [OFF, tune.AUTO, other], max_tokens=12, repeat=2)
        assert measured[2].settings == other
    assert arrays_equal(model.parameters(), before)
    assert model.draft_settings.lm_head is None
    assert model.device.compiled
    assert all((m.counts.drafted != []) == (m.settings.num_draft_tokens != 0) for m in measured)
    assert all(len(m.ratios) == 2 and m.tps > 0 for m in measured)
    assert measured[0].ratios == [1.0, 1.0]
    assert all((m.settings.seconds != {}) == (m.settings.num_draft_tokens == "auto") for m in measured)
    lines = tune.show(measured).splitlines()
    assert all(line.startswith(str(m.settings)) for line, m in zip(lines[1:], measured))
    assert lines[-1].endswith(f": {recommend(measured).settings}")


@pytest.mark.parametrize("gains", [{}, {"compiled": 1.1, "draft_vocab": 1.2}], ids=["none", "some"])
def test_command_writes_its_recommendation(monkeypatch, capsys, tmp_path, gains):
    """Plain decoding if nothing is faster, and here a draft vocabulary with passes that are not compiled."""

    def ratio(form):
        return math.prod(gain for name, gain in gains.items() if getattr(form, name) != getattr(Settings, name))

    monkeypatch.setattr(tune, "measure", lambda *args, **_: [Measured(form, [ratio(form)] * 2) for form in args[3]])
    best = Settings("auto", draft_vocab=1024, compiled=False) if gains else OFF
    file = tmp_path / "new" / "s.json"
    assert str(file) in run_command(benchmark.main, capsys, "--tune", file, "--json", tmp_path / "m.json")[1]
    assert settings.read(file) == (settings.key_of(mlx_mtp.DEMO), best)
    model, _ = mlx_mtp.load(str(mlx_mtp.DEMO), settings=file)
    assert (model.draft_settings.tuned, model.device.compiled) == (best, not gains)
    assert json.loads((tmp_path / "m.json").read_text())[0]["ratios"] == [1.0, 1.0]
