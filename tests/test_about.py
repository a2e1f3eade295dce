"""One command for all, names for models, and the commands that tell about models, caches and this machine."""

import json
import re
from dataclasses import asdict
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest

import mlx_mtp
from mlx_mtp import about
from mlx_mtp.__main__ import COMMANDS, main
from mlx_mtp.about import doctor, models
from mlx_mtp.checkpoint.catalog import published, resolve
from mlx_mtp.checkpoint.checks.self_test import SelfTest
from mlx_mtp.core.models.mixin import MTPModel
from tests.support.checkpoints import accepting, configure, copied, no_head
from tests.support.commands import refusal, run_command
from tests.support.hub_stand_in import HEADER_BYTES
from tests.support.models import DATA

# One command


def test_help_lists_the_commands(capsys):
    _, out, _ = run_command(main, capsys)
    for name, (module, _) in COMMANDS.items():
        assert f"  {name} " in out
        assert resolve_name(module).make_parser().prog.replace(".", " ") == f"mlx_mtp {name}"
        told = run_command(main, capsys, name, "--help")[1]
        assert told.startswith("usage: ")
        assert run_command(main, capsys, "help", name) == (0, told, "")
    assert run_command(main, capsys, "--help") == run_command(main, capsys, "help") == (0, out, "")
    assert run_command(main, capsys, "--version") == (0, f"mlx_mtp {mlx_mtp.__version__}\n", "")


def test_an_unknown_command_is_one_line(capsys):
    for argv, message in (
        (["genrate"], "There is no command genrate: did you mean generate?"),
        (["xyz"], "There is no command xyz: choose from demo, generate,"),
        (["--model", "x", "generate"], "The command comes first: mlx_mtp generate --model ..."),
    ):
        assert refusal(main, capsys, *argv).startswith(f"mlx_mtp: error: {message}")


# Names of models


def test_a_name_is_that_of_a_conversion(tmp_path, monkeypatch):
    """Unless a folder has it. It may say the number of bits."""
    for model in published().values():
        names = (model.name, model.base, model.name.upper(), model.conversion)
        assert {resolve(name) for name in names} == {model.conversion}
    assert resolve("qwen3.6-27b-8bit") == "mlx-community/Qwen3.6-27B-8bit"
    assert resolve("Qwen3.5-0.8B-bf16") == "mlx-community/Qwen3.5-0.8B-MLX-bf16"
    assert resolve("org/qwen3.6-27b") == "org/qwen3.6-27b"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3.6-27b").mkdir()
    assert resolve("qwen3.6-27b") == "qwen3.6-27b"


def test_an_unknown_name_suggests_the_nearest():
    for name, message in (
        ("qwen3.8-27b-bf16", r"Did you mean qwen3\.8-27b or qwen3\.8-27b-4bit or qwen3\.8-27b-8bit\?"),
        ("qwen3.6-72b", r"^qwen3\.6-72b is .* Did you mean qwen3\.6-27b or .* `mlx_mtp models`"),
        ("xyz", r"published model\. `mlx_mtp models` lists them\.$"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            mlx_mtp.load(name)


def test_a_name_loads_the_conversion_with_the_head_of_its_original(hub, tmp_path, capsys, monkeypatch):
    accepting(monkeypatch, 0.8)
    model = published()["qwen3.5-0.8b-4bit"]
    hub.publish(model.original, DATA / "dense")
    no_head(copy := copied(tmp_path))
    (copy / "README.md").write_text(f"---\nbase_model: {model.original}\n---\n")
    hub.publish(model.conversion, copy)
    assert mlx_mtp.load("qwen3.5-0.8b", mtp="auto")[0].fetched_head.source == model.original
    models.run(SimpleNamespace(context=1000))
    assert "both" in capsys.readouterr().out


# About models, caches and this machine


def test_models_lists_all(capsys, monkeypatch):
    monkeypatch.setattr(about, "Account", lambda: SimpleNamespace(limit=24 * 10**9, left=22 * 10**9))
    monkeypatch.setattr("shutil.get_terminal_size", lambda: type("Size", (), {"columns": 80}))
    status, out, _ = run_command(models.main, capsys, "--context", "65536")
    assert status == 0
    table = out.partition("\n\n")[0].splitlines()[1:]
    rows = {line.split()[0]: line.split() for line in table}
    assert [*rows] == [model.base for model in published().values()]
    assert rows["qwen3.6-27b"][1:] == ["15.2", "0.85", "yes", "4.6", "yes", "-"]
    assert rows["qwen3-next-80b-a3b-instruct"][-4:] == ["from", "96", "GB", "-"]
    assert max(map(len, table)) <= 80
    assert "65,536 tokens" in out
    assert run_command(models.main, capsys, "--context", "0")[0] == 2


def test_doctor_of_models_that_draft_and_that_do_not(hub, capsys, monkeypatch, tmp_path):
    for accepted, verdict in ((0.94, "ready; "), (0.1, "the model rejects most drafts")):
        monkeypatch.setattr(MTPModel, "head_acceptance", accepted)
        status, out, _ = run_command(doctor.main, capsys)
        assert status == 0
        assert "Model:      Demo model: completes Python only" in out
        assert f"Accepted:   {accepted:.0%} of first drafts on built-in text" in out
        assert out.splitlines()[-1].startswith(f"Verdict:    {verdict}")
    no_head(copy := copied(tmp_path))
    configure(copy, _name_or_path=None)
    status, out, _ = run_command(doctor.main, capsys, "--model", str(copy))
    assert status == 0
    assert "Verdict:    no drafts: " in out.splitlines()[-1]
    assert "--mtp HEAD" in out


def test_doctor_prints_every_figure_as_json(capsys, monkeypatch):
    result = SelfTest(0.01, windows={"1": 0.0, "2": 0.2}, recurrence={"MLX": {"1": [0.0, 0.001]}})
    monkeypatch.setattr(about, "ensure_tested", lambda *_: result)
    status, out, _ = run_command(doctor.main, capsys, "--model", str(DATA / "dense"), "--json")
    found = json.loads(out)
    assert (status, found["self-test"], found["model"]) == (0, asdict(result), str(DATA / "dense"))
    assert {"chip", "versions", "verdict"} < found.keys()
    _, out, _ = run_command(doctor.main, capsys, "--model", str(DATA / "dense"))
    assert "Self-test:  wrong: passes over more than 1 tokens\n            differences of logits: " in out


def test_doctor_downloads_no_weights(hub, tmp_path, capsys, monkeypatch):
    hub.publish("org/whole", DATA / "dense")
    no_head(copy := copied(tmp_path))
    (copy / "README.md").write_text("---\nbase_model: org/whole\n---\n")
    hub.publish("org/headless", copy)
    for name, head in (("org/whole", "its own"), ("org/headless", r"that of org/whole, [\d.]+ MB: --mtp fetches it")):
        status, out, _ = run_command(doctor.main, capsys, "--model", name)
        assert status == 0
        assert re.search(f"Head:       {head}\n", out)
        assert f"fits in memory, and is not downloaded: `mlx_mtp generate --model {name}` downloads" in out
    assert hub.served["model.safetensors"] <= 4 * HEADER_BYTES
    monkeypatch.setattr(about, "Account", lambda: SimpleNamespace(held=0, limit=1000, left=1000))
    assert "does not fit in memory" in run_command(doctor.main, capsys, "--model", "org/whole")[1]
    mlx_mtp.load("org/headless", mtp=False)
    _, out, _ = run_command(doctor.main, capsys, "--model", "org/headless")
    assert "Verdict:    no drafts: its head is that of org/whole" in out
