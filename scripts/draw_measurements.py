"""Draw docs/pictures/{depth,fit,latency}.svg from the kept outputs; scripts/measure.py does it, too.

python -m scripts.draw_measurements
"""

import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
COLORS = ("#3b82f6", "#d97706", "#16a34a", "#a855f7")  # on white and on black
DARK = """<style>@media (prefers-color-scheme:dark){text{fill:#e6edf3!important}
#patch_1 path,#patch_2 path{fill:#0d1117!important}}</style>"""


@dataclass(frozen=True)
class Series:
    """Figures at some of the places of a chart."""

    name: str  # in the legend
    values: Sequence[float]  # one for each place, from the first on
    errors: Sequence[tuple[float, float]]  # the lowest and highest of each value, or none
    n_joined: int  # how many of the values a line joins


@dataclass(frozen=True)
class Chart:
    """Figures over a few named places."""

    places: Sequence[str]  # the labels below
    below: str  # what the places are
    left: str  # what the figures are, with their unit
    series: Sequence[Series]  # at most four
    one: bool = False  # whether the line at 1 stands out

    def draw(self) -> Any:
        """A figure of matplotlib, which takes a second to import."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = figure.subplots()
        for i, (s, color) in enumerate(zip(self.series, COLORS)):
            aside = 0.05 * (i - (len(self.series) - 1) / 2) if s.errors else 0  # whiskers stand side by side
            x = [j + aside for j in range(len(s.values))]
            errors = [[abs(end - v) for v, end in zip(s.values, ends)] for ends in zip(*s.errors)] or None
            axes.errorbar(x, s.values, errors, fmt="o", color=color, label=s.name)
            axes.plot(x[: s.n_joined], s.values[: s.n_joined], color=color)
        if self.one:
            axes.axhline(1, color="#6b7280", linewidth=1.5)
        axes.set(xlabel=self.below, ylabel=self.left, ylim=(0, None))
        axes.set_xticks(range(len(self.places)), self.places)
        axes.grid(axis="y", color="#9ca3af", linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False)
        return figure


def save(figure: Any, file: Path, description: str = "") -> None:
    """Write a picture for light and dark pages, the same bytes each time."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.hashsalt": file.stem, "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Description": description or None})
    file.write_text(text.getvalue().replace("<defs>", f"{DARK}\n <defs>", 1), encoding="utf-8")


def depth_chart() -> Chart:
    """The demo's speed: the head alone by depth, copies alone, and both."""
    runs = {"1": "1", "2": "2", "3": "3", "4": "4", "auto, no copies": "auto", "copies alone": "copies", "auto": "both"}
    series = []
    for name, label in (("demo", "bfloat16"), ("demo-4bit", "4-bit")):
        table = output_of(name).partition("overall: plain")[2].partition("\n\n")[0]
        rows = [re.split(" {2,}", line.strip()) for line in table.splitlines()[1:]]
        figures = {run: [float(f) for f in ratios] for run, _, *ratios in [row[:5] for row in rows]}
        values = [figures[run] for run in runs]
        series.append(Series(f"demo, {label}", [v for v, _, _ in values], [(low, high) for _, low, high in values], 4))
    below = "head alone: 1 to 4 drafts, auto;   copies alone;   both"
    return Chart([*runs.values()], below, "speed, plain mlx-lm = 1", series, one=True)


def fit_chart() -> Chart:
    """The share of steps that accept each draft, before the head is fitted and after."""
    lines = [line for line in output_of("fit").splitlines() if line.startswith("draft ")]
    found = [re.findall(r"(\d\.\d+) ± (\d\.\d+)", line)[:2] for line in lines]
    pairs = [[(float(value), float(error)) for value, error in pair] for pair in found]
    series = []
    for name, column in zip(("before", "after"), zip(*pairs)):
        series.append(Series(name, [v for v, _ in column], [(v - e, v + e) for v, e in column], len(column)))
    places = [str(i + 1) for i in range(len(pairs))]
    return Chart(places, "draft", "accepted, share of steps", series[::-1])


def latency_chart() -> Chart:
    """The gain on two processes by the time of an exchange."""
    lines = [line for line in output_of("latency").splitlines() if re.match(r" +2 ", line)]
    rows = [re.split(r" {2,}", line.strip()) for line in lines]
    ratios = [[float(value) for value in (row[7], *row[8].split(" to "), row[9])] for row in rows]
    series = [
        Series("parts allow", [allowed for *_, allowed in ratios], [], len(rows)),
        Series("measured", [r for r, *_ in ratios], [(low, high) for _, low, high, _ in ratios], len(rows)),
    ]
    below = "time of an exchange between two processes, ms"
    return Chart([row[2] for row in rows], below, "speed, plain mlx-lm = 1", series, one=True)


def output_of(name: str) -> str:
    return (DOCS / "develop" / "measurements" / f"{name}.txt").read_text(encoding="utf-8")


def charts() -> dict[Path, Chart]:
    """Each chart by its file."""
    made = {"depth": depth_chart(), "fit": fit_chart(), "latency": latency_chart()}
    return {DOCS / "pictures" / f"{name}.svg": chart for name, chart in made.items()}


def describe(chart: Chart) -> str:
    """What a chart shows, which its picture has as description."""
    return json.dumps(asdict(chart))


def draw_all() -> None:
    for file, chart in charts().items():
        save(chart.draw(), file, describe(chart))


if __name__ == "__main__":
    draw_all()
