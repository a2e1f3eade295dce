"""The settings to recommend: the measured ones that beat simpler ones by more than the spread of the rounds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..cli.display import table
from ..decoding.counts import DraftCounts
from ..layers.drafting import Settings

FIXED_GAIN = 0.05  # required of a fixed depth over auto, since only auto adapts to other kinds of text


@dataclass
class Measured:
    """Settings compared with plain decoding, over all prompts."""

    settings: Settings
    ratios: list[float]  # by round
    counts: DraftCounts = field(default_factory=DraftCounts)
    tps: float = 0.0  # tokens per second after the first token, the median of the rounds

    @property
    def low(self) -> float:
        return min(self.ratios)

    @property
    def high(self) -> float:
        return max(self.ratios)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def beats(a: Measured, b: Measured) -> bool:
    """Whether ``a`` is faster than ``b`` by more than the spread: its lowest ratio is above the highest of ``b``."""
    return a.low > b.high * (1 + FIXED_GAIN if _fixes_auto(a, b) else 1)


def _fixes_auto(a: Measured, b: Measured) -> bool:
    return a.settings.num_draft_tokens != "auto" and b.settings.num_draft_tokens == "auto"


def recommend(measured: Sequence[Measured]) -> Measured:
    """Start with the simplest settings, which are first, and move to the next settings that beat the current ones."""
    best = measured[0]
    while (better := next((m for m in measured if beats(m, best)), None)) is not None:
        best = better
    return best


def reason(measured: Sequence[Measured], best: Measured) -> str | None:
    """The reason, in one line, if the settings with the highest ratio are not recommended."""
    fastest = max(measured, key=lambda m: m.ratio)
    if fastest.ratio <= best.ratio:
        return None
    limit, why = f"is not above {best.high:.2f}", "is within the spread of the rounds"
    if _fixes_auto(fastest, best):
        limit, why = (
            f"is not {FIXED_GAIN:.0%} above {best.high:.2f}",
            "must pay for a depth that does not adapt to the text",
        )
    return (
        f"Not {fastest.settings}, which looked faster ({fastest.ratio:.2f} against {best.ratio:.2f}): its lowest round, "
        f"{fastest.low:.2f}, {limit}, the highest of the recommended settings. The gain {why}."
    )


def combine(base: Measured, measured: Sequence[Measured]) -> list[Settings]:
    """Combine the fastest form of each kind, if two or more kinds have a form that beats ``base``."""
    best: dict[str, Measured] = {}
    for m in measured:
        for name in ("mtp_bits", "draft_head_bits", "draft_vocab", "draft_p_min"):
            faster = beats(m, base) and (name not in best or m.ratio > best[name].ratio)
            if getattr(m.settings, name) and faster:
                best[name] = m
    values = {name: getattr(m.settings, name) for name, m in best.items()}
    return [replace(base.settings, seconds={}, **values)] if len(values) > 1 else []


def show(measured: Sequence[Measured]) -> str:
    """The measurements as a table, and the recommendation."""
    rows = [["settings", "ratio", "lowest", "highest", "tokens/s", "accepted first", "tokens/step"]]
    for m in measured:
        drafted, accepted = m.counts.drafted, m.counts.accepted
        rows.append([str(m.settings), *(f"{x:.2f}" for x in (m.ratio, m.low, m.high)), f"{m.tps:.1f}"])
        if drafted:
            rows[-1] += [f"{accepted[0] / drafted[0]:.2f}", f"{1 + sum(accepted) / drafted[0]:.2f}"]
    lines = table(rows)
    best = recommend(measured)
    lines.append(f"\nRecommended: {best.settings}")
    why = reason(measured, best)
    return "\n".join([*lines, *([] if why is None else [why])])
