"""How many drafts each step makes, and what came of them: counts, and the time that each step took."""

from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from .decoder import Step
from .depth import Depth

NumDraftTokens = int | Literal["auto"] | Depth


@dataclass
class DraftCounts:
    """Drafts made and accepted, by position in the window; the latest step's number of drafts."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    depth: int = 0

    def add(self, n_drafted: int, n_accepted: int) -> None:
        self.depth = n_drafted
        new = n_drafted - len(self.drafted)
        self.drafted += [0] * new
        self.accepted += [0] * new
        for i in range(n_drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < n_accepted


class Pace:
    """
    Args:
        depth (Union[int, Depth]): A fixed number of drafts, or what chooses it and learns from the time of each step.
        counts (DraftCounts): Counts drafts as the steps go.
    """

    def __init__(self, depth: int | Depth, counts: DraftCounts):
        self.fixed = depth if isinstance(depth, int) else 0
        self.depth = depth if isinstance(depth, Depth) else None
        if self.depth is not None:
            self.depth.begin()
        self.counts = counts
        self.asked = [0, 0]  # the drafts asked for in the latest steps; the head may have been unsure of some
        self.n_drafted = 0  # in the step before
        self.last: float | None = None  # when the outcome of the step before was known

    def next(self, limit: int) -> int:
        """The number of drafts to ask for, at most ``limit``."""
        k = min(self.fixed if self.depth is None else self.depth.next(), limit)
        self.asked = [*self.asked[-2:], k]
        return k

    def record_drafting(self, step: Step) -> None:
        """Call when a step's drafts have been accepted or rejected."""
        if step.n_drafted > 0:
            # With a step without drafts before it, part of the time may be that step's.
            self._record(step, self.asked[-1], is_clear=self.n_drafted > 0)

    def record_plain(self, step: Step) -> None:
        """Call when the token of a step without drafts is known, while the device runs the next."""
        if step.n_drafted == 0:
            # Where steps change from plain to drafting or back, more or less than this pass may be behind it.
            self._record(step, self.asked[-2], is_clear=self.asked == [0, 0, 0])

    def _record(self, step: Step, asked: int, is_clear: bool) -> None:
        self.counts.add(step.n_drafted, step.n_accepted)
        now = perf_counter()
        if self.depth is not None and self.last is not None:
            # Drafts that the head was too unsure of count as rejected: they were paid for.
            self.depth.observe(asked, step.n_accepted, now - self.last if is_clear else None)
        self.last, self.n_drafted = now, step.n_drafted
