"""How many drafts each step makes, and what came of them: counts, and the time that each step took."""

from collections.abc import Sequence

from ..models.protocol import MTPModel
from .clock import Clock
from .counts import DraftCounts
from .decoder import Step
from .depth import Depth
from .exchange import Exchange
from .step_times import PLAIN, Plan


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
