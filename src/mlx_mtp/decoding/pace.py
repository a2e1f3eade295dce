"""How many drafts each step makes, and what came of them: counts, and the time that each step took."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..models.protocol import MTPModel
from .clock import Clock
from .decoder import Step
from .depth import Depth
from .exchange import Exchange
from .step_times import PLAIN, Plan

NumDraftTokens = int | Literal["auto"] | Depth


@dataclass
class DraftCounts:
    """
    What came of the drafts, by position in the window.

    Args:
        drafted (List[int]): Drafts of the head.
        accepted (List[int]): Those accepted.
        copied (List[int]): Drafts copied from the text.
        copies_accepted (List[int]): Those accepted.
        depth (int): The latest step's number of drafts.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    copies_accepted: list[int] = field(default_factory=list)
    depth: int = 0

    def add(self, n_drafted: int, n_accepted: int, copies: bool = False) -> None:
        """Count a step."""
        self.depth = n_drafted
        drafted, accepted = (self.copied, self.copies_accepted) if copies else (self.drafted, self.accepted)
        new = n_drafted - len(drafted)
        drafted += [0] * new
        accepted += [0] * new
        for i in range(n_drafted):
            drafted[i] += 1
            accepted[i] += i < n_accepted

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens that a verify pass with drafts has yielded."""
        n_steps = sum(self.drafted[:1]) + sum(self.copied[:1])
        return 1 + (sum(self.accepted) + sum(self.copies_accepted)) / n_steps if n_steps > 0 else 1.0


class Pace:
    """The pace of one text.

    Args:
        model (MTPModel): Where several ranks run it, the depth learns from rank 0's clock.
        n_drafts (int, optional): A fixed number of the head's drafts. ``None`` has the depth choose.
        n_copies (int, optional): A fixed number of drafts wherever they can be copied from the text, 0 for never. ``None`` has
          the depth choose.
        depth (Depth, optional): Chooses, and learns from the time of each step. ``None`` where both numbers are given.
        counts (DraftCounts): Counts drafts as the steps go.
    """

    def __init__(
        self, model: MTPModel, n_drafts: int | None, n_copies: int | None, depth: Depth | None, counts: DraftCounts
    ):
        self.n_drafts, self.n_copies, self.depth, self.counts = n_drafts, n_copies, depth, counts
        self.exchange = None if model.ranks is None else Exchange(model.ranks, None if depth is None else depth.times)
        self.clock: Clock[tuple[Plan, int]] = Clock(model.drafting, self.exchange)  # of steps and their accepted drafts
        self.asked = [PLAIN, PLAIN]  # in the latest steps; the head may have been unsure of some drafts
        self.n_drafted = 0  # in the step before

    def next(self, limit: int, odds: Sequence[float]) -> Plan:
        """
        Args:
            limit (int): The most drafts.
            odds (Sequence[float]): The probability that each copied draft is accepted, given that those before it were;
              empty where nothing can be copied.
        """
        if odds and self.n_copies:
            plan = Plan(self.n_copies, copies=True)
        elif self.depth is not None:
            plan = self.depth.next(odds if self.n_copies is None else ())
        else:
            plan = Plan(self.n_drafts or 0)
        plan = Plan(k, plan.copies) if (k := min(plan.k, limit)) > 0 else PLAIN
        self.asked = [*self.asked[-2:], plan]
        return plan

    def record_drafting(self, step: Step) -> None:
        """Call when a step's drafts have been accepted or rejected."""
        if step.n_drafted > 0:
            # With a step without drafts before it, part of the time may be that step's. And behind copies the head has more
            # rows to make.
            before, plan = self.asked[-2:]
            self._record(step, plan, is_clear=self.n_drafted > 0 and before.copies <= plan.copies)

    def record_plain(self, step: Step) -> None:
        """Call when the token of a step without drafts is known, while the device runs the next."""
        self.clock.take_turn()  # also where the step had drafts
        if step.n_drafted == 0:
            # Where steps change from plain to drafting or back, more or less than this pass may be behind it.
            self._record(step, self.asked[-2], is_clear=self.asked == [PLAIN] * 3)

    def _record(self, step: Step, plan: Plan, is_clear: bool) -> None:
        self.counts.add(step.n_drafted, step.n_accepted, plan.copies)
        self.n_drafted = step.n_drafted
        if self.depth is not None:
            # Drafts that the head was too unsure of count as rejected: they were paid for.
            self.clock.record((plan, step.n_accepted), is_clear)
            for (plan, n_accepted), seconds, is_alone in self.clock.known():
                self.depth.observe(plan, n_accepted, seconds, is_alone)
