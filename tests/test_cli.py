"""What the command lines share: they end in silence where nobody reads, and their errors name what the user wrote."""

import errno
import os
import pickle
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from unittest.mock import Mock

import pytest

from mlx_mtp.__main__ import COMMANDS, main
from mlx_mtp.checkpoint.output import naming
from mlx_mtp.cli.display import one_line_errors, sentence
from mlx_mtp.cli.parser import REMOVED
from mlx_mtp.errors import MTPError, MTPFileNotFoundError, MTPOSError
from mlx_mtp.extras import MissingExtra
from mlx_mtp.files import check_target
from tests.support.commands import refusal, run_command
from tests.support.models import TRAINED


def run(capsys, command, *flags) -> tuple[int, str]:
    """A command line in this process: (its exit status, stderr)."""
    status, _, err = run_command(resolve_name(COMMANDS[command][0]).main, capsys, *flags)
    return status, err


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
        ("generate", ["--help"], {0, 141}),  # argparse does not mind where its text is longer than Python's buffer
        ("generate", ["--model", TRAINED, "-m", "2"], {141}),
        ("convert", ["--inspect", TRAINED], {141}),
    ],
)
def test_ends_in_silence_where_nobody_reads(monkeypatch, capsys, tmp_path, nobody_reads, command, flags, statuses):
    with open(tmp_path / "errors", "w") as errors:
        monkeypatch.setattr(sys, "stdout", nobody_reads)
        monkeypatch.setattr(sys, "stderr", errors)
        assert run(capsys, command, *flags)[0] in statuses
        nobody_reads.flush()  # as Python does when it ends
    assert (tmp_path / "errors").read_text() == ""


STREAMS = {
    "</dev/null >/dev/full": "Standard output: No space left on device.",
    "<&-": "Standard input is closed: give /dev/null.",
    "</dev/null >&-": "Standard output is closed: give /dev/null.",
}


@pytest.mark.parametrize(("streams", "message"), STREAMS.items(), ids=STREAMS)
def test_a_stream_that_cannot_be_used_is_one_line(streams, message):
    for command in (f"generate --model {TRAINED} --no-mtp -m 2", "models") if "full" in streams else ("models",):
        done = subprocess.run(
            ["bash", "-c", f"{sys.executable} -m mlx_mtp {command} {streams}"], capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert done.stderr.endswith(f": error: {message}\n")


def test_a_pipe_to_head_shows_no_error():
    """Nor does ``python -m mlx_mtp`` warn."""
    command = f"{sys.executable} -W error -m mlx_mtp generate --model {TRAINED} --no-mtp -m 20 | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (141, "==========\n", "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("generate --num-draft-tokens few", "argument --num-draft-tokens: must be auto or a number, not 'few'"),
        ("generate --copy-drafts few", "argument --copy-drafts: must be auto, off or a number, not 'few'"),
        ("server --chat-template-args {", "argument --chat-template-args: must be JSON, not '{'"),
        ("server --prompt-cache-bytes much", "argument --prompt-cache-bytes: must be a size such as 10GB, not 'much'"),
        ("generate --mpt", "unrecognized arguments: --mpt: did you mean --mtp?"),
        ("server --mpt org/head", "unrecognized arguments: --mpt org/head: did you mean --mtp?"),
        ("convert --mlx-paht=out --inspcet x", "--mlx-paht=out --inspcet x: did you mean --mlx-path --inspect?"),
        ("benchmark --zzz 3", "unrecognized arguments: --zzz 3"),
        ("generate --temperature 0.7", "--temperature 0.7: did you mean --temp?"),
        ("server --max-new-tokens=9 --mpt", "--max-new-tokens=9 --mpt: did you mean --max-tokens --mtp?"),
        ("fit --model m --mlx-path o --iter=9 --seeds 1", "--seeds 1: did you mean --seed?"),
        ("generate Why?", "error: 'Why?' is not a flag: give the prompt with --prompt 'Why?'\n"),
        ("server qwen3.5-4b", "error: 'qwen3.5-4b' is not a flag: give the model with --model qwen3.5-4b\n"),
        ("server --max-model-len=8192", "error: There is no --max-model-len: a context grows with the text"),
    ],
)
def test_a_wrong_value_or_an_unknown_flag_is_named(capsys, argv, message):
    command, *flags = argv.split()
    status, err = run(capsys, command, *flags)
    assert (status, message in err.splitlines()[-1] + "\n") == (2, True), err


def test_a_removed_flag_or_command_says_what_to_use_instead(capsys):
    for name, instead in REMOVED.items():
        command = "convert" if name == "--mtp-bits" else "generate"
        argv = [command, name] if name.startswith("--") else [name]
        assert refusal(main, capsys, *argv).endswith(f": error: {name} was removed: {instead}\n")


@pytest.mark.parametrize(
    ("raises", "message"),
    [
        (lambda: Path("no.md").read_text(), "no.md: No such file or directory."),
        (lambda: socket.create_server(("192.0.2.1", 0)), "Cannot assign requested address"),
        (lambda: check_target(Path("no/file")), "There is no folder no to write file to."),  # ours
    ],
)
def test_the_systems_errors_are_sentences(monkeypatch, capsys, tmp_path, raises, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as end, one_line_errors("mlx_mtp.x"):
        raises()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mlx_mtp.x: error: {message}")
    assert (error.count("\n"), "Errno" in error) == (1, False)


MENDABLE = [
    *(kind("Mend it.") for kind in (MTPError, MTPOSError, MTPFileNotFoundError, MissingExtra)),
    OSError(errno.ENOSPC, "No space left on device"),
]
FOREIGN = [
    ValueError("[matmul] Last dimension of first input with shape (1,2) must match second to last dimension"),
    OSError("broken"), KeyError("k"), TypeError("t"), AssertionError(), ZeroDivisionError("0"), RuntimeError("r"),
]  # fmt: skip
# A function that each command calls, by its module and name, and flags.
CALLS = {
    "generate": ("mlx_mtp.core.decoding.decoder", "Decoder.verify", ["--model", TRAINED, "-m", "2"]),
    "chat": ("mlx_mtp.cli.flags", "load", []),
    "benchmark": ("mlx_mtp.benchmark.__main__", "load", []),
    "convert": ("mlx_mtp.convert.__main__", "convert", ["--hf-path", TRAINED]),
    "fit": ("mlx_mtp.fit.__main__", "fit", ["--model", TRAINED, "--mlx-path", "out"]),
    "demo": ("mlx_mtp.generate.demo", "load", []),
    "models": ("mlx_mtp.about", "cached_repositories", []),
    "doctor": ("mlx_mtp.about", "Account", []),
    "server": ("mlx_mtp.server.serve", "check", ["--print-config", "codex"]),
    "launch": ("mlx_mtp.launch", "parse", ["claude"]),
}


def test_every_command_is_called():
    assert CALLS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", CALLS)
def test_a_command_prints_what_the_user_can_mend_and_no_other_error(monkeypatch, capsys, tmp_path, command):
    """A matmul of wrong shapes in the decoder is none of the user's errors, and keeps its traceback."""
    monkeypatch.chdir(tmp_path)
    module, name, flags = CALLS[command]
    owner = import_module(module)
    if name == "Decoder.verify":
        owner, name = owner.Decoder, "verify"
    for error in MENDABLE if command == "chat" else MENDABLE[:1]:
        monkeypatch.setattr(owner, name, Mock(side_effect=error))
        assert run(capsys, command, *flags)[0] == 2
    for error in FOREIGN if command == "chat" else FOREIGN[:2]:
        monkeypatch.setattr(owner, name, Mock(side_effect=error))
        with pytest.raises(type(error)) as raised:
            run(capsys, command, *flags)
        assert raised.value is error


@pytest.mark.parametrize("error", MENDABLE, ids=lambda e: type(e).__name__)
def test_what_the_user_can_mend_is_of_one_base_and_one_line(capsys, error):
    assert isinstance(error, MTPError) is (error.__class__ is not OSError)
    with pytest.raises(SystemExit) as end, one_line_errors("mlx_mtp.x"):
        raise pickle.loads(pickle.dumps(error))  # as ranks exchange it
    assert (end.value.code, capsys.readouterr().err.count("\n")) == (2, 1)


def test_a_temporary_folder_is_not_named_in_an_error(tmp_path):
    with pytest.raises(FileNotFoundError) as error, naming(tmp_path, "out"):
        (tmp_path / "no.json").read_text()
    assert sentence(error.value) == "out/no.json: No such file or directory."


@pytest.mark.parametrize(
    ("command", "mtp", "shown", "more"),
    [
        ("generate", "def add(a):", "def add(a):", " nor the name of a repository. Pass the prompt with --prompt."),
        ("generate", "Why? " * 1000, f"{'Why? ' * 12}...", ""),
        ("chat", "./no/head", "./no/head", " nor the name of a repo"),
        ("benchmark", "Hello", "Hello", ""),
    ],
)
def test_a_wrong_head_is_told_before_anything_is_loaded(monkeypatch, capsys, command, mtp, shown, more):
    for name in ("load", "fetch"):  # calling it would raise a TypeError
        monkeypatch.setattr(resolve_name(COMMANDS[command][0]), name, None, raising=False)
    status, err = run(capsys, command, "--mtp", mtp)
    message = f"mlx_mtp {command}: error: --mtp takes a head, and '{shown}' is neither" + (more and f" a folder{more}")
    assert (status, err.count("\n"), err.startswith(message)) == (2, 1, True), err


NAMES = {
    "generate": "--model --mtp --adapter-path --draft-model --extra-eos-token",
    "server": "--model --serve-model",
    "convert": "--hf-path --mlx-path --graft-mtp-from --recipe",
    "benchmark": "--model",
    "fit": "--model",
}
REQUIRED = {"convert": ["--hf-path", TRAINED], "fit": ["--mlx-path", "out"]}


def test_an_empty_name_is_refused_by_its_flag(capsys):
    for command, flags in NAMES.items():
        for flag in flags.split():
            required = [] if flag == "--recipe" else REQUIRED.get(command, [])
            message = f"mlx_mtp {command}: error: {flag} is empty: give it a value, or leave it out.\n"
            assert run(capsys, command, *required, flag, "") == (2, message)


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("generate", "--prompt a --image GONE", "There is no image GONE"),
        ("generate", "--prompt a --image FOLDER", "FOLDER is not a file"),
        ("generate", "--prompt a --prompt-cache-dir FILE/a", "-dir: the folder FILE/a cannot be written to"),
        ("generate", "--prompt a --settings GONE", "There is no settings file GONE"),
        ("generate", "--prompt a --draft-vocab GONE", "argument --draft-vocab: invalid int value"),
        ("generate", "--prompt a --draft-head-bits 7", "draft_head_bits is 7"),
        ("generate", "--prompt a --adapter-path GONE", "there is no folder GONE"),
        ("chat", "--adapter-path FILE", "FILE is not a folder"),
        ("chat", "--prompt-cache-dir FILE", "--prompt-cache-dir: FILE is not a folder"),
        ("server", "--port 0 --prompt-cache-dir FILE", "--prompt-cache-dir: FILE is not a folder"),
        ("server", "--port 0 --adapter-path GONE", "--adapter-path: there is no folder GONE"),
        ("server", "--port 0 --chat-template {%", "--chat-template cannot be rendered"),
        ("server", "--port 0 --api-key-file GONE", "--api-key-file: there is no file GONE"),
        ("server", "--port 0 --host host.invalid", "The server cannot listen at --host host.invalid, --port 0: "),
        ("demo", "--max-tokens 1", "--max-tokens must be 2 or more, not 1: times start at the first token."),
        ("benchmark", "--max-tokens 0", "max_tokens must be 2 or more, not 0"),
        ("benchmark", "--repeat 0", "repeat must be 1 or more, not 0"),
        ("benchmark", "--prompts GONE", "there is no file GONE"),
        ("benchmark", "--prompts EMPTY", "EMPTY has no prompts"),
        ("benchmark", "--tune FOLDER", "FOLDER is a folder: name a file"),
        ("benchmark", "--tune FILE/s.json", "FILE"),
        ("fit", "--mlx-path NEW --corpus FILE GONE", "--corpus: there is no file GONE"),
        ("fit", "--mlx-path NEW --prompts FOLDER", "--prompts: FOLDER is not a file"),
        ("fit", "--mlx-path NEW --adapter-path GONE", "--adapter-path: there is no folder GONE"),
        ("fit", "--mlx-path NEW --cache-path FILE", "--cache-path: FILE is not a folder"),
        ("fit", "--mlx-path NEW --temp -1", "--temp must be 0 or more, not -1.0"),
        ("fit", "--mlx-path NEW --seed -1", "--seed must be 0 or more, not -1"),
        ("convert", "--mlx-path NEW --adapter-path GONE", "--adapter-path: there is no folder GONE"),
    ],
)
def test_flags_are_checked_before_the_model(monkeypatch, capsys, tmp_path, command, flags, message):
    """Which would fail: there is none."""
    (tmp_path / "FILE").write_text("x")
    (tmp_path / "EMPTY").touch()
    (tmp_path / "FOLDER").mkdir()
    monkeypatch.chdir(tmp_path)
    model = ["--hf-path" if command == "convert" else "--model", "NO/MODEL/HERE"]
    status, err = run(capsys, command, *model, *flags.split())
    (line,) = [line for line in err.splitlines() if ": error: " in line]
    assert (status, message in line, "Errno" in line) == (2, True, False), line


def test_a_template_that_the_model_cannot_render_ends_the_server(monkeypatch, capsys):
    monkeypatch.setattr("mlx_mtp.server.serve.serve", None)  # calling it would raise a TypeError
    status, err = run(capsys, "server", "--port", "0", "--chat-template", "{{ messages[0].name.upper() }}")
    assert status == 2
    assert err.splitlines()[-1].startswith("mlx_mtp server: error: --chat-template cannot be rendered: ")
