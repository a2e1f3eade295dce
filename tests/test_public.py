"""The public names, how they are imported, and the architecture: imports that go down only."""

import ast
import builtins
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from itertools import permutations
from pathlib import Path

import mlx_mtp
from mlx_mtp.errors import EXTRAS

PACKAGE = Path(mlx_mtp.__file__).parent
ROOT = Path(__file__).parents[1]
COMMANDS = {"about", "generate", "chat", "convert", "benchmark", "server", "fit"}
SHARED = {"cli", "files", "prompts"}  # by the commands
LIBRARY = {"batch", "caches", "checkpoint", "decoding", "distributed", "drafts", "images", "memory", "models"}
LIBRARY |= {"pacing", "prompt_store", "sampling", "text"}
# What each package or module may import, beside itself, the version and the errors; the public names may import anything.
ARROWS = {
    **{name: set() for name in ("distributed", "errors", "files", "memory", "pacing", "sampling", "traces")},
    "prompts": {"files"},
    "caches": {"traces"},
    "text": {"pacing"},
    "drafts": {"pacing", "sampling"},
    "layers": {"caches", "pacing", "traces"},
    "models": {"caches", "distributed", "drafts", "layers", "pacing"},
    "images": {"caches", "memory", "models"},
    "decoding": {"caches", "distributed", "drafts", "layers", "models", "pacing", "sampling", "traces"},
    "batch": {"caches", "decoding", "distributed", "drafts", "layers", "models", "pacing"},
    "prompt_store": {"caches", "files", "memory"},
    # It tries heads that it has fetched.
    "checkpoint": LIBRARY - {"checkpoint", "decoding", "prompt_store", "text"} | {"files", "layers", "prompts"},
    "cli": LIBRARY - {"batch", "decoding", "images", "memory", "models", "text"} | {"files", "layers", "traces"},
    **{command: LIBRARY | {"layers"} | SHARED for command in COMMANDS},
    "chat": LIBRARY | SHARED | {"generate"},  # an answer is generated as there
    "launch": SHARED | {"server"},
}


# The files of the package by the names of their modules
FILES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in PACKAGE.glob("**/*.py")
}


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


@cache
def imports_of(name: str) -> set[str]:
    """The modules of the package that a module imports, at its top or inside a function."""
    found: set[str] = set()
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            # `from .. import prompts` names a module, `from ..files import check_source` a name in one.
            found |= {f"{origin}.{a.name}" if f"{origin}.{a.name}" in FILES else origin for a in node.names}
    return found & FILES.keys()


def part_of(name: str) -> str:
    """The package or the module under ``mlx_mtp`` or ``mlx_mtp.core`` that a module belongs to."""
    return (name.removeprefix("mlx_mtp.core").removeprefix("mlx_mtp").split(".") + [""])[1]


def test_imports_go_down_only():
    assert imports_of("mlx_mtp.generate") == {"mlx_mtp.generate.stream"}
    assert "mlx_mtp.prompts" in imports_of("mlx_mtp.benchmark.__main__")  # from .. import prompts
    assert "mlx_mtp.core.batch.generate_step" in imports_of("mlx_mtp.generate.check")  # from ..core.batch.generate_step
    for name in FILES:
        own = part_of(name)
        if own not in ("", "__main__", "_version"):
            assert own in ARROWS, f"{own} is a new package: add what it may import to ARROWS"
            parts = {part_of(imported) for imported in imports_of(name)} - {own, "_version", "errors"}
            assert parts <= ARROWS[own], name


def test_no_import_cycle():
    graph = {name: imports_of(name) - {name} for name in FILES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(FILES)  # raises CycleError


RAISED = {"RuntimeError", "NotImplementedError", "SystemExit"}  # which no user can mend
ELSEWHERE = {  # of a validator of pydantic or of the system, or caught by the same module
    "ValueError": ("server.api.common", "text.tool_calls", "checkpoint.settings"),
    "OSError": ("checkpoint.output",),
    "BlockingIOError": ("prompt_store.disk",),
}


def test_what_is_raised_is_of_one_base():
    raises = [(name, n) for name in FILES for n in ast.walk(tree_of(name)) if isinstance(n, ast.Raise) and n.exc]
    assert len(raises) > 100
    for name, node in raises:
        kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        raised = kind.attr if isinstance(kind, ast.Attribute) else getattr(kind, "id", "")
        builtin = isinstance(getattr(builtins, raised, None), type)
        is_known = raised in RAISED or name.removeprefix("mlx_mtp.") in ELSEWHERE.get(raised, ())
        assert not builtin or is_known, f"{name}:{node.lineno}: raise an MTPError in place of a {raised}"


def test_no_package_imports_its_own_main():
    """``python -m`` would warn of it."""
    mains = {name for name in FILES if name.endswith("__main__")}
    assert len(mains) > 5
    assert not mains & set().union(*(imports_of(name) for name in FILES.keys() - mains))


def test_scripts_and_benchmarks_import_support_alone_of_the_tests():
    files = [*ROOT.glob("scripts/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    text = "\n".join(file.read_text() for file in files)
    found = re.findall(r"^(?:from|import) (tests[.\w]*)", text, re.MULTILINE)
    assert found
    assert all(name.startswith("tests.support.") for name in found)


def test_public_names():
    names = "DEMO MAX_DRAFT_TOKENS BatchGenerator BatchResponse Depth DraftCounts GenerationResponse KVOptions "
    names += "MTPError MTPModule PromptStore TextOptions __version__ batch_generate convert generate load make_grammar "
    names += "make_prompt_cache make_sampler mtp_generate_step stream_generate"
    assert mlx_mtp.__all__ == names.split()
    (checked,) = [node for node in tree_of("mlx_mtp").body if isinstance(node, ast.If)]  # what type checkers read
    read = {a.name: f".{node.module}" for node in checked.body for a in node.names}
    assert read == mlx_mtp._MODULES
    assert {*mlx_mtp.__all__} == {*read, "MTPError", "__version__"}
    assert (PACKAGE / "py.typed").exists()
    assert mlx_mtp.DEMO.is_dir()
    assert mlx_mtp.MAX_DRAFT_TOKENS == 8
    assert all(callable(getattr(mlx_mtp, name)) for name in mlx_mtp.__all__[2:] if name != "__version__")


USE = """
import mlx_mtp; from mlx_mtp import convert, generate; from mlx_mtp.generate import stream_generate
assert mlx_mtp.generate is generate and mlx_mtp.stream_generate is stream_generate
assert mlx_mtp.convert is convert and callable(generate) and callable(convert)
try: mlx_mtp.generate(None, None, [1], max_tokens=0)
except ValueError as e: print(e)
"""
WITHOUT_EXTRAS = """
import sys
names = {names!r}
sys.modules |= dict.fromkeys(names)  # importing them fails
for order in {orders!r}:
    for name in [name for name in sys.modules if name.startswith("mlx_mtp")]:
        del sys.modules[name]
    exec(order, {{}})
import mlx_mtp
from mlx_mtp import __main__
from mlx_mtp.checkpoint import load
load.ensure_tested = lambda *_: None  # seconds
for argv in {calls!r}:
    sys.argv = ["mlx_mtp", *argv]
    try:
        __main__.main()
    except SystemExit as e:
        print(e.code, file=sys.stderr)
try:
    mlx_mtp.make_grammar(None, json_schema={{}})
except ImportError as e:
    print(e, file=sys.stderr)
assert not any(sys.modules.get(name) for name in names)
"""


def test_without_extras_and_in_any_order_of_imports():
    """What needs an extra says how to install it. As in mlx-lm, ``generate`` is the function, and a module to import from."""
    ways = ("import mlx_mtp", "from mlx_mtp import generate", "from mlx_mtp.generate import stream_generate")
    orders = ["\n".join([*order, USE]) for order in permutations(ways, 2)]
    calls = {
        ("server",): f"mlx_mtp server requires {', '.join(EXTRAS['server'])}: {{server}}",
        ("chat",): "mlx_mtp chat requires prompt_toolkit: {chat}",
        ("generate", "--json-schema", "{}"): "mlx_mtp generate: error: --json-schema requires fastapi",
        ("benchmark", "--compare-depths", "--plot", "x.png"): "error: A plot requires matplotlib: {plot}",
        ("generate", "-m", "5", "--prompt", "def f(x):"): None,
        ("models",): None,
    }
    program = WITHOUT_EXTRAS.format(names=sum(EXTRAS.values(), ()), orders=orders, calls=[*calls])
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("must be non-zero") == len(orders)
    lines = done.stderr.splitlines()
    for message in filter(None, calls.values()):
        message = re.sub(r"{(\w+)}", r"pip install 'mlx-mtp[\1]'", message)
        (i,) = [i for i, line in enumerate(lines) if message in line]
        assert lines[i + 1] == "2"
    assert lines[-1].endswith("pip install 'mlx-mtp[server]'")
    assert "Traceback" not in done.stderr


def test_direct_dependencies_are_few():
    """And the tests have all."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len({re.match(r"[\w-]+", name)[0] for name in project["dependencies"]}) <= 11
    assert EXTRAS.keys() <= project["optional-dependencies"].keys()
    assert set(re.findall(r"\w+", project["optional-dependencies"]["test"][0])) >= EXTRAS.keys()


# The source archive holds what its own tests need


BUILD = "from setuptools.build_meta import build_sdist; print(build_sdist('built'))"
TREE = (".ci", "benchmarks", "convert", "docs", "examples", "scripts", "src", "tests")
TOP_FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml")
MADE = shutil.ignore_patterns("__pycache__", "*.egg-info")


def test_the_archive_has_every_file_of_the_repository(tmp_path):
    for name in TREE:
        shutil.copytree(
            ROOT / name, tmp_path / "tree" / name, ignore=MADE, copy_function=lambda _, new: Path(new).touch()
        )
    for name in TOP_FILES:
        shutil.copy(ROOT / name, tmp_path / "tree")
    shutil.copy(ROOT / "src" / "mlx_mtp" / "_version.py", tmp_path / "tree" / "src" / "mlx_mtp")
    wanted = {str(path.relative_to(tmp_path / "tree")) for path in tmp_path.rglob("*") if path.is_file()}
    built = subprocess.run([sys.executable, "-c", BUILD], cwd=tmp_path / "tree", capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with tarfile.open(tmp_path / "tree" / "built" / built.stdout.splitlines()[-1]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/support/models.py", "tests/support/ranks/generation.py", "tests/data/dense/config.json"} <= wanted
    assert wanted - held == set()
