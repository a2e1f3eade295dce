"""Make the table and the plot of docs/results.md from the files in docs/results/.

    python -m scripts.results_table

Each file is what ``mlx_mtp benchmark --model M --report FILE`` wrote on one machine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mlx_mtp.benchmark.results_file import RUNS, describe, markdown, read_results
from mlx_mtp.benchmark.runs import AUTO, COPIES, NO_COPIES
from mlx_mtp.cli.errors import one_line_errors
from scripts.draw_measurements import save
from scripts.shared import script_parser

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- table: scripts/results_table.py -->\n", "<!-- end -->\n"
COLORS = {"head alone, best depth": "#9dbfdd", "head alone, auto": "#2563a8", "copies alone": "#d9d9d9"}
COLORS |= {"both, auto": "#2e8b57"}


def read_all(folder: Path) -> list[dict[str, Any]]:
    """The results of all files, by machine, model and prompts; a ValueError where one is not a report."""
    machines = [read_results(file) for file in sorted(folder.glob("*.json"))]
    if not machines:
        raise ValueError(f"There are no reports in {folder}.")
    return sorted(machines, key=lambda results: (describe(results), results["date"]))


def insert_table(page: Path, machines: Sequence[Mapping[str, Any]]) -> str:
    """The page with the table of these results."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no lines {BEGIN.strip()} and {END.strip()}, between which the table is.")
    return f"{before}{BEGIN}\n{markdown(machines)}\n\n{END}{after}"


def draw(machines: Sequence[Mapping[str, Any]]) -> Any:
    """Speed relative to plain mlx-lm as bars, a group for each machine."""
    height = 0.8 / len(COLORS)
    figure = Figure(figsize=(8, 1.2 + 1.1 * len(machines)), layout="constrained")
    axes = figure.subplots()
    for i, (name, color) in enumerate(COLORS.items()):
        places = [j + i * height for j in range(len(machines))]
        axes.barh(places, [ratios(results)[name] for results in machines], height, color=color, label=name)
    labels = ["\n".join(describe(results)) for results in machines]
    axes.set_yticks([j + 0.4 - height / 2 for j in range(len(machines))], labels)
    axes.invert_yaxis()
    axes.axvline(1, color="#6b7280", linewidth=1.5)
    axes.set_xlabel("speed, plain mlx-lm = 1")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(COLORS), frameon=False, fontsize=9)
    return figure


def ratios(results: Mapping[str, Any]) -> dict[str, float]:
    """The bars of a machine, in the order of their colours."""
    by_run = {run: results["runs"][str(run)]["ratio"] for run in RUNS}
    best = max(ratio for run, ratio in by_run.items() if isinstance(run, int))
    return dict(zip(COLORS, (best, by_run[NO_COPIES], by_run[COPIES], by_run[AUTO])))


def main() -> None:
    args = script_parser(__doc__, docs=(DOCS, "The folder of results.md and results/.")).parse_args()
    with one_line_errors("results_table.py"):
        machines = read_all(args.docs / "results")
        page = args.docs / "results.md"
        text = insert_table(page, machines)
        save(draw(machines), args.docs / "results.svg")
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
