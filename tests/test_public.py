"""The public names, how they are imported, and the architecture: imports that go down only."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from itertools import permutations
from pathlib import Path

import pytest

import mlx_mtp
from mlx_mtp.checkpoint.load import DEMO_NOTE

PACKAGE = Path(mlx_mtp.__file__).parent
ROOT = Path(__file__).parents[1]
COMMANDS = {"about", "generate", "chat", "convert", "benchmark", "server", "draft_vocab", "fit"}
SHARED = {"cli", "files", "prompts"}  # by the commands
LIBRARY = {"batch", "caches", "checkpoint", "decoding", "distributed", "drafts", "images", "memory", "models"}
LIBRARY |= {"pacing", "prompt_store", "sampling", "text"}
# What each room may import, beside itself and the version; the public names may import anything.
ARROWS = {
    "distributed": set(),
    "files": set(),
    "prompts": {"files"},
    "memory": set(),
    "caches": set(),
    "sampling": set(),
    "layers": {"caches"},
    "models": {"caches", "distributed", "layers"},
    "images": {"caches", "memory", "models"},
    "pacing": {"distributed", "layers", "models"},
    "text": {"pacing"},
    "drafts": {"caches", "layers", "models", "pacing", "text"},
    "decoding": {"caches", "distributed", "drafts", "layers", "models", "pacing", "sampling", "text"},
    "batch": {"caches", "decoding", "drafts", "models", "pacing"},
    "prompt_store": {"caches", "memory"},
    # It tries heads that it has fetched.
    "checkpoint": {"decoding", "distributed", "files", "images", "layers", "memory", "models", "prompts"},
    "cli": {"caches", "checkpoint", "distributed", "drafts", "files", "images", "pacing", "prompt_store", "sampling"},
    **{command: LIBRARY | {"layers"} | SHARED for command in COMMANDS},
    "chat": LIBRARY | SHARED | {"generate"},  # an answer is generated as there
}


def module_files() -> dict[str, Path]:
    """The files of the package by the name of their module."""
    files = {}
    for file in PACKAGE.glob("**/*.py"):
        parts = ("mlx_mtp", *file.relative_to(PACKAGE).with_suffix("").parts)
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


FILES = module_files()


def imports_of(name: str) -> set[str]:
    """The modules of the package that a module imports, at its top or inside a function."""
    found: set[str] = set()
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            # `from .. import prompts` names a module, `from ..files import check_source` a name in one.
            found |= {f"{origin}.{a.name}" if f"{origin}.{a.name}" in FILES else origin for a in node.names}
    return found & FILES.keys()


def room(name: str) -> str:
    """The package or the module under ``mlx_mtp`` that a module belongs to."""
    return (name.split(".") + [""])[1]


def test_imports_are_found():
    assert "mlx_mtp.prompts" in imports_of("mlx_mtp.benchmark.__main__")  # from .. import prompts
    assert "mlx_mtp.generate.check" in imports_of("mlx_mtp.generate.__main__")  # from .check import check
    assert "mlx_mtp.decoding.loop" in imports_of("mlx_mtp.generate.check")  # from ..decoding.loop import ...
    assert imports_of("mlx_mtp.generate") == {"mlx_mtp.generate.stream"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_go_down_only(name):
    own = room(name)
    if own in ("", "__main__", "_version"):
        return
    assert own in ARROWS, f"{own} is a new package: add what it may import to ARROWS"
    rooms = {room(imported) for imported in imports_of(name)} - {own, "_version"}
    assert rooms <= ARROWS[own]


def test_no_import_cycle():
    graph = {name: imports_of(name) - {name} for name in FILES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(FILES)  # raises CycleError


def test_scripts_and_benchmarks_import_support_alone_of_the_tests():
    files = [*ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/*.py")]
    text = "\n".join(file.read_text() for file in files)
    found = re.findall(r"^(?:from|import) (tests[.\w]*)", text, re.MULTILINE)
    assert found
    assert all(name.startswith("tests.support.") for name in found)


def test_public_names():
    names = (
        "DEMO MAX_DRAFT_TOKENS BatchGenerator BatchResponse Depth DraftCounts GenerationResponse MTPModule PromptStore"
    )
    names += " __version__ batch_generate convert generate load make_grammar make_prompt_cache make_sampler"
    assert mlx_mtp.__all__ == [*names.split(), "mtp_generate_step", "stream_generate"]
    assert (PACKAGE / "py.typed").exists()
    assert mlx_mtp.DEMO.is_dir()
    assert mlx_mtp.MAX_DRAFT_TOKENS == 8
    assert all(callable(getattr(mlx_mtp, name)) for name in mlx_mtp.__all__[2:] if name != "__version__")


def test_generate_is_a_function_in_any_order_of_imports():
    """As in mlx-lm, ``generate`` is the function, and its module can still be imported from."""
    ways = ("import mlx_mtp", "from mlx_mtp import generate", "from mlx_mtp.generate import stream_generate")
    use = (
        "import mlx_mtp; from mlx_mtp import convert, generate; from mlx_mtp.generate import stream_generate\n"
        "assert mlx_mtp.generate is generate and mlx_mtp.stream_generate is stream_generate\n"
        "assert mlx_mtp.convert is convert and callable(generate) and callable(convert)\n"
        "try: mlx_mtp.generate(None, None, [1], max_tokens=0)\n"
        "except ValueError as e: print(e)"
    )
    orders = ["\n".join([*order, use]) for order in permutations(ways, 2)]
    program = f"""
import sys
import mlx_lm
for order in {orders!r}:
    for name in [name for name in sys.modules if name.startswith("mlx_mtp")]:
        del sys.modules[name]
    exec(order, {{}})
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.count("must be non-zero") == len(orders)


def test_the_command_runs_without_a_warning():
    command = [sys.executable, "-W", "error", "-m", "mlx_mtp.generate", "--mtp", "-m", "5", "--prompt", "-"]
    done = subprocess.run(command, capture_output=True, text=True, input="def f(x):\n    return")
    assert done.returncode == 0
    assert done.stderr == f"{DEMO_NOTE}. `mlx_mtp models` lists real models.\n"
    assert "tokens-per-step" in done.stdout
