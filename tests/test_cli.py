"""What the command lines share: they end in silence where nobody reads, and their errors name what the user wrote."""

import os
import subprocess
import sys
from importlib import import_module

import pytest

from tests.support.models import DATA

COMMANDS = {
    "generate": "mlx_mtp.generate.__main__",
    "convert": "mlx_mtp.convert.__main__",
    "server": "mlx_mtp.server.__main__",
    "benchmark": "mlx_mtp.benchmark.__main__",
    "draft_vocab": "mlx_mtp.draft_vocab",
    "fit": "mlx_mtp.fit.__main__",
}
MODEL = str(DATA / "dense")


def run(monkeypatch, command, *flags) -> int:
    """A command line in this process: its exit status."""
    monkeypatch.setattr(sys, "argv", [f"mlx_mtp.{command}", *map(str, flags)])
    with pytest.raises(SystemExit) as end:
        import_module(COMMANDS[command]).main()
    return end.value.code


@pytest.fixture
def nobody_reads():
    """A pipe whose reader has ended."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as stream:
        yield stream


@pytest.mark.parametrize(
    ("command", "flags", "statuses"),
    [
        ("draft_vocab", ["--help"], {141}),
        ("generate", ["--help"], {0, 141}),  # argparse does not mind where its text is longer than Python's buffer
        ("generate", ["--model", MODEL, "-m", 2], {141}),
        ("convert", ["--inspect", MODEL], {141}),
    ],
)
def test_ends_in_silence_where_nobody_reads(monkeypatch, tmp_path, nobody_reads, command, flags, statuses):
    with open(tmp_path / "errors", "w") as errors:
        monkeypatch.setattr(sys, "stdout", nobody_reads)
        monkeypatch.setattr(sys, "stderr", errors)
        assert run(monkeypatch, command, *flags) in statuses
        nobody_reads.flush()  # as Python does when it ends
    assert (tmp_path / "errors").read_text() == ""


def test_a_pipe_to_head_shows_no_error():
    command = f"set -o pipefail; {sys.executable} -m mlx_mtp.generate --model {MODEL} -m 20 | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (141, "==========\n", "")


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("generate", "--num-draft-tokens few", "must be auto or a number, not 'few'"),
        ("server", "--num-draft-tokens few", "must be auto or a number, not 'few'"),
        ("generate", "--copy-drafts few", "must be auto, off or a number, not 'few'"),
        ("server", "--chat-template-args {", "must be JSON, not '{'"),
        ("server", "--prompt-cache-bytes much", "must be a size such as 10GB, not 'much'"),
        ("server", "--prompt-cache-bytes muchGB", "must be a size such as 10GB, not 'muchGB'"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(monkeypatch, capsys, command, flags, message):
    assert run(monkeypatch, command, *flags.split()) == 2
    assert f"error: argument {flags.split()[0]}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flag", "others"),
    [
        ("generate", "--model", []),
        ("generate", "--mtp", []),
        ("generate", "--adapter-path", []),
        ("generate", "--draft-model", []),
        ("generate", "--extra-eos-token", []),
        ("server", "--model", []),
        ("server", "--serve-model", []),
        ("convert", "--hf-path", []),
        ("convert", "--mlx-path", ["--hf-path", MODEL]),
        ("convert", "--graft-mtp-from", ["--hf-path", MODEL]),
        ("convert", "--recipe", []),
        ("benchmark", "--model", []),
        ("draft_vocab", "--corpus", ["--model", MODEL]),
        ("fit", "--model", ["--mlx-path", "out"]),
    ],
)
def test_an_empty_name_is_refused_by_its_flag(monkeypatch, capsys, command, flag, others):
    assert run(monkeypatch, command, flag, "", *others) == 2
    name = "--hf-path" if flag == "--model" and command == "convert" else flag
    assert capsys.readouterr().err == f"mlx_mtp.{command}: error: {name} is empty: give it a value, or leave it out.\n"
