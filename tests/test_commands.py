"""The commands: every name and flag that a page, a help or an error gives is one that runs."""

import json
import re
import tomllib
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from unittest.mock import Mock

import pytest
from PIL import Image

import mlx_mtp
from mlx_mtp.__main__ import COMMANDS
from mlx_mtp.cli.display import table
from mlx_mtp.errors import MTPError
from mlx_mtp.server.engine import models as engine_models
from tests.support.commands import refusal
from tests.support.requests import options_of

ROOT = Path(__file__).parents[1]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
MAIN = SCRIPTS.pop("mlx_mtp")  # tests/test_about.py
PARSERS = {name: resolve_name(module).make_parser() for name, (module, _) in COMMANDS.items()}
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


def test_pages_are_found():
    names = {page.name for page in PAGES}
    assert {"README.md", "tuning.md", "quickstart.ipynb", "settings.py", "kill.py", "run_blocks.py"} <= names
    assert sum(len(flags) for page in PAGES for _, flags in commands(text_of(page))) > 60
    found = commands("`mlx_mtp fit --model X` and mlx_mtp.convert -q \\\n  --mlx-path Y | less --no")
    assert found == [("fit", ["--model"]), ("convert", ["--mlx-path"])]


def test_every_name_and_flag_is_one_that_runs():
    for page in PAGES:
        text = text_of(page)
        assert "python -m mlx_mtp" not in text, page
        for name in set(re.findall(r"\bmlx_mtp\.([a-z_]+)", text)) - {"__main__"}:
            is_known = f"mlx_mtp.{name}" in SCRIPTS or hasattr(mlx_mtp, name) or find_spec(f"mlx_mtp.{name}")
            assert is_known, (page, name)
        for name, flags in commands(text):
            assert set(flags) <= PARSERS[name]._option_string_actions.keys(), (page, name)


def test_a_script_is_the_module_that_has_its_name():
    for name, script in SCRIPTS.items():
        module, function = script.split(":")
        assert module.removesuffix(".__main__") == name
        assert COMMANDS[name.removeprefix("mlx_mtp.")][0] == module
        assert callable(getattr(resolve_name(module), function))


@pytest.mark.parametrize("name", PARSERS)
def test_help_has_groups_and_defaults(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    parser = PARSERS[name]
    assert max(map(len, parser.format_help().splitlines())) <= 80
    grouped = [action for group in parser._action_groups[2:] for action in group._group_actions]
    others = {action.dest for action in parser._actions if action not in grouped}
    if name in ("generate", "chat", "server", "convert", "benchmark", "fit"):  # others have few flags
        assert others <= {"help", "version", "verbose"}
    for action in grouped:
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
        if dest not in ("model", "num_draft_tokens", "seed", "draft_model"):  # a seed couples drafts: it has no default
            assert a.type == ours[dest].type
            assert ours[dest].default == a.default or (name, ours[dest].default) == ("chat", None)  # the model's
            assert ours[dest].help.startswith(a.help.removesuffix("."))


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
    cheaper = {"draft_vocab": 64, "mtp_bits": 4, "draft_head_bits": 8}
    flags_of_it = " ".join(f"--{option.replace('_', '-')} {n}" for option, n in cheaper.items())
    monkeypatch.setattr("mlx_mtp.cli.flags.load", load)
    monkeypatch.setattr("mlx_mtp.benchmark.__main__.load", load)
    for name, flags, option, want in (
        *((name, f"--mtp {head}", "mtp", head or "auto") for name, head in product(drafting, ("", "a/b"))),
        *((name, flags_of_it, option, n) for name, (option, n) in product(drafting, cheaper.items())),
        ("generate", "--image a.png --prompt What?", "vision", "auto"),
        ("chat", "--images", "vision", "auto"),
    ):
        assert "enough" in refusal(resolve_name(f"mlx_mtp.{name}.__main__").main, capsys, *flags.split())
        assert load.call_args.kwargs[option] == want, (name, flags)
    monkeypatch.setattr(engine_models, "load", load)
    models = engine_models.ModelProvider(options_of("--mtp", "org/head", "--images", "--model", "m"))
    with pytest.raises(MTPError, match="enough"):
        models.load(models.options.model)
    assert [load.call_args.kwargs[option] for option in ("mtp", "vision")] == ["org/head", "auto"]
    for more in (["--serve-model", "other"], ["--allow-any-model"]):
        with pytest.raises(ValueError, match="--mtp HEAD fits one model"):
            options_of("--mtp", "org/head", *more)


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
