"""How many tokens to draft next for all rows: the number with the fewest seconds per token, in the mean of the rows.

A step with k drafts takes t(B, k) seconds with B rows, and row b yields E_b(k) tokens, by its own acceptance. One k for all
minimizes the mean of t(B, k) / E_b(k). What yields most tokens per second of the whole batch is another k: it favours rows
that are fast already, and a row whose drafts are rejected pays for them and ends long after the others.

A ``Depth`` for each size of batch chooses as it does for one sequence (``pacing/depth.py``); the rows come and go with what
they know of their texts, and the times stay with the model.
"""

from collections.abc import Sequence
from itertools import pairwise

from .depth import MAX_DRAFT_TOKENS, Depth, expected_tokens
from .rates import Rates
from .step_times import StepTimes


class JointRates(Rates):
    """The acceptance rates of several sequences as those of one, which takes as long for a token as they do in the mean.

    The rows count by themselves, so it counts nothing.
    """

    def set(self, rows: Sequence[Sequence[float]]) -> None:
        """These are the rows now."""
        self.estimate = joint(rows)

    @property
    def has_counts(self) -> bool:
        return True

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


class BatchSizeDepth(Depth):
    """A ``Depth`` of several rows.

    With many rows a draft costs nearly what a token does, so drafts gain little at best. Estimates of many rows that come and
    go err more than those of one, and rows that gain differently end at different times, the last ones in a small batch.
    """

    MARGIN = 0.15
    PROBING, FIRST_LOSS = 0.01, 0.5  # a step shows a draft of each row


class BatchTimes:
    """What steps take, by the number of rows. A size that is new begins with the times of the sizes beside it.

    Args:
        of_one (StepTimes, optional): Those of one.
    """

    def __init__(self, of_one: StepTimes | None = None):
        self.by_size = {} if of_one is None else {1: of_one}

    def of(self, batch_size: int) -> StepTimes:
        if batch_size not in self.by_size:
            guess = self._guess(batch_size)
            self.by_size[batch_size] = StepTimes(MAX_DRAFT_TOKENS, guess, is_guess=len(guess) > 1)
        return self.by_size[batch_size]

    def copy_from(self, other: "BatchTimes") -> None:
        """Know what another knows, such as rank 0's."""
        self.by_size = {n: self.by_size.get(n, times) for n, times in other.by_size.items()}
        for n, times in other.by_size.items():
            self.by_size[n].copy_from(times)

    def _guess(self, batch_size: int) -> dict[int, float]:
        """The times of a size that is new: on the line through the sizes beside it, at the depths that both know."""
        known = {n: times for n, times in self.by_size.items() if len(times.seconds) > 1}
        if not known:
            return {}
        near = sorted(known, key=lambda n: abs(n - batch_size))[:2]
        first = known[near[0]]
        if len(near) == 1:
            return first.by_depth()
        part = (batch_size - near[0]) / (near[1] - near[0])
        lines = zip(first.estimate, known[near[1]].estimate)
        guess = {k: a + part * (b - a) for k, (a, b) in enumerate(lines) if k in first.by_depth()}
        return guess if min(guess.values()) > 0 else first.by_depth()


class BatchDepth:
    """Chooses the depth of every step of a batch.

    Args:
        times (BatchTimes): What steps take, to read and to feed.
    """

    def __init__(self, times: BatchTimes):
        self.times = times
        self.rates = JointRates(MAX_DRAFT_TOKENS)
        self.by_size: dict[int, Depth] = {}

    def next(self, batch_size: int, rates: Sequence[Sequence[float]]) -> int:
        """
        Args:
            batch_size (int): The number of sequences in the step.
            rates (Sequence[Sequence[float]]): The acceptance rates of those that go on, each [K].
        """
        self.rates.set(rates)
        return self.of(batch_size).next().k

    def of(self, batch_size: int) -> Depth:
        """What chooses for so many sequences, and learns from their steps."""
        if batch_size not in self.by_size:
            kind = Depth if batch_size == 1 else BatchSizeDepth
            self.by_size[batch_size] = kind(MAX_DRAFT_TOKENS, times=self.times.of(batch_size), rates=self.rates)
        return self.by_size[batch_size]
