"""Draw docs/pictures/{depth,fit,latency}.svg from reports and measured outputs; scripts/measure.py does it, too.

python -m scripts.draw_measurements
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
KEPT = DOCS / "develop" / "measurements"
PICTURES = {"demo": "depth", "fit": "fit", "latency": "latency"}  # by section of measurements.md

WIDTH, HEIGHT = 700, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 200, 20, 60  # margins, in pixels; the names of the series are at the right
STYLE = """
.back{fill:#ffffff}.ink{fill:#1f2937}.grid{stroke:#d1d5db}.one{stroke:#6b7280}
.s0{stroke:#2563eb;fill:#2563eb}.s1{stroke:#d97706;fill:#d97706}.s2{stroke:#16a34a;fill:#16a34a}.s3{stroke:#9333ea;fill:#9333ea}
@media (prefers-color-scheme:dark){.back{fill:#0d1117}.ink{fill:#e6edf3}.grid{stroke:#30363d}.one{stroke:#9ca3af}
.s0{stroke:#60a5fa;fill:#60a5fa}.s1{stroke:#fbbf24;fill:#fbbf24}.s2{stroke:#4ade80;fill:#4ade80}.s3{stroke:#c084fc;fill:#c084fc}}
text{font:12px system-ui,sans-serif;stroke:none}.line{fill:none;stroke-width:2}
"""


@dataclass(frozen=True)
class Series:
    """Figures at some of the places of a chart.

    Args:
        name (str): Beside the last figure.
        values (Sequence[float]): One for each place, from the first on.
        errors (Sequence[Tuple[float, float]]): The lowest and highest of each value, or none.
        n_joined (int): How many of the values a line joins.
    """

    name: str
    values: Sequence[float]
    errors: Sequence[tuple[float, float]]
    n_joined: int


@dataclass(frozen=True)
class Chart:
    """Figures over a few named places, as SVG.

    Args:
        title (str): For those who do not see it.
        places (Sequence[str]): The labels below.
        below (str): What the places are.
        left (str): What the figures are, with their unit.
        top (float): The end of the scale, which begins at 0.
        step (float): Between two lines of the grid.
        series (Sequence[Series]): At most four.
        one (bool): Whether the line at 1 stands out.
    """

    title: str
    places: Sequence[str]
    below: str
    left: str
    top: float
    step: float
    series: Sequence[Series]
    one: bool = False

    def x(self, i: float) -> float:
        return LEFT + (i + 0.5) * (WIDTH - LEFT - RIGHT) / len(self.places)

    def y(self, value: float) -> float:
        return TOP + (1 - value / self.top) * (HEIGHT - TOP - BOTTOM)

    def svg(self) -> str:
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'role="img"><title>{escape(self.title)}</title><style>{STYLE}</style>',
            f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
            *self._grid(),
            *(part for i, series in enumerate(self.series) for part in self._draw(i, series)),
            *self._names(),
        ]
        return "\n".join(parts) + "\n</svg>\n"

    def _grid(self) -> list[str]:
        lines, right = [], WIDTH - RIGHT
        for i in range(round(self.top / self.step) + 1):
            value, y = i * self.step, self.y(i * self.step)
            kind = "one" if self.one and abs(value - 1) < 1e-9 else "grid"
            lines.append(f'<line class="{kind}" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            lines.append(text(LEFT - 8, y + 4, f"{value:g}", "end"))
        lines += [text(self.x(i), HEIGHT - BOTTOM + 18, place, "middle") for i, place in enumerate(self.places)]
        middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
        turned = f'transform="rotate(-90 16 {middle:.0f})"'
        return [
            *lines,
            text((LEFT + right) / 2, HEIGHT - 14, self.below, "middle"),
            text(16, middle, self.left, "middle", turned),
        ]

    def _draw(self, i: int, series: Series) -> list[str]:
        aside = 8 * (i - (len(self.series) - 1) / 2) if series.errors else 0  # whiskers stand side by side
        points = [(self.x(j) + aside, self.y(value)) for j, value in enumerate(series.values)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points[: series.n_joined])
        parts = [f'<polyline class="line s{i}" style="fill:none" points="{joined}"/>']
        for (x, _), (low, high) in zip(points, series.errors):
            parts.append(
                f'<line class="s{i}" x1="{x:.1f}" x2="{x:.1f}" y1="{self.y(low):.1f}" y2="{self.y(high):.1f}"/>'
            )
        return parts + [f'<circle class="s{i}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in points]

    def _names(self) -> list[str]:
        """The names of the series, in the order of their last figures and not one over the other."""
        order = sorted(range(len(self.series)), key=lambda i: -self.series[i].values[-1])
        parts, below = [], float(TOP)
        for i in order:
            y = max(self.y(self.series[i].values[-1]), below)
            below = y + 18
            parts.append(f'<circle class="s{i}" cx="{WIDTH - RIGHT + 14}" cy="{y:.1f}" r="4"/>')
            parts.append(text(WIDTH - RIGHT + 24, y + 4, self.series[i].name, "start"))
        return parts


def text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    return f'<text class="ink" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'


def scale(values: Sequence[float], step: float) -> float:
    """The end of a scale in whole steps."""
    return step * (int(max(values) / step) + 1)


def depth_chart() -> Chart:
    """The ratios in docs/results: the head alone by depth, copies alone, and both."""
    runs = {"1": "1", "2": "2", "3": "3", "4": "4", "auto, no copies": "auto", "copies alone": "copies", "auto": "both"}
    series = []
    for file in sorted((DOCS / "results").glob("*.json"))[:4]:
        results = json.loads(file.read_text(encoding="utf-8"))
        figures = [results["runs"][run] for run in runs]
        name = f"{results['model']['name']}, {results['model']['backbone']}, {results['prompts']['kind']}"
        errors = [(f["ratio_low"], f["ratio_high"]) for f in figures]
        series.append(Series(name, [f["ratio"] for f in figures], errors, 4))
    top = scale([high for s in series for _, high in s.errors], 0.5)
    return Chart(
        "Speed by number of drafts",
        [*runs.values()],
        "head alone: 1 to 4 drafts, auto;   copies alone;   both",
        "speed, plain mlx-lm = 1",
        top,
        0.5,
        series,
        one=True,
    )


def fit_chart() -> Chart:
    """The share of steps that accept each draft, before the head is fitted and after."""
    pairs = [
        [(float(value), float(error)) for value, error in re.findall(r"(\d\.\d+) ± (\d\.\d+)", line)[:2]]
        for line in output_of("fit").splitlines()
        if line.startswith("draft ")
    ]
    series = []
    for name, column in zip(("before", "after"), zip(*pairs)):
        series.append(Series(name, [v for v, _ in column], [(v - e, v + e) for v, e in column], len(column)))
    places = [str(i + 1) for i in range(len(pairs))]
    left = "accepted, share of steps"
    return Chart("Acceptance before and after fitting", places, "draft", left, 1, 0.2, series[::-1])


def latency_chart() -> Chart:
    """The gain on two processes by the time of an exchange."""
    lines = [line for line in output_of("latency").splitlines() if re.match(r" +2 ", line)]
    rows = [re.split(r" {2,}", line.strip()) for line in lines]
    ratios = [[float(value) for value in (row[7], *row[8].split(" to "), row[9])] for row in rows]
    series = [
        Series("parts allow", [allowed for *_, allowed in ratios], [], len(rows)),
        Series("measured", [r for r, *_ in ratios], [(low, high) for _, low, high, _ in ratios], len(rows)),
    ]
    top = scale([value for row in ratios for value in row], 1)
    places = [row[2] for row in rows]
    below, left = "time of an exchange between two processes, ms", "speed, plain mlx-lm = 1"
    return Chart("Speed by latency", places, below, left, top, 1, series, one=True)


def output_of(name: str) -> str:
    return (KEPT / f"{name}.txt").read_text(encoding="utf-8")


def pictures() -> dict[str, str]:
    """Each picture by its name."""
    return {"depth": depth_chart().svg(), "fit": fit_chart().svg(), "latency": latency_chart().svg()}


def draw_all() -> None:
    for name, svg in pictures().items():
        (DOCS / "pictures" / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    draw_all()
