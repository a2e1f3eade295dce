"""The number of tokens to draft next in a batch: the one with the fewest seconds per token, in the mean of its sequences.

A step with k drafts of B sequences takes t(B, k) seconds, and sequence b yields E_b(k) tokens, by its own acceptance rates.
The shared k minimizes the mean of t(B, k) / E_b(k). It does not maximize the tokens per second of the whole batch, which would
favor sequences that are already fast: a sequence whose drafts are rejected would end long after the others.

A ``Depth`` for each batch size chooses as for one sequence (``pacing/depth.py``). Acceptance rates belong to sequences, times
to the model.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

from ..layers.drafting import Settings
from ..models.mixin import MTPModel
from .depth import MAX_DRAFT_TOKENS, Depth, Rates, expected_tokens
from .step_times import StepTimes


class JointRates(Rates):
    """The acceptance rates of several sequences, as those of one sequence with their mean time per token.

    It counts no windows: each sequence has its own ``Rates``.
    """

    def set(self, rates: Sequence[Sequence[float]]) -> None:
        """Set the acceptance rates of the sequences, each [K]."""
        self.estimate = joint(rates)

    @property
    def has_counts(self) -> bool:
        return True

    def count_window(self, n_drafted: int, n_accepted: int) -> None:
        pass


def joint(rates: Sequence[Sequence[float]]) -> list[float]:
    """
    The acceptance rates of a sequence whose steps yield the harmonic mean of the sequences' tokens per step, [K].

    Args:
        rates (Sequence[Sequence[float]]): The acceptance rates of each sequence, B times [K].
    """
    tokens = [len(rates) / sum(1 / n for n in of_each) for of_each in zip(*map(expected_tokens, rates))]  # [K + 1]
    accepted = [1.0, *(b - a for a, b in pairwise(tokens))]  # the probability that the drafts up to each are accepted
    # Differences of sums, which are only rounding if hardly any draft is accepted so far.
    return [min(max(b / a, 0.0), 1.0) if a > 1e-9 else 0.0 for a, b in pairwise(accepted)]


class BatchSizeDepth(Depth):
    """A ``Depth`` of several sequences.

    The margin grows with the batch, for three reasons: in a large batch a draft costs nearly as much as a token, so drafts gain
    little. Estimates over changing sequences have larger errors than for one sequence. And sequences with different gains end
    at different times, the last ones in a small batch.

    Args:
        batch_size (int): The number of sequences.
        times (StepTimes): The times of their steps.
        rates (Rates): Their joint acceptance rates.
    """

    MOST_MARGIN = 0.15
    # Within the margin a probe seems to cost nothing. Plain steps after it bound its cost, and most of them are timed.
    PLAIN_AFTER_PROBE = 15

    def __init__(self, batch_size: int, times: StepTimes, rates: Rates):
        super().__init__(MAX_DRAFT_TOKENS, times=times, rates=rates)
        self.MARGIN = min(batch_size * Depth.MARGIN, self.MOST_MARGIN)


class BatchTimes:
    """The times of steps by batch size. A new size begins with times interpolated from the nearest sizes.

    Args:
        of_one (StepTimes, optional): The times of a single sequence.
    """

    def __init__(self, of_one: StepTimes | None = None):
        self.by_size = {} if of_one is None else {1: of_one}

    def of(self, batch_size: int) -> StepTimes:
        if batch_size not in self.by_size:
            guess = self._guess(batch_size)
            self.by_size[batch_size] = StepTimes(MAX_DRAFT_TOKENS, guess, is_guess=len(guess) > 1)
        return self.by_size[batch_size]

    def copy_from(self, other: "BatchTimes") -> None:
        """Copy the times of another object, such as rank 0's."""
        self.by_size = {n: self.by_size.get(n, times) for n, times in other.by_size.items()}
        for n, times in other.by_size.items():
            self.by_size[n].copy_from(times)

    def _guess(self, batch_size: int) -> dict[int, float]:
        """Guess the times of a new size from the line through the two nearest sizes, at the depths of both."""
        known = {n: times for n, times in self.by_size.items() if len(times.seconds) > 1}
        if not known:
            return {}
        near = sorted(known, key=lambda n: abs(n - batch_size))[:2]
        nearest = known[near[0]]
        if len(near) == 1:
            return nearest.by_depth()
        part = (batch_size - near[0]) / (near[1] - near[0])
        lines = zip(nearest.estimate, known[near[1]].estimate)
        guess = {k: a + part * (b - a) for k, (a, b) in enumerate(lines) if k in nearest.by_depth()}
        return guess if min(guess.values()) > 0 else nearest.by_depth()


class BatchDepth:
    """Chooses the depth of every step of a batch.

    Args:
        times (BatchTimes): The times of steps, which it reads and updates.
    """

    def __init__(self, times: BatchTimes):
        self.times = times
        self.rates = JointRates(MAX_DRAFT_TOKENS)
        self.by_size: dict[int, Depth] = {}

    def next(self, batch_size: int, rates: Sequence[Sequence[float]]) -> int:
        """
        Args:
            batch_size (int): The number of sequences in the step.
            rates (Sequence[Sequence[float]]): The acceptance rates of the sequences that continue, each [K].
        """
        self.rates.set(rates)
        return self.of(batch_size).next().k

    def of(self, batch_size: int) -> Depth:
        """The depth that chooses for this batch size and observes its steps."""
        if batch_size not in self.by_size:
            self.by_size[batch_size] = BatchSizeDepth(batch_size, self.times.of(batch_size), self.rates)
        return self.by_size[batch_size]


class Timing:
    """The times of a model's steps, which are kept from one generation to the next.

    Attributes:
        of_one (StepTimes): The times of steps of one sequence on this machine.
        of_batches (BatchTimes): The times of steps by batch size.
        turn (object): Identifies the generation that last submitted work to the device.

    Args:
        tuned (Settings): The settings of ``--tune``, whose times are the first ones.
    """

    def __init__(self, tuned: Settings):
        self.of_one = StepTimes(MAX_DRAFT_TOKENS, tuned.seconds)
        self.of_batches = BatchTimes(self.of_one)
        self.turn: Any = None


def timing_of(model: MTPModel) -> Timing:
    """The timing of a model, made on the first call and kept in ``model.drafting``."""
    drafting = model.drafting
    if drafting.timing is None:
        drafting.timing = Timing(drafting.tuned or Settings())
    return cast(Timing, drafting.timing)
