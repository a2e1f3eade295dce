"""The benchmark's report as a picture: speed by depth, and what each kind of prompt gains."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .measure import OVERALL, Report, Result

BLUE, ORANGE, GREY = "#2563a8", "#d97706", "#6b7280"


def check(file: Path) -> None:
    """Raise a ValueError if a picture could not be drawn into this file."""
    if find_spec("matplotlib") is None:
        raise ValueError("A plot needs matplotlib: pip install matplotlib.")
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if file.suffix[1:] not in formats:
        raise ValueError(
            f"{file} is not an image that matplotlib can write: name it with one of .{', .'.join(sorted(formats))}."
        )


def draw(report: Report) -> Any:
    """
    Draw a report that has fixed depths.

    Args:
        report (Report): A report of ``measure`` with at least one number among its depths.

    Returns:
        matplotlib.figure.Figure: Speed by depth for all prompts together, and the gain of each prompt if there are several.
    """
    from matplotlib.figure import Figure

    overall = report.of(OVERALL)
    fixed = [r for r in overall if isinstance(r.num_draft_tokens, int)]
    auto = [r for r in overall if not isinstance(r.num_draft_tokens, int)]
    if not fixed:
        raise ValueError("A plot of speed by depth needs fixed depths: measure some.")
    k = (auto or fixed)[-1].num_draft_tokens  # the deepest where there is no auto
    by_prompt = [r for r in report.results if r.prompt != OVERALL and r.num_draft_tokens == k]
    several = len(by_prompt) > 1
    figure = Figure(figsize=(11.5, 4.8) if several else (6.5, 4.8), layout="constrained")
    figure.suptitle(_title(report), fontsize=11)
    left, *right = figure.subplots(1, 2 if several else 1, squeeze=False)[0]
    _draw_depths(left, fixed, auto)
    for axes in right:
        _draw_prompts(axes, by_prompt[::-1])
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_depths(axes: Any, fixed: Sequence[Result], auto: Sequence[Result]) -> None:
    """Speed by depth, with what the parts of a step allow, and auto as a line across."""
    depths = [int(r.num_draft_tokens) for r in fixed]
    axes.axhline(1, color=GREY, linewidth=1.5, label="plain mlx-lm")
    axes.plot(depths, [r.allowed for r in fixed], "--", color=ORANGE, label="allowed by the parts of a step")
    ratios = [r.ratio for r in fixed]
    axes.errorbar(depths, ratios, _spread(fixed), fmt="o-", color=BLUE, capsize=3, label="MTP, fixed depth")
    for k, ratio in zip(depths, ratios):
        axes.annotate(f"{ratio:.2f}", (k, ratio), (5, -13), textcoords="offset points", color=BLUE)
    for r in auto:
        axes.axhline(r.ratio, color=BLUE, linestyle=":", label=f"MTP, auto: {r.ratio:.2f}")
    axes.set_xlim(min(depths) - 0.4, max(depths) + 0.5)
    axes.set_ylim(0, 1.12 * max(1.0, *(max(r.ratio_high, r.allowed) for r in [*fixed, *auto])))
    axes.set_xticks(depths)
    axes.set_xlabel("drafts in a step")
    axes.set_ylabel("speed, plain mlx-lm = 1")
    axes.legend(loc="lower right", frameon=False)


def _draw_prompts(axes: Any, results: Sequence[Result]) -> None:
    """The speed on each prompt as a bar, from the bottom up."""
    k = results[0].num_draft_tokens
    rows = range(len(results))
    spread = _spread(results)
    axes.barh(rows, [r.ratio for r in results], xerr=spread, color=BLUE, alpha=0.8, ecolor=GREY, height=0.6)
    for i, r in zip(rows, results):
        note = f" {r.tokens_per_step:.2f} tokens a step"
        axes.annotate(note, (0, i), (4, 0), textcoords="offset points", color="white", va="center", fontsize=8)
    axes.axvline(1, color=GREY, linewidth=1.5)
    axes.set_yticks(rows, [r.prompt.replace("_", " ") for r in results])
    axes.set_xlabel(f"speed with {f'depth {k}' if isinstance(k, int) else k}, plain mlx-lm = 1")


def _spread(results: Sequence[Result]) -> list[list[float]]:
    """The distances from the ratios to their lowest and highest values."""
    return [[r.ratio - r.ratio_low for r in results], [r.ratio_high - r.ratio for r in results]]


def _title(report: Report) -> str:
    title = f"{Path(report.model).name}: MTP beside plain mlx-lm, {report.max_tokens} tokens a prompt, {report.repeat} rounds"
    if report.acceptance_was_set is not None:
        title += f"\nrandom weights; acceptance was set to {report.acceptance_was_set}, not measured"
    return title
