"""The notebook does what it shows, and what the examples have trained fits the demo."""

import ast
import re
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def shown(notebook) -> str:
    """All that a notebook prints."""
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")


def pictures(notebook) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]


@pytest.mark.slow
def test_notebook_runs_and_shows_what_is_committed():
    from nbclient import NotebookClient  # of the extra "notebook"

    committed = nbformat.read(NOTEBOOK, as_version=4)
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    briefly = {"max_tokens=128, repeat=5": "max_tokens=6, repeat=1", "run(prompt, mtp=False), run(prompt)  #": "#"}
    for text, short in briefly.items():  # its figures are not looked at
        (cell,) = (cell for cell in fresh.cells if text in cell.source)
        cell.source = cell.source.replace(text, short)
    beside = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(fresh, timeout=300, kernel_name="python3", resources=beside).execute()  # raises where a cell does
    assert shown(fresh).count("the same tokens: True") == 2
    assert "all runs: the tokens of plain mlx-lm: True" in shown(fresh)
    # All but the measured figures is the same, and how many drafts are worth their time.
    figures = re.compile(r" *\d[\d., ]*")
    assert figures.sub("#", shown(fresh)) == figures.sub("#", shown(committed))
    assert len(pictures(fresh)) == len(pictures(committed)) == 3


def test_notebook_was_run_in_order_and_shows_what_it_says():
    committed = nbformat.read(NOTEBOOK, as_version=4)
    code, text = [cell for cell in committed.cells if cell.cell_type == "code"], shown(committed)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not re.search(r"/(root|home|Users|tmp|usr)/", NOTEBOOK.read_text())
    assert not any(o.output_type == "stream" and o.name == "stderr" for cell in code for o in cell.outputs)
    accepted, copied = map(int, re.search(r"(\d+) of (\d+) copied drafts accepted", text).groups())
    assert 0.9 * copied < accepted > 100
    assert text.count("the same tokens: True") == 2
    (extra,) = re.findall(r"pip install -e '\.\[(\w+)\]'", committed.cells[0].source)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "mlx-mtp[plot]" in extras[extra]


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.py")), ids=lambda file: file.name)
def test_an_example_imports_names_that_exist(file):
    """Also one that runs beside software that the tests do not install."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("mlx_mtp"):
            for name in node.names:
                resolve_name(f"{node.module}.{name.name}")


def test_readme_names_every_example():
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for file in (ROOT / "examples").iterdir():
        assert file.name in readme or file.name in ("README.md", "__pycache__"), file.name
