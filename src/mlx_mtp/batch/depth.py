"""How many tokens to draft next for all rows: the number with the fewest seconds per token, in the mean of the rows.

A step with k drafts takes t(B, k) seconds with B rows, and row b yields E_b(k) tokens, by its own acceptance. One k for all
minimizes the mean of t(B, k) / E_b(k). What yields most tokens per second of the whole batch is another k: it favours rows
that are fast already, and a row whose drafts are rejected pays for them and ends long after the others.

A ``Depth`` for each size of batch chooses as it does for one sequence (``decoding/depth.py``); the rows come and go with what
they know of their texts, and the times stay with the model.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from ..decoding.clock import Clock
from ..decoding.depth import MAX_DRAFT_TOKENS, Depth, expected_tokens
from ..decoding.exchange import Exchange
from ..decoding.options import resolve
from ..decoding.rates import Rates
from ..decoding.step_times import Plan, StepTimes
from ..models.drafting import Settings
from ..models.protocol import MTPModel
from .decoder import Step
from .row import Row

NumDraftTokens = int | Literal["auto"]


class JointRates(Rates):
    """The acceptance rates of several rows as those of one, which takes as long for a token as they do in the mean.

    The rows count by themselves, so it counts nothing.
    """

    def set(self, rows: Sequence[Sequence[float]]) -> None:
        """These are the rows now."""
        self.estimate = joint(rows)

    def count_window(self, n_drafted: int, n_accepted: int) -> None:
        pass


def joint(rates: Sequence[Sequence[float]]) -> list[float]:
    """
    The acceptance rates of a row whose steps yield the harmonic mean of what those of the rows yield, [K].

    Args:
        rates (Sequence[Sequence[float]]): The same for each row, B times [K].
    """
    tokens = [len(rates) / sum(1 / n for n in of_rows) for of_rows in zip(*map(expected_tokens, rates))]  # [K + 1]
    accepted = [1.0, *(b - a for a, b in pairwise(tokens))]  # the probability that the drafts up to each are accepted
    # Differences of sums: where hardly any draft is accepted so far, what is left of them is rounding.
    return [min(max(b / a, 0.0), 1.0) if a > 1e-9 else 0.0 for a, b in pairwise(accepted)]


class SizeDepth(Depth):
    """A ``Depth`` of several rows.

    With many rows a draft costs nearly what a token does, so drafts gain little at best. Estimates of many rows that come and
    go err more than those of one, and rows that gain differently end at different times, the last ones in a small batch.
    """

    MARGIN = 0.15
    PROBING, FIRST_LOSS = 0.01, 0.5  # a step shows a draft of each row


class SizeTimes:
    """What steps take, by the number of rows. A size that is new begins with the times of the sizes beside it.

    Args:
        seconds (Mapping[int, float], optional): The time of a step of one row, by depth, as measured before on this machine.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None):
        self.by_size = {1: StepTimes(MAX_DRAFT_TOKENS, seconds)} if seconds else {}

    def of(self, n_rows: int) -> StepTimes:
        if n_rows not in self.by_size:
            guess = self._guess(n_rows)
            self.by_size[n_rows] = StepTimes(MAX_DRAFT_TOKENS, guess, is_guess=len(guess) > 1)
        return self.by_size[n_rows]

    def follow(self, other: "SizeTimes") -> None:
        """Know what another knows, such as rank 0's."""
        self.by_size = {n: self.by_size.get(n, times) for n, times in other.by_size.items()}
        for n, times in other.by_size.items():
            self.by_size[n].follow(times)

    def _guess(self, n_rows: int) -> dict[int, float]:
        """The times of a size that is new: on the line through the sizes beside it, at the depths that both know."""
        known = {n: times for n, times in self.by_size.items() if len(times.seconds) > 1}
        if not known:
            return {}
        near = sorted(known, key=lambda n: abs(n - n_rows))[:2]
        first = known[near[0]]
        if len(near) == 1:
            return first.by_depth()
        part = (n_rows - near[0]) / (near[1] - near[0])
        lines = zip(first.estimate, known[near[1]].estimate)
        guess = {k: a + part * (b - a) for k, (a, b) in enumerate(lines) if k in first.by_depth()}
        return guess if min(guess.values()) > 0 else first.by_depth()


class BatchDepth:
    """Chooses the depth of every step of a batch.

    Args:
        times (SizeTimes): What steps take, to read and to feed.
    """

    def __init__(self, times: SizeTimes):
        self.times = times
        self.rates = JointRates(MAX_DRAFT_TOKENS)
        self.by_size: dict[int, Depth] = {}

    def next(self, rows: Sequence[Row]) -> int:
        self.rates.set([row.acceptance_rates for row in rows if row.finish_reason is None])
        return self._of(len(rows)).next().k

    def observe(self, n_rows: int, k: int, n_accepted: float, seconds: float | None, is_alone: bool = True) -> None:
        """
        Args:
            n_rows (int): Of a step.
            k (int): The number of drafts for each.
            n_accepted (float): The number of them that were accepted, a row's mean.
            seconds (float, optional): From the end of the step before to the end of this one; ``None`` where the steps beside
              it do not tell.
            is_alone (bool): Whether no other generation ran in between.
        """
        self._of(n_rows).observe(Plan(k), n_accepted, seconds, is_alone)  # type: ignore[arg-type]  # a mean serves as well

    def _of(self, n_rows: int) -> Depth:
        if n_rows not in self.by_size:
            kind = Depth if n_rows == 1 else SizeDepth
            self.by_size[n_rows] = kind(MAX_DRAFT_TOKENS, times=self.times.of(n_rows), rates=self.rates)
        return self.by_size[n_rows]


class Window(NamedTuple):
    """What a pass verifies."""

    rows: list[Row]
    n_drafts: int
    is_wider: bool  # than was asked for


class BatchPace:
    """Asks for the number of drafts, and takes the time of each step.

    Args:
        model (MTPModel): Where several ranks run it, the depth learns from rank 0's clock.
        depth (Union[int, BatchDepth]): A fixed number of drafts, or what chooses it.
    """

    def __init__(self, model: MTPModel, depth: int | BatchDepth):
        self.fixed = depth if isinstance(depth, int) else 0
        self.depth = depth if isinstance(depth, BatchDepth) else None
        times = None if self.depth is None else self.depth.times
        self.exchange = None if model.ranks is None else Exchange(model.ranks, times)
        # Of steps: rows, drafts, those accepted, a row's mean.
        self.clock: Clock[tuple[int, int, float]] = Clock(model.drafting, self.exchange)
        self.planned = 0  # drafts of the next window
        self.windows: list[Window] = []  # the latest ones

    def next(self, rows: list[Row], limit: int) -> int:
        """The number of drafts to ask for, at most ``limit``."""
        self.clock.take_turn()
        self.planned = min(self.fixed if self.depth is None or limit == 0 else self.depth.next(rows), limit)
        return self.planned

    def begin(self, rows: list[Row], n_drafts: int) -> None:
        """Call when a window begins. Copies of which a row has a number of its own may make it wider than was asked for."""
        self.windows = [*self.windows[-2:], Window(rows, n_drafts, n_drafts > self.planned)]

    def interrupt(self) -> None:
        """Something else than steps took time."""
        self.clock.interrupt()

    def record(self, step: Step) -> None:
        """Call when the tokens of a step are known: of one without drafts, while the device runs the next."""
        is_plain, n_rows = step.is_plain, len(step.rows)
        if self.depth is not None:
            # A step with drafts is timed after one with drafts, a plain one between two others, all of the same rows.
            beside = self.windows[-3:] if is_plain else self.windows[-2:]
            is_clear = all((w.n_drafts == 0) == is_plain and not w.is_wider and w.rows == step.rows for w in beside)
            outcome = n_rows, step.n_drafts, sum(step.n_accepted) / n_rows
            if not is_plain and beside[-1].is_wider:
                self.clock.interrupt()  # the depth has no such windows
            elif not self.clock.record(outcome, is_clear):
                self.depth.observe(*outcome, None)
            for outcome, seconds, is_alone in self.clock.known():
                self.depth.observe(*outcome, seconds, is_alone)


def resolve_batch_number(model: MTPModel, num_draft_tokens: NumDraftTokens | None) -> NumDraftTokens:
    """The number of the head's drafts: what was given, or else what was tuned.

    Raises:
        ValueError: The number is out of range.
    """
    number = resolve(model, num_draft_tokens).num_draft_tokens
    if isinstance(number, Depth):  # times of one sequence
        raise ValueError(f"num_draft_tokens must be auto or from 0 to {MAX_DRAFT_TOKENS}, not {number}.")
    return number


def resolve_depth(model: MTPModel, num_draft_tokens: NumDraftTokens | None) -> int | BatchDepth:
    """A fixed number of drafts, or a ``BatchDepth`` with the times that a model keeps from one batch to the next.

    Raises:
        ValueError: The number is out of range.
    """
    number = resolve_batch_number(model, num_draft_tokens)
    if number == 0:
        # Of copies alone, which cost no pass of the head: what steps take is no one else's.
        return BatchDepth(SizeTimes())
    if isinstance(number, int):
        return number
    drafting = model.drafting
    drafting.batch_times = drafting.batch_times or SizeTimes((drafting.tuned or Settings()).seconds)
    return BatchDepth(drafting.batch_times)
