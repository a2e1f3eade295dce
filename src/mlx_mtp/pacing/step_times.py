"""The time of a step on this machine, by the number of sequences, and by the number and the source of their drafts."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

from ..layers.drafting import Settings
from ..models.mixin import MTPModel

MAX_DRAFT_TOKENS = 8
GUESSED_SLOPE = 0.5  # plain steps per draft, until two depths are measured
HEAD = "head"  # the source whose drafts cost passes of the head; others are in ``sources.py``
FREE = "free"  # in the plan of a window: drafts of other sources alone


class Plan(NamedTuple):
    """The number and the source of a step's drafts."""

    k: int
    source: str = HEAD

    @property
    def skips_head(self) -> bool:
        """Whether its drafts cost no pass of the head."""
        return self.source != HEAD


PLAIN_PLAN = Plan(0)


class StepTimes:
    """A running estimate of t(k), in seconds.

    The first step at a depth is not counted, since it may include compilation. A step far longer than expected counts as
    ``BEYOND_NOISE`` times the expected time, since the machine may have paused. If steps become far shorter, the earlier ones
    were slow: the times of all depths are scaled down until they are measured again. A longer context adds to all depths.

    Drafts of other sources cost no pass of the head. The time of the same number of the head's drafts is an upper bound, and
    the estimate for numbers that were not tried.

    Times are kept after a text, and all open generations update the same times.

    Args:
        n (int): The largest depth.
        seconds (Mapping[int, float], optional): Times measured earlier, by depth.

    Attributes:
        estimate (list[float]): t(k) for the head's drafts, k from 0, [n + 1].
        free (list[float]): t(k) for drafts of other sources, k from 0, [MOST_FREE + 1].
        most_free (int): The most drafts of other sources to try next.
    """

    BEYOND_NOISE = 1.4  # the ratio of two times below which the difference may be noise
    FOLLOWS = 0.08  # the weight of a new time in a running time; half of it at the other depths
    FIRST_FREE, MOST_FREE = 4, 16  # the most drafts of other sources than the head, at first and in all
    STALE = 100  # steps with drafts after which a time is no longer fresh
    FEW = 16  # as many for each time that it was measured, if few

    def __init__(self, n: int, seconds: Mapping[int, float] | None = None):
        self.n, self.most_free = n, self.FIRST_FREE
        self.forget(seconds)

    def forget(self, seconds: Mapping[int, float] | None = None) -> None:
        """Replace all times, after a change of the context or of the machine's state."""
        self.n_drafting = 0  # steps with drafts
        self.seconds = {Plan(k): t for k, t in (seconds or {}).items()}
        self.warm: set[Plan] = set()  # plans that were used
        self.n_counted = dict.fromkeys(self.seconds, 1)
        self.last_used = dict.fromkeys(self.seconds, 0)
        self.n_fast = 0  # consecutive steps that were far shorter than expected
        self._update()

    def observe(self, plan: Plan, seconds: float | None) -> None:
        self.n_drafting += plan.k > 0
        if seconds is not None and plan in self.warm:
            self._count(plan, seconds)
        self.warm.add(plan)
        self._update()

    def by_depth(self) -> dict[int, float]:
        """The measured times of plain steps and of steps with the head's drafts, by depth."""
        return {plan.k: t for plan, t in self.seconds.items() if not plan.skips_head}

    def of(self, plan: Plan) -> float:
        return (self.free if plan.skips_head else self.estimate)[plan.k]

    def without_pause(self, plan: Plan, seconds: float) -> float:
        """At most ``BEYOND_NOISE`` times the expected time of a step."""
        return min(seconds, self.BEYOND_NOISE * self.of(plan))

    def _count(self, plan: Plan, seconds: float) -> None:
        self.n_counted[plan] = self.n_counted.get(plan, 0) + 1
        self.last_used[plan] = self.n_drafting
        self._shrink(plan, seconds)
        if self.seconds:
            seconds = self.without_pause(plan, seconds)
        if self.n_counted[plan] == 1:
            self.seconds[plan] = seconds
            return
        difference = seconds - self.seconds[plan]
        self.seconds[plan] += max(self.FOLLOWS, 1 / self.n_counted[plan]) * difference
        for other in self.seconds.keys() - {plan}:
            self.seconds[other] += self.FOLLOWS / 2 * difference

    def _shrink(self, plan: Plan, seconds: float) -> None:
        """Scale all times down if steps become far shorter than an earlier step at the same or a lower depth."""
        # A step with copies may be shorter than one with fewer drafts of the head.
        lower = [p for p in self.seconds if p.k <= plan.k and (p.skips_head or p == PLAIN_PLAN or not plan.skips_head)]
        slowest = max((self.seconds[p] for p in lower), default=seconds)
        self.n_fast = self.n_fast + 1 if seconds < slowest / self.BEYOND_NOISE else 0
        # A single fast step may be due to a late host, unless it is only the second one that counts: then the first was slow.
        if self.n_fast == 2 or (self.n_fast == 1 and self.n_counted[plan] == 2):
            self.seconds = {other: seconds / slowest * t for other, t in self.seconds.items()}
            self.n_counted = {plan: 1}

    def is_fresh(self, plan: Plan) -> bool:
        """Whether such steps were measured recently, and after times were last scaled down."""
        n = self.n_counted.get(plan, 0)
        return n > 0 and self.n_drafting - self.last_used[plan] <= min(self.STALE, n * self.FEW)

    def _update(self) -> None:
        head, free = ({p.k: t for p, t in self.seconds.items() if p.skips_head is is_free} for is_free in (False, True))
        self.estimate, self.free = _estimates(head, self.n), _estimates(head | free, self.MOST_FREE)

    def allow_more(self) -> None:
        self.most_free = min(2 * self.most_free, self.MOST_FREE)


class Timing:
    """The times of a model's steps by the number of sequences, which are kept from one generation to the next.

    A new number of sequences begins with the times of the next smaller one, by the rows of a pass.

    Args:
        of_one (StepTimes): The times of one sequence.

    Attributes:
        turn (object): Identifies the generation that last submitted work to the device.
    """

    def __init__(self, of_one: StepTimes):
        self.by_size, self.turn = {1: of_one}, cast(Any, None)

    def of(self, n_sequences: int) -> StepTimes:
        if n_sequences not in self.by_size:
            self.by_size[n_sequences] = StepTimes(MAX_DRAFT_TOKENS, self._by_rows(n_sequences))
        return self.by_size[n_sequences]

    def copy_from(self, by_size: Mapping[int, StepTimes]) -> None:
        """Copy the times of rank 0, in place: generations keep these objects."""
        self.by_size = {n: self.by_size.get(n, times) for n, times in by_size.items()}
        for n, times in by_size.items():
            vars(self.by_size[n]).update(vars(times))

    def _by_rows(self, n: int) -> dict[int, float]:
        """The times of n sequences, by depth: those of the next smaller known number, at as many rows, n (k + 1), of a pass."""
        smaller = [m for m, times in self.by_size.items() if m < n and len(times.seconds) > 1]
        if not smaller:
            return {}
        m = max(smaller)
        rows = [(m * (k + 1), t) for k, t in enumerate(self.by_size[m].estimate)]
        seconds = _on_lines(rows, n * (MAX_DRAFT_TOKENS + 1))
        return {k: seconds[n * (k + 1) - m] for k in range(MAX_DRAFT_TOKENS + 1)}


def timing_of(model: MTPModel) -> Timing:
    """The timing of a model, made on the first call with times measured earlier, and kept in ``model.drafting``."""
    drafting = model.drafting
    if drafting.timing is None:
        tuned = (drafting.tuned or Settings()).seconds
        drafting.timing = Timing(StepTimes(MAX_DRAFT_TOKENS, tuned or drafting.seconds))
    return cast(Timing, drafting.timing)


def _estimates(known: Mapping[int, float], n: int) -> list[float]:
    """t(k) for k from 0 to n, estimated from the known times, if any."""
    points = sorted(known.items()) or [(0, 1.0)]
    if points[0][0] > 0:
        k, t = points[0]
        points.insert(0, (0, t / (1 + GUESSED_SLOPE * k)))
    if len(points) == 1:
        points.append((1, points[0][1] * (1 + GUESSED_SLOPE)))
    return _on_lines(points, n)


def _on_lines(points: Sequence[tuple[int, float]], n: int) -> list[float]:
    """The values of the lines through the points, from the first x to n. No line falls, and the last one is extended."""
    values = [points[0][1]]
    for (x0, y0), (x1, y1) in pairwise(points):
        slope = max((y1 - y0) / (x1 - x0), 0.0)
        end = n if x1 == points[-1][0] else x1
        values += [y0 + slope * x for x in range(1, end - x0 + 1)]
    return values[: n + 1 - points[0][0]]
