"""The benchmark's report as a picture: speed by depth, and what each kind of prompt gains."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

BLUE, ORANGE, GREY = "#2563a8", "#d97706", "#6b7280"


def check(file: Path) -> None:
    """Raise a ValueError if a picture could not be drawn into this file."""
    if find_spec("matplotlib") is None:
        raise ValueError("A plot needs matplotlib: pip install 'mlx-mtp[plot]'.")
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if file.suffix[1:] not in formats:
        raise ValueError(
            f"{file} is no image that matplotlib can write: name it with one of .{', .'.join(sorted(formats))}."
        )


def draw(report: Any) -> Any:
    """
    Draw a report that has fixed depths.

    Args:
        report (mlx_mtp.measure.Report): Of ``measure`` with at least one number among its depths.

    Returns:
        matplotlib.figure.Figure: Speed by depth for all prompts together, and for each of several the gain of each arm.
    """
    from matplotlib.figure import Figure

    overall = report.of("overall")
    fixed = [r for r in overall if isinstance(r.num_draft_tokens, int)]
    auto = [r for r in overall if not isinstance(r.num_draft_tokens, int)]
    if not fixed:
        raise ValueError("A plot of speed by depth needs fixed depths: measure some.")
    names = [name for name in dict.fromkeys(r.prompt for r in report.results) if name != "overall"]
    several = len(names) > 1

    figure = Figure(figsize=(11.5, 4.8) if several else (6.5, 4.8), layout="constrained")
    figure.suptitle(_title(report), fontsize=11)
    left, *right = figure.subplots(1, 2 if several else 1, squeeze=False)[0]

    depths = [r.num_draft_tokens for r in fixed]
    left.axhline(1, color=GREY, linewidth=1.5, label="plain mlx-lm")
    left.plot(depths, [r.allowed for r in fixed], "--", color=ORANGE, label="allowed by the parts of a step")
    spread = [[r.ratio - r.ratio_low for r in fixed], [r.ratio_high - r.ratio for r in fixed]]
    left.errorbar(depths, [r.ratio for r in fixed], spread, fmt="o-", color=BLUE, capsize=3, label="MTP, fixed depth")
    for r in fixed:
        left.annotate(f"{r.ratio:.2f}", (r.num_draft_tokens, r.ratio), (5, -13), textcoords="offset points", color=BLUE)
    for r in auto:
        left.axhline(r.ratio, color=BLUE, linestyle=":", label=f"MTP, auto: {r.ratio:.2f}")
    left.set_xlim(min(depths) - 0.4, max(depths) + 0.5)
    left.set_ylim(0, 1.12 * max(1.0, *(max(r.ratio_high, r.allowed) for r in overall)))
    left.set_xticks(depths)
    left.set_xlabel("drafts in a step")
    left.set_ylabel("speed, plain mlx-lm = 1")
    left.legend(loc="lower right", frameon=False)

    for axes in right:
        arm, chosen = ("auto", auto) if auto else (f"depth {depths[-1]}", fixed[-1:])
        k = chosen[0].num_draft_tokens
        rows = [r for name in reversed(names) for r in report.of(name) if r.num_draft_tokens == k]
        places = range(len(rows))
        spread = [[r.ratio - r.ratio_low for r in rows], [r.ratio_high - r.ratio for r in rows]]
        axes.barh(places, [r.ratio for r in rows], xerr=spread, color=BLUE, alpha=0.8, ecolor=GREY, height=0.6)
        for i, r in zip(places, rows):
            note = f" {r.tokens_per_step:.2f} tokens a step"
            axes.annotate(note, (0, i), (4, 0), textcoords="offset points", color="white", va="center", fontsize=8)
        axes.axvline(1, color=GREY, linewidth=1.5)
        axes.set_yticks(places, [r.prompt.replace("_", " ") for r in rows])
        axes.set_xlabel(f"speed with {arm}, plain mlx-lm = 1")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _title(report: Any) -> str:
    title = f"{Path(report.model).name}: MTP beside plain mlx-lm, {report.max_tokens} tokens a prompt, {report.repeat} rounds"
    if report.acceptance_was_set is not None:
        title += f"\nrandom weights; acceptance was set to {report.acceptance_was_set}, not measured"
    return title
