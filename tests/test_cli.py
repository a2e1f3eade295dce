"""What the command lines share: their ends, their errors, their help, and names and flags in pages and messages."""

import errno
import json
import os
import pickle
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from dataclasses import asdict
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from PIL import Image

import mlx_mtp
from mlx_mtp import about
from mlx_mtp.__main__ import COMMANDS, main
from mlx_mtp.about import doctor, models
from mlx_mtp.checkpoint.catalog import published, resolve
from mlx_mtp.checkpoint.checks.self_test import SelfTest
from mlx_mtp.cli.display import one_line_errors, table
from mlx_mtp.core.decoding.decoder import Decoder
from mlx_mtp.core.models.mixin import MTPModel
from mlx_mtp.errors import MissingExtra, MTPError, MTPFileNotFoundError, MTPOSError
from mlx_mtp.files import check_target
from mlx_mtp.server.engine import models as engine_models
from tests.support.checkpoints import accepting, configure, copied, no_head
from tests.support.commands import refusal, refused, run_command
from tests.support.hub_stand_in import HEADER_BYTES
from tests.support.models import DATA, TRAINED
from tests.support.profiles import LONG
from tests.support.requests import options_of


def run(capsys, command, *flags) -> tuple[int, str]:
    """A command line in this process: (its exit status, stderr)."""
    status, _, err = run_command(resolve_name(COMMANDS[command][0]), capsys, *flags)
    return status, err


@pytest.mark.parametrize(
    ("command", "stream", "statuses"),
    [
        ("generate --help", "unread", {0, 141}),  # argparse does not mind where its text is longer than Python's buffer
        (f"generate --model {TRAINED} -m 2", "unread", {141}),
        (f"convert --inspect {TRAINED}", "unread", {141}),
        ("models", "full", {1}),
        (f"generate --model {TRAINED} --no-mtp -m 2", "full", {1}),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line_or_none(monkeypatch, capsys, tmp_path, command, stream, statuses):
    """None where the reader of a pipe has ended."""
    read_end, unread = os.pipe()
    os.close(read_end)
    with open("/dev/full", "w") as full, open(unread, "w") as pipe, open(tmp_path / "errors", "w") as errors:
        output = {"full": full, "unread": pipe}[stream]
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", errors)
        assert run(capsys, *command.split())[0] in statuses
        output.flush()  # as Python does when it ends
    command, *_ = command.split()
    line = f"mlx_mtp {command}: error: Standard output: No space left on device.\n"
    assert (tmp_path / "errors").read_text() == (line if stream == "full" else "")


@pytest.mark.parametrize(("streams", "name"), [("<&-", "input"), ("</dev/null >&-", "output")][: 1 + LONG])
def test_a_stream_that_is_closed_is_one_line(streams, name):
    line = f"{sys.executable} -m mlx_mtp models {streams}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.endswith(f": error: Standard {name} is closed: give /dev/null.\n")


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
    OSError(errno.ENOSPC, "No space left on device"),
    *(kind("Mend it.") for kind in (MTPError, MTPOSError, MTPFileNotFoundError, MissingExtra)),
]
FOREIGN = [
    ValueError("[matmul] Last dimension of first input with shape (1,2) must match second to last dimension"),
    OSError("broken"), RuntimeError("r"), KeyError("k"), TypeError("t"), AssertionError(), ZeroDivisionError("0"),
]  # fmt: skip


@pytest.mark.parametrize(
    "error", [*MENDABLE, *FOREIGN] if LONG else [*MENDABLE[:2], *FOREIGN[:3]], ids=lambda e: type(e).__name__
)
def test_a_command_prints_what_the_user_can_mend_and_no_other_error(monkeypatch, capsys, error):
    """A matmul of wrong shapes in the decoder is none of the user's errors, and keeps its traceback."""
    raised = pickle.loads(pickle.dumps(error))  # as ranks exchange it
    monkeypatch.setattr(Decoder, "verify", Mock(side_effect=raised))
    argv = ("generate", "--model", TRAINED, "-m", "2")
    if error in FOREIGN:
        with pytest.raises(type(error)) as caught:
            run(capsys, *argv)
        assert caught.value is raised
    else:
        status, err = run(capsys, *argv)
        assert (status, err.count("\n")) == (2, 1), err
        assert isinstance(raised, MTPError) is (type(error) is not OSError)


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("generate", "--num-draft-tokens few", "argument --num-draft-tokens: must be auto or a number, not 'few'"),
        ("generate", "--copy-drafts few", "argument --copy-drafts: must be auto, off or a number, not 'few'"),
        ("server", "--chat-template-args {", "argument --chat-template-args: must be JSON, not '{'"),
        ("generate", "--chat-template-config []", "argument --chat-template-config: must be a JSON object, not []"),
        ("server", "--prompt-cache-bytes much", "--prompt-cache-bytes: must be a size such as 10GB, not 'much'"),
        ("generate", "--mpt", "unrecognized arguments: --mpt: did you mean --mtp?"),
        ("convert", "--mlx-paht=out --inspcet x", "--mlx-paht=out --inspcet x: did you mean --mlx-path --inspect?"),
        ("benchmark", "--zzz 3", "unrecognized arguments: --zzz 3"),
        ("generate", "--temperature 0.7", "--temperature 0.7: did you mean --temp?"),
        ("server", "--max-new-tokens=9 --mpt", "--max-new-tokens=9 --mpt: did you mean --max-tokens --mtp?"),
        ("fit", "--mlx-path NEW --iter=9 --seeds 1", "--seeds 1: did you mean --seed?"),
        ("generate", "Why?", "error: 'Why?' is not a flag: give the prompt with --prompt 'Why?'"),
        ("server", "qwen3.5-4b", "error: 'qwen3.5-4b' is not a flag: give the model with --model qwen3.5-4b"),
        ("server", "--max-model-len=8192", "error: There is no --max-model-len: a context grows with the text"),
        ("generate", "--adapter-path ''", "--adapter-path is empty: give it a value, or leave it out."),
        ("server", "--port 0 --serve-model ''", "--serve-model is empty: give it a value, or leave it out."),
        ("generate", "--mtp 'def add(a):'", " nor the name of a repository. Pass the prompt with --prompt."),
        ("generate", f"--mtp '{'Why? ' * 1000}'", f"--mtp takes a head, and '{'Why? ' * 12}...' is neither"),
        ("benchmark", "--mtp Hello", "--mtp takes a head, and 'Hello' is neither"),
        ("generate", "--prompt a --image GONE", "There is no image GONE"),
        ("generate", "--prompt a --prompt-cache-dir FILE/a", "-dir: the folder FILE/a cannot be written to"),
        ("generate", "--prompt a --settings GONE", "There is no settings file GONE"),
        ("generate", "--prompt a --draft-vocab GONE", "argument --draft-vocab: invalid int value"),
        ("generate", "--prompt a --draft-head-bits 7", "draft_head_bits is 7"),
        ("generate", "--prompt a --adapter-path GONE", "there is no folder GONE"),
        ("chat", "--adapter-path FILE", "FILE is not a folder"),
        ("chat", "--prompt-cache-dir FILE", "--prompt-cache-dir: FILE is not a folder"),
        ("server", "--port 0 --prompt-cache-dir FILE", "--prompt-cache-dir: FILE is not a folder"),
        ("server", "--port 0 --adapter-path GONE", "--adapter-path: there is no folder GONE"),
        ("server", "--port 0 --mtp a/b --serve-model c", "--mtp HEAD fits one model"),
        ("server", "--port 0 --mtp a/b --allow-any-model", "--mtp HEAD fits one model"),
        ("server", "--port 0 --chat-template {%", "--chat-template cannot be rendered"),
        ("server", "--port 0 --api-key-file GONE", "--api-key-file: there is no file GONE"),
        ("server", "--port 0 --host host.invalid", "The server cannot listen at --host host.invalid, --port 0: "),
        ("demo", "--dtype float32", "argument --dtype: invalid choice: 'float32'"),
        ("demo", "--max-tokens 1", "--max-tokens must be 2 or more, not 1: times start at the first token."),
        ("benchmark", "--max-tokens 0", "--max-tokens must be 2 or more, not 0"),
        ("benchmark", "--repeat 0", "repeat must be 1 or more, not 0"),
        ("benchmark", "--prompts GONE", "there is no file GONE"),
        ("benchmark", "--prompts EMPTY", "EMPTY has no prompts"),
        ("benchmark", "--tune FOLDER", "FOLDER is a folder: name a file"),
        ("benchmark", "--tune FILE/s.json", "FILE"),
        ("benchmark", "--plot x.png", "requires --compare-depths"),
        ("benchmark", "--plot x.pgn --compare-depths", "x.pgn is not an image"),
        ("benchmark", "--json /no/such/folder/b.json", "There is no folder /no/such/folder"),
        ("benchmark", "--context 9 10 --plot x.png --compare-depths", "--plot takes one length"),
        ("benchmark", "--context 9 10 --tune", "--tune takes one length"),
        ("benchmark", "--tune --compare-depths", "remove --compare-depths"),
        ("benchmark", "--tune --draft-vocab 0", "remove --draft-vocab"),
        ("benchmark", "--prefill 1", "--prefill must be 2 or more, not 1"),
        ("benchmark", "--tune --repeat 1", "--repeat 2 or more"),
        ("fit", "--mlx-path NEW --corpus FILE GONE", "--corpus: there is no file GONE"),
        ("fit", "--mlx-path NEW --prompts FOLDER", "--prompts: FOLDER is not a file"),
        ("fit", "--mlx-path NEW --adapter-path GONE", "--adapter-path: there is no folder GONE"),
        ("fit", "--mlx-path NEW --cache-path FILE", "--cache-path: FILE is not a folder"),
        ("fit", "--mlx-path NEW --temp -1", "--temp must be 0 or more, not -1.0"),
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
    status, err = run(capsys, command, *model, *shlex.split(flags))
    (line,) = [line for line in err.splitlines() if ": error: " in line]
    assert (status, message in line, "Errno" in line) == (2, True, False), line


def test_a_template_that_the_model_cannot_render_ends_the_server(monkeypatch, capsys):
    monkeypatch.setattr("mlx_mtp.server.serve.serve", None)  # calling it would raise a TypeError
    status, err = run(capsys, "server", "--port", "0", "--chat-template", "{{ messages[0].name.upper() }}")
    assert status == 2
    assert err.splitlines()[-1].startswith("mlx_mtp server: error: --chat-template cannot be rendered: ")


# One command for all, names for models, and the commands that tell about models, caches and this machine


def test_help_lists_the_commands(capsys):
    _, out, _ = run_command(main, capsys)
    for name, (_, parser, _) in COMMANDS.items():
        assert f"  {name} " in out
        assert resolve_name(parser)().prog.replace(".", " ") == f"mlx_mtp {name}"
        told = run_command(main, capsys, name, "--help")[1]
        assert told.startswith("usage: ")
        assert run_command(main, capsys, "help", name) == (0, told, "")
    assert run_command(main, capsys, "--help") == run_command(main, capsys, "help") == (0, out, "")
    assert run_command(main, capsys, "--version") == (0, f"mlx_mtp {mlx_mtp.__version__}\n", "")


IMPORTS = """
import sys
{first}
sys.modules["mlx_mtp.server.serve"] = None  # importing it fails
before = set(sys.modules)
import mlx_mtp
from mlx_mtp import __main__
assert {{*mlx_mtp.__all__}} <= {{*dir(mlx_mtp)}}
for argv in {calls!r}:
    sys.argv = ["mlx_mtp", *argv.split()]
    try:
        __main__.main()
    except (SystemExit, ImportError):
        pass
new = set(sys.modules) - before
print(len(new), *new & {{"mlx_lm", "transformers", "numpy", "pydantic"}}, file=sys.stderr)
"""
OF_MLX_LM = ("generate", "chat", "server", "launch", "convert")  # with flags of mlx-lm


@pytest.mark.parametrize(
    ("first", "calls", "most"),
    [
        ("", ["", "--version", "genrate", "launch", "server"], 300),
        ("", [f"{name} --help" for name in COMMANDS if name not in OF_MLX_LM], 300),
        ("import mlx_lm.chat", [f"{name} --help" for name in OF_MLX_LM], 100),
    ],
)
def test_what_answers_at_once_imports_little(first, calls, most):
    """No library of models, or those that mlx-lm itself imports, more than 600 modules."""
    program = IMPORTS.format(first=first, calls=calls)
    err = subprocess.run([sys.executable, "-c", program], env={"PATH": ""}, capture_output=True, text=True).stderr
    n, *libraries = err.splitlines()[-1].split()
    assert (libraries, int(n) <= most) == ([], True), err
    assert ("[INFO] Importing mlx-lm and the server\n" in err) == ("server" in calls)


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
        refused(message, mlx_mtp.load, name, error=FileNotFoundError)


def test_a_name_loads_the_conversion_with_the_head_of_its_original(hub, tmp_path, capsys, monkeypatch):
    accepting(monkeypatch, 0.8)
    model = published()["qwen3.5-0.8b-4bit"]
    hub.publish(model.original, DATA / "dense")
    no_head(copy := copied(tmp_path))
    (copy / "README.md").write_text(f"---\nbase_model: {model.original}\n---\n")
    hub.publish(model.conversion, copy)
    assert mlx_mtp.load("qwen3.5-0.8b", mtp="auto")[0].fetched_head.source == model.original
    assert "both" in run_command(models, capsys)[1]


# About models, caches and this machine


def test_models_lists_all(capsys, monkeypatch):
    monkeypatch.setattr(about, "Account", lambda: SimpleNamespace(limit=24 * 10**9, left=22 * 10**9))
    monkeypatch.setattr("shutil.get_terminal_size", lambda: type("Size", (), {"columns": 80}))
    status, out, _ = run_command(models, capsys, "--context", "65536")
    assert status == 0
    table = out.partition("\n\n")[0].splitlines()[1:]
    rows = {line.split()[0]: line.split() for line in table}
    assert [*rows] == [model.base for model in published().values()]
    assert rows["qwen3.6-27b"][1:] == ["15.2", "0.85", "yes", "4.6", "yes", "-"]
    assert rows["qwen3-next-80b-a3b-instruct"][-4:] == ["from", "96", "GB", "-"]
    assert max(map(len, table)) <= 80
    assert "65,536 tokens" in out
    assert run_command(models, capsys, "--context", "0")[0] == 2


def test_doctor_of_models_that_draft_and_that_do_not(hub, capsys, monkeypatch, tmp_path):
    for accepted, verdict in ((0.94, "ready; "), (0.1, "the model rejects most drafts")):
        monkeypatch.setattr(MTPModel, "head_acceptance_rate", accepted)
        status, out, _ = run_command(doctor, capsys)
        assert status == 0
        assert "Model:      Demo model: completes Python only" in out
        assert f"Accepted:   {accepted:.0%} of first drafts on built-in text" in out
        assert out.splitlines()[-1].startswith(f"Verdict:    {verdict}")
    no_head(copy := copied(tmp_path))
    configure(copy, _name_or_path=None)
    status, out, _ = run_command(doctor, capsys, "--model", str(copy))
    assert status == 0
    assert "Verdict:    no drafts: " in out.splitlines()[-1]
    assert "--mtp HEAD" in out


def test_doctor_prints_every_figure_as_json(capsys, monkeypatch):
    result = SelfTest(0.01, windows={"1": 0.0, "2": 0.2}, recurrence={"MLX": {"1": [0.0, 0.001]}})
    monkeypatch.setattr(about, "ensure_tested", lambda *_: result)
    status, out, _ = run_command(doctor, capsys, "--model", str(DATA / "dense"), "--json")
    found = json.loads(out)
    assert (status, found["self-test"], found["model"]) == (0, asdict(result), str(DATA / "dense"))
    assert {"chip", "versions", "verdict"} < found.keys()
    _, out, _ = run_command(doctor, capsys, "--model", str(DATA / "dense"))
    assert "Self-test:  wrong: passes over more than 1 tokens\n            differences of logits: " in out


def test_doctor_downloads_no_weights(hub, tmp_path, capsys, monkeypatch):
    hub.publish("org/whole", DATA / "dense")
    no_head(copy := copied(tmp_path))
    (copy / "README.md").write_text("---\nbase_model: org/whole\n---\n")
    hub.publish("org/headless", copy)
    for name, head in (("org/whole", "its own"), ("org/headless", r"that of org/whole, [\d.]+ MB: --mtp fetches it")):
        status, out, _ = run_command(doctor, capsys, "--model", name)
        assert status == 0
        assert re.search(f"Head:       {head}\n", out)
        assert f"fits in memory, and is not downloaded: `mlx_mtp generate --model {name}` downloads" in out
    assert hub.served["model.safetensors"] <= 4 * HEADER_BYTES
    monkeypatch.setattr(about, "Account", lambda: SimpleNamespace(held=0, limit=1000, left=1000))
    assert "does not fit in memory" in run_command(doctor, capsys, "--model", "org/whole")[1]
    mlx_mtp.load("org/headless", mtp=False)
    _, out, _ = run_command(doctor, capsys, "--model", "org/headless")
    assert "Verdict:    no drafts: its head is that of org/whole" in out


# Every name and flag that a page, a help or an error gives is one that runs

ROOT = Path(__file__).parents[1]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
del SCRIPTS["mlx_mtp"]
PARSERS = {name: resolve_name(parser)() for name, (_, parser, _) in COMMANDS.items()}
PATTERNS = "*.md docs/**/*.md convert/*.md examples/* benchmarks/*.py scripts/**/*.py scripts/*.toml src/**/*.py"
OF_EARLIER_VERSIONS = ("CHANGELOG.md", "compare_versions.py")
FILES = [file for pattern in PATTERNS.split() for file in ROOT.glob(pattern) if file.is_file()]
PAGES = [file for file in FILES if file.name not in OF_EARLIER_VERSIONS]


def text_of(page: Path) -> str:
    """A page's text, or the cells of a notebook."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return re.sub(r'"\n +f?"', "", text)  # a sentence over several lines of code


def commands(text: str) -> list[tuple[str, list[str]]]:
    """The commands in a text, each with its flags."""
    text = text.replace("\\\n", " ")
    calls = re.findall(r"\bmlx_mtp[. ]([a-z_]+)((?: +[^`\n|;&]*)?)", text)
    return [(name, re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)) for name, rest in calls if name in PARSERS]


def test_every_name_and_flag_is_one_that_runs():
    found, n_flags = commands("`mlx_mtp fit --model X` and mlx_mtp.convert -q \\\n  --mlx-path Y | less --no"), 0
    assert found == [("fit", ["--model"]), ("convert", ["--mlx-path"])]
    assert {"README.md", "tuning.md", "quickstart.ipynb", "settings.py", "kill.py"} <= {page.name for page in PAGES}
    for page in PAGES:
        text = text_of(page)
        assert "python -m mlx_mtp" not in text, page
        for name in set(re.findall(r"(?<!\[')\bmlx_mtp\.([a-z_]+)", text)) - {"__main__"}:
            is_known = f"mlx_mtp.{name}" in SCRIPTS or hasattr(mlx_mtp, name) or find_spec(f"mlx_mtp.{name}")
            assert is_known, (page, name)
        for name, flags in commands(text):
            assert set(flags) <= PARSERS[name]._option_string_actions.keys(), (page, name)
            n_flags += len(flags)
    assert n_flags > 60


def test_a_script_is_the_module_that_has_its_name():
    for name, script in SCRIPTS.items():
        module, function = script.split(":")
        assert module.removesuffix(".__main__") == name
        assert COMMANDS[name.removeprefix("mlx_mtp.")][0] == script
        assert callable(getattr(resolve_name(module), function))


@pytest.mark.parametrize("name", PARSERS)
def test_help_has_defaults(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    parser = PARSERS[name]
    assert max(map(len, parser.format_help().splitlines())) <= 80
    for action in parser._actions:
        is_switch = action.nargs == 0 or isinstance(action.default, bool) or action.default in (None, "==SUPPRESS==")
        assert is_switch or not action.default or "efault" in action.help, action.dest
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["--version"])
    assert capsys.readouterr().out == f"mlx_mtp {name} {mlx_mtp.__version__}\n"


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_every_flag_is_mlx_lms(name):
    parsers = resolve_name(f"mlx_lm.{name}:setup_arg_parser")(), PARSERS[name]
    theirs, ours = ({a.dest: a for a in parser._actions} for parser in parsers)
    assert theirs.keys() <= ours.keys()
    for dest, a in theirs.items():
        assert (a.option_strings, a.nargs) == (ours[dest].option_strings, ours[dest].nargs)
        # A seed couples drafts: it has no default. JSON is read with the flags.
        if dest not in ("model", "num_draft_tokens", "seed", "draft_model", "chat_template_config"):
            assert a.type == ours[dest].type
            assert ours[dest].default == a.default or (name, ours[dest].default) == ("chat", None)  # the model's
            help = a.help.removesuffix(".").replace("Thresold", "Threshold")  # in mlx-lm's chat
            assert ours[dest].help.startswith(help)


def test_a_flag_of_several_commands_means_one_thing():
    for flag in ("--mtp", "--settings", "--acceptance", "--draft-vocab", "--mtp-bits", "--draft-head-bits"):
        actions = [p._option_string_actions.get(flag) for name, p in PARSERS.items() if name != "convert"]
        kinds = {(a.nargs, a.const, str(a.choices), type(a)) for a in actions if a is not None}
        assert len(kinds) == 1, flag
    for flag in ("--model", "--seed", "--max-kv-size", "--mtp", "--num-draft-tokens", "--copy-drafts", "--pipeline"):
        assert len({PARSERS[name]._option_string_actions[flag].help for name in ("generate", "chat")}) == 1


def test_what_is_loaded_is_what_flags_say(monkeypatch, capsys, tmp_path):
    """A head of its own, and for images the vision encoder of the base model."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (32, 32)).save("a.png")
    load, drafting = Mock(side_effect=MTPError("enough")), ("generate", "chat", "benchmark")
    given = {"draft_vocab": 64, "mtp_bits": 4, "draft_head_bits": 8, "dtype": "float16"}
    flags_of_it = " ".join(f"--{option.replace('_', '-')} {n}" for option, n in given.items())
    for module in ("cli.arguments", "benchmark.__main__", "generate.demo"):
        monkeypatch.setattr(resolve_name(f"mlx_mtp.{module}"), "load", load)
    for name, flags, option, want in (
        *((name, f"--mtp {head}", "mtp", head or "auto") for name, head in product(drafting, ("", "a/b"))),
        *((name, flags_of_it, option, n) for name, (option, n) in product(drafting, given.items())),
        ("generate", "--image a.png --prompt What?", "vision", "auto"),
        ("chat", "--images", "vision", "auto"),
        ("demo", "--dtype float16", "dtype", "float16"),
    ):
        assert "enough" in refusal(resolve_name(COMMANDS[name][0]), capsys, *flags.split())
        assert load.call_args.kwargs[option] == want, (name, flags)
    monkeypatch.setattr(engine_models, "load", load)
    models = engine_models.ModelProvider(
        options_of("--mtp", "org/head", "--images", "--model", "m", "--dtype", "float16")
    )
    with pytest.raises(MTPError, match="enough"):
        models.load(models.options.model)
    assert [load.call_args.kwargs[option] for option in ("mtp", "vision", "dtype")] == ["org/head", "auto", "float16"]


# Tables


def test_a_table_fits_the_terminal(monkeypatch):
    rows = [["name", "first", "second", "third"], ["a", "1", "22", "333"], ["early", "4"]]
    monkeypatch.setenv("COLUMNS", "80")
    assert table(rows) == ["name   first  second  third", "a          1      22    333", "early      4"]
    monkeypatch.setenv("COLUMNS", "20")
    upper = ["name   first  second", "a          1      22", "early      4"]
    assert table(rows) == [*upper, "", "name   third", "a        333", "early"]


def test_no_escape_sequence_is_written():
    for file in {*ROOT.glob("src/**/*.py")} - {ROOT / "src/mlx_mtp/cli/display.py"}:  # which writes to terminals alone
        lines = file.read_text(encoding="utf-8").splitlines()  # one file takes them out of what mlx-lm prints
        assert not any(re.search(r"\\033|\\x1b|\\e\[", line) for line in lines if "re.compile" not in line), file
