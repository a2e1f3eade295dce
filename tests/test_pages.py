"""Pages and examples: links lead somewhere, what scripts/measure.py writes is of kept outputs, and the notebook runs."""

import ast
import plistlib
import re
import shlex
import tomllib
from pathlib import Path
from pkgutil import resolve_name
from xml.etree import ElementTree

import nbformat
import pytest

from mlx_mtp.checkpoint.catalog import published
from scripts import draw_measurements, draw_tokens, measure
from tests.support import pages

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("convert/*.md"), *ROOT.glob("tests/**/*.md")]
SECTIONS = measure.read_sections()
COMMANDS = [command for section in SECTIONS for command in section.commands]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    for page in PAGES:
        links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        for link in (link for link in links if not link.startswith("http")):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), (page, link)
            assert not anchor or anchor in anchors(target), (page, link)


def test_every_page_is_reached_from_the_readme():
    seen, waiting = set(), [README]
    while waiting:
        page = waiting.pop().resolve()
        if page not in seen:
            seen.add(page)
            links = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
            waiting += [page.parent / link for link in links if not link.startswith("http")]
    assert {page.resolve() for page in ROOT.glob("docs/**/*.md")} <= seen


@pytest.mark.parametrize(("pattern", "n"), [("README.md", 600), ("docs/*.md", 900), ("docs/develop/*.md", 1200)])
def test_a_page_is_short(pattern, n):
    """A page is, and not the sum: a feature needs its words."""

    def n_words(page: Path) -> int:
        return sum(bool(re.search(r"\w", word)) for word in page.read_text(encoding="utf-8").split())

    assert {page.name: n_words(page) for page in ROOT.glob(pattern) if n_words(page) > n} == {}


BLOCKS = [block for page in pages.PAGES for block in pages.blocks(page)]
CHECKS = {
    "python": lambda code: compile(code, "page", "exec"),
    "toml": tomllib.loads,
    "xml": lambda code: plistlib.loads(code.encode()),
}


def test_every_block_of_code_is_run_or_says_why_not():
    """scripts/run_blocks.py runs them, in a job of its own."""
    for block in BLOCKS:
        is_data = block.language in ("", "toml", "xml")
        assert block.is_run or is_data or block.note.startswith(("test", "not run: ")), str(block)
        CHECKS.get(block.language, str)(block.code)


# Figures


def rows(page: Path) -> list[list[str]]:
    """The rows of a page's tables."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def test_a_figure_of_others_is_the_same_on_all_pages():
    """The table of docs/speed.md is the source: (chip, link) -> speed."""
    speed = ROOT / "docs" / "speed.md"
    source = {(row[0], link): row[2] for row in rows(speed) for link in re.findall(r"\]\((http[^)]+)\)", row[-1])}
    quoted = [(row[0], row[2], link) for row in rows(README) for link in re.findall(r"\]\((http[^)]+)\)", row[-1])]
    assert len(quoted) == 3
    for chip, figure, link in quoted:
        assert source[chip, link].partition(";")[0] == figure, (chip, link)
    parts = [part for chip, _, figure, *_ in rows(speed) if chip.startswith(("M1", "M2")) for part in figure.split(";")]
    old = [float(figure) for part in parts if "another" not in part for figure in re.findall(r"\d\.\d+", part)]
    span = f"{min(old):.1f} to {max(old):.1f}"
    assert all(span in page.read_text(encoding="utf-8") for page in (speed, README))


def test_sizes_of_models_are_those_of_the_catalog():
    sizes = {f"`{model.base}`": f"{model.disk_gb} GB" for model in published().values()}
    table = [row for row in rows(ROOT / "docs" / "models.md") if row[1].partition(" ")[0] in sizes]
    assert len(table) == 8
    for _, model, size, _ in table:
        assert sizes[model.partition(" ")[0]] == size, model


# Measurements


def test_what_is_written_is_of_the_kept_outputs():
    assert measure.PAGE.read_text(encoding="utf-8") == measure.write_page()
    for file, chart in draw_measurements.charts().items():
        (description,) = ElementTree.parse(file).iter("{http://purl.org/dc/elements/1.1/}description")
        assert description.text == draw_measurements.describe(chart)
    assert measure.join(["a  b\n1  2", "a  b\n3  4"]) == "a  b\n1  2\n3  4"


def test_the_picture_of_tokens_is_that_of_a_run():
    tokens = draw_tokens.generate()
    assert {source for _, source in tokens} == {"model", "head", "copies"}
    assert draw_tokens.FILE.read_text(encoding="utf-8") == draw_tokens.draw(tokens)


def test_sections_are_kept_under_their_names():
    names = [section.name for section in SECTIONS]
    assert {file.stem for file in measure.KEPT.iterdir()} <= set(names)
    assert len({section.title for section in SECTIONS}) == len(names)
    for section in SECTIONS:
        assert section.prepare is None or section.prepare in measure.PREPARE
        assert section.commands or section.file.exists()


FIGURE = r"\d[\d,]*(?:\.\d+)?"


def test_results_are_figures_of_the_kept_output():
    for section in (s for s in SECTIONS if s.file.exists()):
        _, _, output = measure.read_kept(section.file)
        figures = [figure.rstrip(",") for figure in re.findall(FIGURE, section.result)]
        assert figures, section.name
        assert set(figures) <= {figure.rstrip(",") for figure in re.findall(FIGURE, output)}, section.name


def test_scripts_and_flags_of_the_commands_exist():
    calls = [shlex.split(command) for command in COMMANDS if command.startswith("python -m ")]
    assert len(calls) > 10
    for _, _, module, *arguments in calls:
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        for flag in (a.removeprefix("--") for a in arguments if a.startswith("--")):
            assert re.search(rf'"--{flag}"|\b{flag.replace("-", "_")}=', source), (module, flag)


# Words that the glossary has others for, and sentences whose subject is no one.
OTHER_WORDS = (
    r"otherwise than|Error tells|gave the grammar|tells? nothing|pictured|\bMOST_|\bdecided\b|fixed depth|draft depth"
)


def test_one_noun_for_a_concept():
    files = [*ROOT.glob("src/mlx_mtp/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    assert len(files) > 100
    found = [(file.name, m[0]) for file in files for m in re.finditer(OTHER_WORDS, file.read_text(encoding="utf-8"))]
    assert not found


def test_the_glossary_names_what_is_in_the_code():
    rows = re.findall(
        r"^\| (?!word|---)(.+?) \|.*\| (.+) \|$", (ROOT / "docs/develop/glossary.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 50
    package = ROOT / "src" / "mlx_mtp"
    words = set(re.findall(r"\w+", "\n".join(file.read_text(encoding="utf-8") for file in package.rglob("*.py"))))
    for word, where in rows:
        for name in re.findall(r"`(.+?)`", where):
            is_file = name.endswith((".py", "/"))
            assert (package / name).exists() if is_file else words.issuperset(name.split(".")), (word, name)


# Examples


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
    assert "all runs: the tokens of plain mlx-lm: True" in text
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
