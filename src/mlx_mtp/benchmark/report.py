"""The benchmark's report as text."""

from collections.abc import Callable, Mapping, Sequence

from ..cli.display import table
from .measure import OVERALL, Report, Result
from .runs import AUTO, COPY, HEAD, NO_DRAFTS

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
]
# Columns, computed from a result and the result at the first length.
GROWTH_COLUMNS: list[tuple[str, Callable[[Result, Result], str]]] = [
    ("drafts", lambda r, first: str(r.run)),
    ("ms a token", lambda r, first: f"{1e3 / r.plain_tps:.2f} {1e3 / r.mtp_tps:.2f}"),
    ("of the first", lambda r, first: f"{first.plain_tps / r.plain_tps:.2f} {first.mtp_tps / r.mtp_tps:.2f}"),
    ("ratio", lambda r, first: f"{r.ratio:.2f}"),
    ("tokens/step", lambda r, first: f"{r.tokens_per_step:.2f}"),
    ("step/plain", lambda r, first: f"{r.step_to_plain:.2f}"),
    ("of the first", lambda r, first: f"{r.step_to_plain / first.step_to_plain:.2f}"),
    ("first token, s", lambda r, first: f"{r.plain_first_token:.3f} {r.mtp_first_token:.3f}"),
    ("ratio", lambda r, first: f"{r.mtp_first_token / r.plain_first_token:.3f}"),
]


def show(report: Report) -> str:
    """The report as lines of text."""
    names = list(dict.fromkeys(r.prompt for r in report.results))
    rows = [["", *(title for title, _ in COLUMNS)]]
    for name in names:
        plain, *_ = results = report.of(name)
        rows.append([f"{name}: plain", f"{plain.plain_tps:.1f}"])
        rows += [[f"  {r.run}", *(column(r) for _, column in COLUMNS)] for r in results]
    lines = [*_show_model(report), "", *table(rows), "", *_show_details(report), ""]
    differing = [f"{r.prompt} ({r.run})" for r in report.results if not r.identical and r.prompt != OVERALL]
    lines.append(
        f"Tokens differ from those of plain mlx-lm: {', '.join(differing)}"
        if differing
        else "All runs generated the tokens of plain mlx-lm"
    )
    loops = loop_warning(report.repeated)
    return "\n".join([*lines, *([loops] if loops else [])])


def loop_warning(shares: Mapping[str, float]) -> str | None:
    """A warning that names repetitive texts, if any: drafts are nearly always right in a loop.

    Args:
        shares (Mapping[str, float]): The repeated share of each text, by prompt.
    """
    loops = [f"{name} {share:.0%}" for name, share in shares.items() if share > LOOPS]
    if not loops:
        return None
    return (
        f"Warning: texts that repeat themselves, and how much of each: {', '.join(loops)}. Their figures hold for loops: "
        "use other prompts."
    )


def percent(result: Result) -> tuple[int, int, int]:
    """The percentages of tokens from the head, from copies and from the target itself; they sum to 100."""
    head, copies = round(100 * result.fraction(HEAD)), round(100 * result.fraction(COPY))
    return head, copies, 100 - head - copies


def _show_details(report: Report) -> list[str]:
    results = report.of(OVERALL)
    rows = [[OVERALL, *(title for title, _ in DETAILS)]]
    rows += [[f"  {r.run}", *(column(r) for _, column in DETAILS)] for r in results]
    acceptance = [[f"  {r.run}", *(f"{a:.2f}" for a in r.acceptance)] for r in results if r.drafted]
    if not acceptance:
        return table(rows)
    return [*table(rows), "", "Acceptance rate of the head's drafts, by position", *table(acceptance)]


def _show_model(report: Report) -> list[str]:
    versions = ", ".join(f"{name} {v}" for name, v in report.versions.items())
    lines = [f"{report.model} on {report.machine['chip']} ({report.machine['device']}); {versions}"]
    used = max(r.mtp_peak_memory for r in report.results)
    lines.append(f"Memory: {report.needed_memory:.3f} GB estimated, at most {used:.3f} GB used")
    lines.append(
        f"Up to {report.max_tokens} tokens for each prompt, {report.repeat} rounds; of two figures the first is plain mlx-lm's"
    )
    return lines


def gain(report: Report, name: str = "auto") -> str:
    """The gain of the default, auto, over all prompts, in two parts: of compiled passes, and of drafts."""
    ratios = {r.run: r for r in report.of(OVERALL)}
    auto, compiled = ratios[AUTO], ratios[NO_DRAFTS].ratio
    return (
        f"{name}: {auto.ratio:.2f} times as fast as plain mlx-lm ({auto.ratio_low:.2f} to {auto.ratio_high:.2f} by round): "
        f"compiled passes {compiled:.2f}, drafts {auto.ratio / compiled:.2f}"
    )


def show_growth(reports: Sequence[Report], n_layers: int) -> str:
    """The growth of the times of a token, of a step and to the first token with the context, as lines of text."""
    n_prompts = len({r.prompt for r in reports[0].results}) - 1
    rows = [["tokens", *(title for title, _ in GROWTH_COLUMNS)]]
    for first, *others in zip(*(r.of(OVERALL) for r in reports)):
        for r in (first, *others):
            rows.append([str(r.prompt_tokens // n_prompts), *(column(r, first) for _, column in GROWTH_COLUMNS)])
    return "\n".join(
        [
            "By length, all prompts together (tokens: the mean of a prompt); of two figures the first is plain mlx-lm's.",
            "The time of a token depends on the acceptance rate, and so on the text; that of a step (step/plain) does not.",
            f"The head adds one layer to {n_layers}: a prompt should take no more than {1 + 1 / n_layers:.3f} of plain.",
            "",
            *table(rows),
        ]
    )
