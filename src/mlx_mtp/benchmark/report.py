"""The benchmark's figures as lines for people."""

from collections.abc import Callable, Sequence

from .measure import OVERALL, Report, Result
from .parts import EVERY, Parts

COLUMNS: list[tuple[str, Callable[[Result], str]]] = [
    ("prompt          ", lambda r: f"{r.prompt:16}"),
    ("tokens", lambda r: str(r.prompt_tokens)),
    ("drafts", lambda r: str(r.num_draft_tokens)),
    ("plain t/s", lambda r: f"{r.plain_tps:.1f}"),
    ("MTP t/s", lambda r: f"{r.mtp_tps:.1f}"),
    ("ratio", lambda r: f"{r.ratio:.2f}"),
    (" low to high", lambda r: f"{r.ratio_low:.2f} to {r.ratio_high:.2f}"),
    ("allowed", lambda r: f"{r.allowed:.2f}"),
    ("efficiency", lambda r: f"{r.efficiency:.2f}"),
    ("tokens/step", lambda r: f"{r.tokens_per_step:.2f}"),
    ("first token, s", lambda r: f"{r.plain_first_token:.3f} {r.mtp_first_token:.3f}"),
    ("  peak GB", lambda r: f"{r.plain_peak_memory:.2f} {r.mtp_peak_memory:.2f}"),
    ("same", lambda r: "yes" if r.identical else "no"),
    ("accepted/drafted", lambda r: f"{sum(r.accepted)}/{sum(r.drafted)}"),
    ("copies   ", lambda r: f"{sum(r.copies_accepted)}/{sum(r.copied)}"),
    ("by position", lambda r: " ".join(f"{a:.2f}" for a in r.acceptance).ljust(11)),
]
# Each of a result and of that at the first length.
GROWTH_COLUMNS: list[tuple[str, Callable[[Result, Result], str]]] = [
    ("drafts", lambda r, first: str(r.num_draft_tokens)),
    ("ms a token", lambda r, first: f"{1e3 / r.plain_tps:.2f} {1e3 / r.mtp_tps:.2f}"),
    ("of the first", lambda r, first: f"{first.plain_tps / r.plain_tps:.2f} {first.mtp_tps / r.mtp_tps:.2f}"),
    ("ratio", lambda r, first: f"{r.ratio:.2f}"),
    ("tokens/step", lambda r, first: f"{r.tokens_per_step:.2f}"),
    ("step/plain", lambda r, first: f"{r.step_to_plain:.2f}"),
    ("of the first", lambda r, first: f"{r.step_to_plain / first.step_to_plain:.2f}"),
    ("efficiency", lambda r, first: f"{r.efficiency:.2f}"),
    ("first token, s", lambda r, first: f"{r.plain_first_token:.3f} {r.mtp_first_token:.3f}"),
    ("ratio", lambda r, first: f"{r.mtp_first_token / r.plain_first_token:.3f}"),
]


def show(report: Report) -> str:
    """The report as lines for people."""
    lines = [*_show_model(report), "", *_show_parts(report), "", "  ".join(name for name, _ in COLUMNS)]
    for name in dict.fromkeys(r.prompt for r in report.results):
        for r in report.of(name):
            lines.append("  ".join(f"{column(r):>{len(title)}}" for title, column in COLUMNS).rstrip())
    return "\n".join(lines)


def _show_model(report: Report) -> list[str]:
    versions = ", ".join(f"{name} {v}" for name, v in report.versions.items())
    lines = [f"{report.model} on {report.device}; {versions}"]
    if report.acceptance_was_set is not None:
        lines.append(
            f"Random weights of real shapes. Acceptance was SET to {report.acceptance_was_set}, not measured: "
            "the ratios hold for a head with this acceptance rate."
        )
    lines.append(
        f"{report.max_tokens} tokens for each prompt, {report.repeat} rounds; of two figures the first is plain mlx-lm's"
    )
    return lines


def _show_parts(report: Report) -> list[str]:
    parts, one = report.parts, report.parts.verify[0]
    verify = ", ".join(f"{n}: {v / one:.2f}" for n, v in enumerate(parts.verify, 1) if _is_timed(n, parts))
    exact = ", ".join(f"{n}: {t / one:.2f}" for n, t in parts.exact.items())
    rollback = ", ".join(f"{n}: {r / parts.verify[-1]:.3f}" for n, r in enumerate(parts.rollback, 1))
    lines = [
        f"Verify pass over 1 token: {one * 1e3:.2f} ms; a pass of the head: {parts.head / one:.3f} of it",
        f"Verify pass over n tokens, relative to 1: {verify}",
        *([f"With --exact, relative to the plain pass over 1: {exact}"] if exact else []),
        f"Rollback to n of {len(parts.verify)} tokens, relative to the pass over all: {rollback}",
    ]
    if parts.exchange:
        exchange = ", ".join(f"{n}: {t * 1e3:.3f}" for n, t in parts.exchange.items())
        lines.append(
            f"A sum over all ranks of the hidden states of n tokens, ms: {exchange}; "
            f"{parts.n_exchanges} exchanges in a verify pass: {parts.n_exchanges * parts.exchange[1] / one:.3f} of it"
        )
    return lines


def _is_timed(n: int, parts: Parts) -> bool:
    return n <= EVERY or n == len(parts.verify)


def show_growth(reports: Sequence[Report], n_layers: int) -> str:
    """How the times of a token, of a step and to the first token grow with the context, as lines for people."""
    n_prompts = len({r.prompt for r in reports[0].results}) - 1
    rows = [["tokens", *(title for title, _ in GROWTH_COLUMNS)]]
    for first, *others in zip(*(r.of(OVERALL) for r in reports)):
        for r in (first, *others):
            rows.append([str(r.prompt_tokens // n_prompts), *(column(r, first) for _, column in GROWTH_COLUMNS)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        [
            "By length, all prompts together (tokens: the mean of a prompt); of two figures the first is plain mlx-lm's.",
            "The time of a token depends on the acceptance rate, and so on the text; that of a step (step/plain) does not.",
            f"The head is one layer beside {n_layers}: a prompt should take no more than {1 + 1 / n_layers:.3f} of plain.",
            "",
            *("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) for row in rows),
        ]
    )
