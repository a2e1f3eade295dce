"""What ``--report`` writes."""

import sys

import pytest
from mlx import nn

from mlx_mtp.benchmark import __main__ as benchmark
from mlx_mtp.benchmark import results_file
from mlx_mtp.checkpoint.load import load
from tests.support.models import DATA


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
