"""The benchmark's report as text, and the head's speed by depth as a picture."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..cli.display import table
from ..extras import require
from .measure import AUTO, COPY, HEAD, NO_COPIES, NO_DRAFTS, OVERALL, Report, Result, Run

LOOPS = 1 / 3  # a larger share of repeated tokens is reported
COLUMNS: list[tuple[str, Callable[[Result], str]]] = [
    ("tokens/s", lambda r: f"{r.mtp_tps:.1f}"),
    ("ratio", lambda r: f"{r.ratio:.2f}"),
    ("lowest", lambda r: f"{r.ratio_low:.2f}"),
    ("highest", lambda r: f"{r.ratio_high:.2f}"),
    ("head", lambda r: f"{percent(r)[0]}%"),
    ("copies", lambda r: f"{percent(r)[1]}%"),
    ("target", lambda r: f"{percent(r)[2]}%"),
    ("tokens/step", lambda r: f"{r.tokens_per_step:.2f}"),
]
DETAILS: list[tuple[str, Callable[[Result], str]]] = [
    ("first token, s", lambda r: f"{r.plain_first_token:.3f} {r.mtp_first_token:.3f}"),
    ("peak GB", lambda r: f"{r.plain_peak_memory:.2f} {r.mtp_peak_memory:.2f}"),
    ("copies accepted", lambda r: f"{sum(r.copies_accepted)}/{sum(r.copied)}"),
    ("step/plain", lambda r: f"{r.tokens_per_step / r.ratio:.2f}"),  # which does not depend on the acceptance rate
]
NAMES: dict[Run, str] = {NO_COPIES: "head, auto", AUTO: "head and copies, auto"}
BLUE, GREY = "#2563a8", "#6b7280"
COLORS: dict[Run, str] = {NO_COPIES: BLUE, AUTO: "#2e8b57"}


def show(report: Report) -> str:
    """The report as lines of text."""
    overall, names = report.of(OVERALL), list(dict.fromkeys(r.prompt for r in report.results))
    versions = ", ".join(f"{name} {v}" for name, v in report.versions.items())
    used = max(r.mtp_peak_memory for r in report.results)
    rows = [["", *(title for title, _ in COLUMNS)]]
    for name in names:
        rows.append([f"{name}: plain", f"{report.of(name)[0].plain_tps:.1f}"])
        rows += [[f"  {r.run}", *(column(r) for _, column in COLUMNS)] for r in report.of(name)]
    details = [[OVERALL, *(title for title, _ in DETAILS)]]
    details += [[f"  {r.run}", *(column(r) for _, column in DETAILS)] for r in overall]
    lines = [
        f"{report.model} on {report.machine['chip']} ({report.machine['device']}); {versions}",
        f"Memory: {report.needed_memory:.3f} GB estimated, at most {used:.3f} GB used",
        f"Up to {report.max_tokens} tokens for each prompt, {report.repeat} rounds; of two figures the first is plain "
        "mlx-lm's",
        *("", *table(rows), "", *table(details), ""),
    ]
    rates = [[f"  {r.run}", *(f"{a / d:.2f}" for a, d in zip(r.accepted, r.drafted))] for r in overall if r.drafted]
    if rates:
        lines += ["Acceptance rate of the head's drafts, by position", *table(rates), ""]
    differing = [f"{r.prompt} ({r.run})" for r in report.results if not r.identical and r.prompt != OVERALL]
    lines.append(
        f"Tokens differ from those of plain mlx-lm: {', '.join(differing)}"
        if differing
        else "All runs generated the tokens of plain mlx-lm"
    )
    loops = loop_warning(report.repeated)
    return "\n".join([*lines, *([loops] if loops else [])])


def loop_warning(shares: Mapping[str, float]) -> str | None:
    """A warning that names repetitive texts, if any, by their repeated shares: drafts are nearly always right in a loop."""
    loops = [f"{name} {share:.0%}" for name, share in shares.items() if share > LOOPS]
    if not loops:
        return None
    return (
        f"Warning: texts that repeat themselves, and how much of each: {', '.join(loops)}. Their figures hold for loops: "
        "use other prompts."
    )


def percent(result: Result) -> tuple[int, int, int]:
    """The percentages of tokens from the head, from copies and from the target itself; they sum to 100."""
    head, copies = (round(100 * result.origins[o] / sum(result.origins.values())) for o in (HEAD, COPY))
    return head, copies, 100 - head - copies


def gain(report: Report, name: str = "auto") -> str:
    """The gain of the default, auto, over all prompts, in two parts: of compiled passes, and of drafts."""
    ratios = {r.run: r for r in report.of(OVERALL)}
    auto, compiled = ratios[AUTO], ratios[NO_DRAFTS].ratio
    return (
        f"{name}: {auto.ratio:.2f} times as fast as plain mlx-lm ({auto.ratio_low:.2f} to {auto.ratio_high:.2f} by round): "
        f"compiled passes {compiled:.2f}, drafts {auto.ratio / compiled:.2f}"
    )


# The picture


def check_plot(file: Path) -> None:
    """Raise a ValueError if a picture could not be drawn into this file."""
    require("plot", "A plot")
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if file.suffix[1:] not in formats:
        raise ValueError(
            f"{file} is not an image that matplotlib can write: name it with one of .{', .'.join(sorted(formats))}."
        )


def plot(report: Report) -> Any:
    """Draw the head's speed by depth for all prompts together, with auto as lines. The report must have a fixed depth."""
    from matplotlib.figure import Figure

    fixed = [r for r in report.of(OVERALL) if isinstance(r.run, int)]
    auto = [r for r in report.of(OVERALL) if r.run in NAMES]
    depths, ratios = [int(r.run) for r in fixed], [r.ratio for r in fixed]
    spread = [[r.ratio - r.ratio_low for r in fixed], [r.ratio_high - r.ratio for r in fixed]]
    figure = Figure(figsize=(6.5, 4.8), layout="constrained")
    title = f"{Path(report.model).name}: MTP and mlx-lm, {report.max_tokens} tokens a prompt, {report.repeat} rounds"
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots()
    axes.axhline(1, color=GREY, linewidth=1.5, label="plain mlx-lm")
    axes.errorbar(depths, ratios, spread, fmt="o-", color=BLUE, capsize=3, label="head, fixed depth")
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
    axes.spines[["top", "right"]].set_visible(False)
    return figure
