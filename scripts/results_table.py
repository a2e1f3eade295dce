"""Make the table and the plot of docs/results.md from the files in docs/results/.

    python -m scripts.results_table

Each file is what ``mlx_mtp benchmark --model M --report FILE`` wrote on one machine.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_mtp.benchmark.row import RUNS, describe_row, markdown, read_row
from mlx_mtp.benchmark.runs import AUTO, COPIES, NO_COPIES
from mlx_mtp.cli.errors import one_line_errors

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- table: scripts/results_table.py -->\n", "<!-- end -->\n"
COLORS = {
    "head alone, best depth": "#9dbfdd",
    "head alone, auto": "#2563a8",
    "copies alone": "#d9d9d9",
    "both, auto": "#2e8b57",
}


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of all files, by machine, model and prompts.

    Raises:
        ValueError: There are none, or one is not a report.
    """
    rows = [read_row(file) for file in sorted(folder.glob("*.json"))]
    if not rows:
        raise ValueError(f"There are no reports in {folder}.")
    return sorted(rows, key=lambda row: (describe_row(row), row["date"]))


def insert_table(page: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """The page with the table of these rows."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"{page} has no place for the table: write {BEGIN.strip()} and {END.strip()} on lines of their own."
        )
    return f"{before}{BEGIN}\n{markdown(rows)}\n\n{END}{after}"


def draw(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Speed relative to plain mlx-lm as bars, a group for each row."""
    from matplotlib.figure import Figure

    height = 0.8 / len(COLORS)
    figure = Figure(figsize=(8, 1.2 + 1.1 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for i, (name, color) in enumerate(COLORS.items()):
        places = [j + i * height for j in range(len(rows))]
        axes.barh(places, [ratios(row)[name] for row in rows], height, color=color, label=name)
    axes.set_yticks([j + 0.4 - height / 2 for j in range(len(rows))], ["\n".join(describe_row(row)) for row in rows])
    axes.invert_yaxis()
    axes.axvline(1, color="#6b7280", linewidth=1.5)
    axes.set_xlabel("speed, plain mlx-lm = 1")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(COLORS), frameon=False, fontsize=9)
    return figure


def ratios(row: Mapping[str, Any]) -> dict[str, float]:
    """The bars of a row, in the order of their colours."""
    by_run = {run: row["runs"][str(run)]["ratio"] for run in RUNS}
    best = max(ratio for run, ratio in by_run.items() if isinstance(run, int))
    return dict(zip(COLORS, (best, by_run[NO_COPIES], by_run[COPIES], by_run[AUTO])))


def main() -> None:
    import matplotlib as mpl

    parser = argparse.ArgumentParser(description="Make the table and the plot of docs/results.md.")
    parser.add_argument(
        "--docs", type=Path, default=DOCS, help="The folder of results.md and results/ (default: docs)."
    )
    args = parser.parse_args()
    with one_line_errors("results_table.py"):
        rows = read_rows(args.docs / "results")
        page = args.docs / "results.md"
        text = insert_table(page, rows)
        with mpl.rc_context({"svg.hashsalt": "results", "svg.fonttype": "none"}):  # the same bytes each time
            draw(rows).savefig(args.docs / "results.svg", metadata={"Date": None})
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
