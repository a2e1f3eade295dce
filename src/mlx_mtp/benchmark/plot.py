"""The benchmark's report as a picture: the head's speed by depth, and the gain of copies on each kind of prompt."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..extras import require
from .measure import OVERALL, Report, Result
from .runs import AUTO, NO_COPIES, Run

BLUE, GREEN, GREY = "#2563a8", "#2e8b57", "#6b7280"
NAMES: dict[Run, str] = {NO_COPIES: "head, auto", AUTO: "head and copies, auto"}
COLORS: dict[Run, str] = {NO_COPIES: BLUE, AUTO: GREEN}


def check(file: Path) -> None:
    """Raise a ValueError if a picture could not be drawn into this file."""
    require("plot", "A plot")
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if file.suffix[1:] not in formats:
        raise ValueError(
            f"{file} is not an image that matplotlib can write: name it with one of .{', .'.join(sorted(formats))}."
        )


def draw(report: Report) -> Any:
    """Draw a report that has fixed depths.

    Args:
        report (Report): A report of ``measure`` with at least one number among its depths.

    Returns:
        matplotlib.figure.Figure: Speed by depth for all prompts together, and that of auto on each prompt if there are several.
    """
    from matplotlib.figure import Figure

    overall = report.of(OVERALL)
    fixed = [r for r in overall if isinstance(r.run, int)]
    auto = [r for r in overall if r.run in NAMES]
    if not fixed:
        raise ValueError("A plot of speed by depth needs fixed depths: measure some.")
    by_prompt = {r.run: [s for s in report.results if s.run == r.run and s.prompt != OVERALL] for r in auto}
    several = any(len(results) > 1 for results in by_prompt.values())
    figure = Figure(figsize=(11.5, 4.8) if several else (6.5, 4.8), layout="constrained")
    figure.suptitle(_title(report), fontsize=11)
    left, *right = figure.subplots(1, 2 if several else 1, squeeze=False)[0]
    _draw_depths(left, fixed, auto)
    for axes in right:
        _draw_prompts(axes, by_prompt)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_depths(axes: Any, fixed: Sequence[Result], auto: Sequence[Result]) -> None:
    """Draw the head's speed by depth, and auto as horizontal lines."""
    depths = [int(r.run) for r in fixed]
    axes.axhline(1, color=GREY, linewidth=1.5, label="plain mlx-lm")
    ratios = [r.ratio for r in fixed]
    axes.errorbar(depths, ratios, _spread(fixed), fmt="o-", color=BLUE, capsize=3, label="head, fixed depth")
    for k, ratio in zip(depths, ratios):
        axes.annotate(f"{ratio:.2f}", (k, ratio), (5, -13), textcoords="offset points", color=BLUE)
    for r in auto:
        axes.axhline(r.ratio, color=COLORS[r.run], linestyle=":", label=f"{NAMES[r.run]}: {r.ratio:.2f}")
    axes.set_xlim(min(depths) - 0.4, max(depths) + 0.5)
    axes.set_ylim(0, 1.12 * max(1.0, *(r.ratio_high for r in [*fixed, *auto])))
    axes.set_xticks(depths)
    axes.set_xlabel("drafts in a step")
    axes.set_ylabel("speed, plain mlx-lm = 1")
    axes.legend(loc="lower right", frameon=False)


def _draw_prompts(axes: Any, by_prompt: Mapping[Run, Sequence[Result]]) -> None:
    """Draw the speed on each prompt as bars from the top down, one for each run."""
    height = 0.8 / len(by_prompt)
    for i, (run, results) in enumerate(by_prompt.items()):
        rows = [row + i * height for row in range(len(results))]
        style = {"color": COLORS[run], "ecolor": GREY, "height": height}
        axes.barh(rows, [r.ratio for r in results], xerr=_spread(results), label=NAMES[run], **style)
    names = [r.prompt.replace("_", " ") for r in results]
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(names))], names)
    axes.invert_yaxis()
    axes.axvline(1, color=GREY, linewidth=1.5)
    axes.set_xlabel("speed, plain mlx-lm = 1")
    axes.legend(frameon=False)


def _spread(results: Sequence[Result]) -> list[list[float]]:
    """The distances from the ratios to their lowest and highest values."""
    return [[r.ratio - r.ratio_low for r in results], [r.ratio_high - r.ratio for r in results]]


def _title(report: Report) -> str:
    return f"{Path(report.model).name}: MTP and mlx-lm, {report.max_tokens} tokens a prompt, {report.repeat} rounds"
