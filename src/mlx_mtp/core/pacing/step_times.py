"""The time of a step on this machine, by the number and length of sequences, and by the number and source of drafts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from . import MAX_DRAFT_TOKENS

N_LENGTHS = 4 * (MAX_DRAFT_TOKENS + 1)  # draft lengths with times, from 0: the rows of a pass over four sequences
LONG = 1024  # tokens from which on, and at each doubling, times are kept apart: those of attention grow with the keys
TYPICAL = {0: 0.02, 1: 0.024, 2: 0.028}  # seconds, for a model whose steps were not timed when it was loaded
HEAD = "head"  # the source whose drafts cost passes of the head; those of ``drafts/sources.py`` are free
FREE = "free"  # the source of a window's drafts if all are free


class Plan(NamedTuple):
    """The number and the source of the drafts of a sequence, or of a window."""

    k: int
    source: str = HEAD

    @property
    def skips_head(self) -> bool:
        return self.source != HEAD


PLAIN_PLAN = Plan(0)


class StepTimes:
    """A running estimate of t(k), in seconds, k from 0, [N_LENGTHS]: ``estimate`` for the head's drafts, ``free`` for others.

    The times of the test of the device (``seconds`` by draft length), or else ``TYPICAL``, give the shape of t(k), which the
    measured times scale; docs/develop/depth.md has the rules. ``draft_cost`` is the time in which the head drafts a token, in
    plain steps; 0 if unknown. ``key_seconds`` are what each further key adds to a step, by draft length; empty if unknown.
    All open generations update the same times, in any thread: dictionaries are replaced.
    """

    BEYOND_NOISE = 1.4  # the ratio of two times below which the difference may be noise
    N_ODD = 3  # steps in succession, all far shorter or all far longer than expected, that show a change
    FOLLOWS = 0.08  # the weight of a new time in a running time; half of it at the other draft lengths
    FIRST_FREE = 4  # the most free drafts, at first
    STALE = 40  # steps with drafts until plain steps are old, times the square of the gain

    def __init__(
        self,
        seconds: Mapping[int, float] | None = None,
        draft_cost: float = 0.0,
        key_seconds: Mapping[int, float] | None = None,
    ):
        self.draft_cost = draft_cost
        self.max_free = self.FIRST_FREE  # the most free drafts to try next
        self.key_seconds = on_lines(sorted(key_seconds.items()), N_LENGTHS - 1) if key_seconds else []
        first = seconds if seconds and {0} < seconds.keys() else TYPICAL
        self.shape = on_lines(sorted(first.items()), N_LENGTHS - 1)
        self.seconds: dict[Plan, float] = {}  # measured
        self.n_counted: dict[Plan, int] = {}
        self.n_odd: dict[Plan, int] = {}  # steps in succession far longer than expected, or far shorter if negative
        self.plain_age = 0.0 if first is seconds else math.inf  # steps with drafts since a plain step was measured
        self.n_tokens = 0  # the length of the longest sequence when a time was last measured
        # The times by the number of sequences and of doublings of their length: these are those of one that is not long.
        self.by_size = {(1, 0): self}
        self._update()

    def observe(self, plan: Plan, seconds: float | None, n_tokens: int = 0) -> None:
        self.plain_age += plan.k > 0
        if seconds is None:
            return
        self.n_tokens = n_tokens
        expected = self.of(plan)
        n_odd = self.n_odd.pop(plan, 0)
        if expected / self.BEYOND_NOISE < seconds < expected * self.BEYOND_NOISE:
            n = self.n_counted.get(plan, 0) + 1
            difference = seconds - expected
            followed = {other: t + self.FOLLOWS / 2 * difference for other, t in self.seconds.items()}
            self.seconds = followed | {plan: expected + max(self.FOLLOWS, 1 / n) * difference}
            self.n_counted = self.n_counted | {plan: n}
        else:
            n_odd = max(n_odd, 0) + 1 if seconds > expected else min(n_odd, 0) - 1
            if abs(n_odd) < self.N_ODD:
                self.n_odd[plan] = n_odd
                return
            if n_odd < 0 and not plan.skips_head:  # fewer passes of the head may be why, rather than a change
                self.seconds, self.n_counted = {}, {}
            self.plain_age = math.inf
            self.seconds, self.n_counted = self.seconds | {plan: seconds}, self.n_counted | {PLAIN_PLAN: 0, plan: 1}
        if plan == PLAIN_PLAN:
            self.plain_age = 0
        self._update()

    def of(self, plan: Plan) -> float:
        return (self.free if plan.skips_head else self.estimate)[plan.k]

    def knows_plain(self, gain: float) -> bool:
        """Whether plain steps were measured recently. The more drafting gains, as a factor, the less their time matters."""
        return self.plain_age <= self.STALE * gain**2

    def _update(self) -> None:
        head, free = ({p.k: t for p, t in self.seconds.items() if p.skips_head is is_free} for is_free in (False, True))
        self.estimate, self.free = self._through(head), self._through(head | free)

    def _through(self, known: Mapping[int, float]) -> list[float]:
        """The shape, scaled from each known time on to go through it."""
        ratio = next((known[k] / self.shape[k] for k in sorted(known)), 1.0)
        times = []
        for k, t in enumerate(self.shape):
            ratio = known[k] / t if k in known else ratio
            times.append(ratio * t)
        return times

    def of_size(self, n: int, n_tokens: int = 0) -> "StepTimes":
        """The times of n sequences, the longest of which has so many tokens, kept in ``by_size``."""
        size = n, (n_tokens // LONG).bit_length()
        if size not in self.by_size:
            times = self._of_longer(*size, n_tokens) if n_tokens >= LONG else StepTimes(self._by_rows(n))
            if self.draft_cost == 0 or n * (MAX_DRAFT_TOKENS + 1) > N_LENGTHS:
                times.plain_age = math.inf  # passes over as many rows were not timed
            self.by_size = self.by_size | {size: times}
        return self.by_size[size]

    def copy_from(self, times: "StepTimes") -> None:
        """Copy the times of rank 0, in place: generations keep these objects."""
        by_size = {size: self.by_size.get(size, of_size) for size, of_size in times.by_size.items()}
        for size, of_size in times.by_size.items():
            vars(by_size[size]).update(vars(of_size))
        self.by_size = by_size

    def _by_rows(self, n: int) -> dict[int, float]:
        """The times of n sequences: those of the next smaller known number, at as many rows, n (k + 1), of a pass."""
        m = max(m for m, doublings in self.by_size if m < n and doublings == 0)
        draft = self.draft_cost * self.estimate[0]
        rows = [(m * (k + 1), t - k * draft) for k, t in enumerate(self.by_size[m, 0].estimate)]
        seconds = on_lines(rows, n * N_LENGTHS)
        return {k: seconds[n * (k + 1) - m] + k * draft for k in range(N_LENGTHS)}

    def _of_longer(self, n: int, doublings: int, n_tokens: int) -> "StepTimes":
        """The times of n sequences: those of the next shorter known ones, and what further keys add."""
        self.of_size(n)
        shorter = self.by_size[n, max(d for m, d in self.by_size if m == n and d < doublings)]
        added = n * max(n_tokens - shorter.n_tokens, 0)
        of_keys = self.key_seconds or [0.0] * N_LENGTHS
        times = StepTimes({k: t + added * s for k, (t, s) in enumerate(zip(shorter.estimate, of_keys))})
        times.max_free, times.n_tokens = shorter.max_free, n_tokens
        times.plain_age = shorter.plain_age if self.key_seconds else math.inf
        return times


@dataclass
class Pace:
    """What all generations of a model share, ``model.pace``: ``Planner`` reads and changes it."""

    times: StepTimes = field(default_factory=StepTimes)
    turn: object = None  # the turn of the generation that last submitted work to the device


def on_lines(points: Sequence[tuple[int, float]], n: int) -> list[float]:
    """The values of the lines through the points, from the first x to n, each at most as large as any after it."""
    points = [(x, min(y for _, y in points[i:])) for i, (x, _) in enumerate(points)]
    (first, low), (last, high) = points[0], points[-1]
    if last < n:  # with the slope of all points: that of the last line may be noise or a step
        points.append((n, high + (high - low) / (last - first) * (n - last)))
    xs, ys = zip(*points)
    return [*map(float, np.interp(np.arange(first, n + 1), xs, ys))]
