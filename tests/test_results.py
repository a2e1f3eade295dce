"""A machine's row: what ``--report`` writes, what is refused when it is read, and the table and plot of all rows."""

import copy
import json
import sys
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
from mlx import nn

from mlx_mtp.benchmark import __main__ as benchmark
from mlx_mtp.benchmark import results_file
from mlx_mtp.checkpoint.load import load
from scripts import results_table
from tests.support.models import DATA

ROOT = Path(__file__).parents[1]
ROWS = sorted((ROOT / "docs" / "results").glob("*.json"))


@pytest.fixture(scope="module")
def example() -> dict:
    return results_file.read_results(ROWS[0])


def run(monkeypatch, *argv) -> None:
    monkeypatch.setattr("mlx_mtp.benchmark.parts.N_CALLS", 1)
    monkeypatch.setattr("mlx_mtp.benchmark.parts.N_ROLLBACKS", 1)
    monkeypatch.setattr(sys, "argv", ["mlx_mtp.benchmark", *map(str, argv)])
    benchmark.main()


def test_the_benchmark_writes_a_row(monkeypatch, capsys, tmp_path):
    prompts, file = tmp_path / "secret.txt", tmp_path / "row.json"
    prompts.write_text("one two three")
    run(monkeypatch, "--model", DATA / "dense", "--prompts", prompts, "--report", file, "-m", 6, "--repeat", 1)
    got, out = results_file.read_results(file), capsys.readouterr().out
    assert results_file.markdown([got]) + "\n" in out
    model = {"name": "dense", "type": "qwen3_5", "draft_lm_head": None, "settings": None}
    assert got["model"] == {**model, "backbone": got["model"]["head"], "head": got["model"]["head"]}
    assert got["prompts"]["kind"] == "own"
    assert got["plain"]["tokens_per_second"] > 0
    for name, figures in got["runs"].items():
        assert figures["head"] + figures["copies"] + figures["target"] == pytest.approx(1)
        assert figures["copies"] == 0 or name in ("copies alone", "auto")
        assert figures["head"] == 0 or name != "copies alone"
        assert figures["ratio_low"] == figures["ratio"] == figures["ratio_high"]
    assert [len(got["runs"][str(k)]["acceptance"]) for k in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert not any(text in file.read_text() for text in (str(tmp_path), "secret", "three", str(DATA.parent)))


def test_a_run_that_fails_writes_nothing(monkeypatch, capsys, tmp_path):
    def fail(*args, **kwargs):
        raise ValueError("interrupted")

    monkeypatch.setattr(benchmark, "measure", fail)
    (tmp_path / "old.json").write_text("old")
    for name in ("old.json", "new.json"):
        with pytest.raises(SystemExit) as e:
            run(monkeypatch, "--report", tmp_path / name)
        assert e.value.code == 2
        assert capsys.readouterr().err.splitlines()[-1] == "mlx_mtp benchmark: error: interrupted"
    assert [f.name for f in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "old"


def test_precision_is_that_of_most_weights():
    model, _ = load(str(DATA / "dense"), mtp_bits=4, settings=False)
    assert results_file.describe_model(model)["head"] == "4-bit"
    assert results_file.describe_model(model)["backbone"] != "4-bit"
    in_backbone = {"class_predicate": lambda path, m: "mtp." not in path and hasattr(m, "to_quantized")}
    nn.quantize(model, 32, 4, mode="mxfp4", **in_backbone)
    assert results_file.describe_model(model)["backbone"] == "mxfp4"
    model, _ = load(str(DATA / "dense"), draft_vocab=16, draft_head_bits=8, settings=False)
    assert results_file.describe_model(model)["draft_lm_head"].endswith("rows, 8-bit")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["version"], 2, "in version, 1 was expected"),
        (["date"], "today", "in date, 'today'"),
        (["more"], 1, "Additional properties"),
        (["runs", "auto"], None, "in runs, 'auto' is a required property"),
        (["runs", "2", "ratio"], "fast", "in runs.2.ratio, 'fast' is not of type 'number'"),
        (["runs", "2", "copies"], 1.5, "in runs.2.copies, 1.5"),
        (["model", "name"], "a | b", "in model.name"),
        (["model", "name"], "a\nb", "in model.name"),
    ],
)
def test_a_bad_file_is_one_line(example, tmp_path, path, value, message):
    bad = copy.deepcopy(example)
    part = reduce(getitem, path[:-1], bad)
    part[path[-1]] = value
    if value is None:
        del part[path[-1]]
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    with pytest.raises(ValueError, match="is not a report of this version's `--report`") as e:
        results_file.read_results(tmp_path / "bad.json")
    assert message in str(e.value)


def test_the_table_is_that_of_the_files():
    page = ROOT / "docs" / "results.md"
    rows = results_table.read_all(ROOT / "docs" / "results")
    assert page.read_text() == results_table.insert_table(page, rows)
    assert all(results_file.markdown([one]).splitlines()[-1] in page.read_text() for one in rows)


def test_the_plot_has_a_bar_for_each_figure(example):
    other = copy.deepcopy(example) | {"machine": example["machine"] | {"chip": "Apple M3 Max", "device": "gpu"}}
    (axes,) = results_table.draw([example, other]).axes
    widths = [bar.get_width() for bars in axes.containers for bar in bars]
    assert widths == [ratio for ratio in results_table.ratios(example).values() for _ in range(2)]
    label = axes.get_yticklabels()[1].get_text()
    assert (label.startswith("Apple M3 Max, "), "CPU" in label) == (True, False)
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == [*results_table.COLORS]


def test_the_script_writes_both_or_neither(monkeypatch, capsys, example, tmp_path):
    monkeypatch.setattr(sys, "argv", ["results_table.py", "--docs", str(tmp_path)])
    (tmp_path / "results").mkdir()
    page = tmp_path / "results.md"
    page.write_text(f"before\n{results_table.BEGIN}old\n{results_table.END}after\n")
    (tmp_path / "results" / "a.json").write_text(json.dumps(example))
    results_table.main()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert results_file.markdown([example]) in text
    plot = (tmp_path / "results.svg").read_bytes()
    results_table.main()
    assert (page.read_text(), (tmp_path / "results.svg").read_bytes()) == (text, plot)

    (tmp_path / "results" / "b.json").write_text("{}")
    with pytest.raises(SystemExit) as e:
        results_table.main()
    assert e.value.code == 2
    assert "b.json is not a report" in capsys.readouterr().err.splitlines()[-1]
    assert (page.read_text(), (tmp_path / "results.svg").read_bytes()) == (text, plot)
