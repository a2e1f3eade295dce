"""Choose the number and the source of the next drafts: the most expected tokens per second, by the steps observed so far.

A step with k drafts yields E(k) = 1 + a_1 + a_1 a_2 + ... tokens, where a_i is the probability that draft i is accepted, given
that the drafts before it are, and takes t(k) seconds; k = 0 is plain decoding. ``best_length`` maximizes E(k) / t(k).
``Rates`` estimates a for one text, ``StepTimes`` estimates t for one machine, and ``Depth`` chooses from both.

Several sequences share k, and E is the harmonic mean of theirs. The tokens per second of the whole batch would favor sequences
that are already fast: others would end long after them.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

from . import MAX_COPY_TOKENS
from .step_times import FREE, HEAD, PLAIN_PLAN, Plan, StepTimes

# Numbers of free drafts; few, so that their times are soon known.
FREE_LENGTHS = (1, 2, 4, 8, MAX_COPY_TOKENS)
# The probability that each draft of a sequence is accepted, given that the drafts before it are, by source, each [K].
Offer = Mapping[str, Sequence[float]]


def best_length(tokens: Sequence[float], seconds: Sequence[float]) -> int:
    """The draft length with the most tokens per second, by the tokens and the time of a step at each from 0, both [K + 1]."""
    rates = [n / t for n, t in zip(tokens, seconds)]
    return rates.index(max(rates))


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """The mean number of tokens that a step yields at each draft length from 0, [K + 1]."""
    return [*accumulate(accumulate(rates, mul), initial=1.0)]


def joint_tokens(offers: Sequence[Offer], n: int) -> list[float]:
    """The harmonic mean of the tokens that each sequence's best source yields at each draft length, [n + 1]."""
    of_each = []
    for offer in offers:
        of_sources = [expected_tokens([*a[:n], *[0.0] * (n - len(a))]) for a in ((), *offer.values())]
        of_each.append([*map(max, zip(*of_sources))])
    return [len(of_each) / sum(1 / tokens for tokens in at_k) for at_k in zip(*of_each)]


class Rates:
    """A running estimate of the acceptance rate in each of n buckets, such as the positions in a window: ``estimate``, [n].

    Without new counts, it moves towards that of the bucket before.
    """

    FADING = 0.97  # the decay of a count with each later one: to a third after 36, about a paragraph
    PRIOR = 0.7  # the rate of the first bucket before any count: between prose and code
    WEIGHT = 2.0  # the weight of the prior or the bucket before, in drafts

    def __init__(self, n: int):
        self.n_verified, self.n_accepted = [0.0] * n, [0.0] * n

    def count(self, bucket: int, accepted: bool) -> None:
        """Count one draft; earlier counts of the same bucket decay."""
        self.n_verified[bucket] = self.FADING * self.n_verified[bucket] + 1
        self.n_accepted[bucket] = self.FADING * self.n_accepted[bucket] + accepted

    def count_window(self, n_drafted: int, n_accepted: int) -> None:
        """Count a window, whose positions are the buckets; all earlier counts decay.

        If a draft is accepted, the text is predictable, and the next draft is accepted about as often. So an abandoned draft
        length is tried again once the drafts before it are accepted more often.
        """
        self.n_verified = [self.FADING * n for n in self.n_verified]
        self.n_accepted = [self.FADING * n for n in self.n_accepted]
        for i in range(min(n_accepted + 1, n_drafted)):  # drafts after the first rejected one carry no information
            self.n_verified[i] += 1
            self.n_accepted[i] += i < n_accepted

    @property
    def estimate(self) -> list[float]:
        estimates = []
        expected = self.PRIOR
        for n_verified, n_accepted in zip(self.n_verified, self.n_accepted):
            expected = (n_accepted + self.WEIGHT * expected) / (n_verified + self.WEIGHT)
            estimates.append(expected)
        return estimates


class Depth:
    """Chooses the draft length of every step of a generation; docs/develop/depth.md has its rules.

    Given as ``num_draft_tokens``, it passes its times to each generation, which makes a ``Depth`` of its own (``for_text``).

    Args:
        max_draft_tokens (int): The largest draft length.
        seconds (Mapping[int, float], optional): The time of a step by draft length, measured earlier on this machine.
        times (StepTimes, optional): The times of steps, which it reads and updates. Default: ``None``, new ones, with
          ``seconds``.
    """

    MARGIN = 0.03  # the gain over plain decoding that drafting requires, since estimates have errors
    PROBING = 0.016  # the share of time that probing may lose
    # Probing may lose as many plain steps, times the variance of the first draft's acceptance, since drafts that pay may be
    # rejected at first.
    FIRST_LOSS = 22.0
    DOUBT = 0.1  # the part of a probe's accepted drafts that is no gain: plain steps before a probe seem slower than they are

    def __init__(
        self, max_draft_tokens: int, seconds: Mapping[int, float] | None = None, *, times: StepTimes | None = None
    ):
        self.max_draft_tokens = max_draft_tokens
        self.times = StepTimes(seconds) if times is None else times
        self.elapsed = self.lost = 0.0  # seconds; lost by probing, against plain decoding
        self.is_probing = False  # whether plain decoding was best when the latest step was planned
        self.is_alone = True  # whether no other generation ran during the latest step

    def for_text(self) -> "Depth":
        return type(self)(self.max_draft_tokens, times=self.times)

    def next(self, offers: Sequence[Offer], min_draft_tokens: int = 0, n_sequences: int = 1, n_tokens: int = 0) -> Plan:
        """Choose the next plan, by the offers of the sequences that have not ended, ``n_sequences`` with those that have.

        With ``min_draft_tokens``, the head drafts as many in any case, and the choice is that of free drafts. ``n_tokens`` is
        the length of the longest sequence.
        """
        times = self.times.of_size(n_sequences, n_tokens)
        n = min(self.max_draft_tokens, max((len(offer[HEAD]) for offer in offers if HEAD in offer), default=0))
        # The head's drafts of a single sequence; several may also have free drafts in the same window.
        of_window = [{HEAD: offers[0].get(HEAD, ())}] if len(offers) == 1 else offers
        tokens = joint_tokens(of_window, max(n, min_draft_tokens))
        seconds = [*times.estimate]
        best = min_draft_tokens
        if chooses_head := min_draft_tokens == 0 and n > 0:
            seconds[0] *= 1 - self.MARGIN
            best = best_length(tokens, seconds)
            self.is_probing = best == 0
        plan, speed = _faster(times, Plan(best), tokens[best] / seconds[best], offers)
        if plan == PLAIN_PLAN and chooses_head:
            rate = tokens[1] - 1  # the first draft's acceptance rate
            plain = times.estimate[0]
            if self.lost < rate * (self.PROBING * self.elapsed + self.FIRST_LOSS * rate * (1 - rate) * plain):
                # A probe: the best number of drafts costs least, and shows most if the text has changed.
                return Plan(best_length(tokens, [math.inf, *seconds[1:]]))
        # Otherwise a plain step is measured first. Beside other generations it cannot be.
        is_safe = min_draft_tokens > 0 or not self.is_alone or times.knows_plain(speed * times.estimate[0])
        return plan if is_safe else PLAIN_PLAN

    def observe(
        self,
        plan: Plan,
        n_accepted: float,
        seconds: float | None,
        is_alone: bool = True,
        n_sequences: int = 1,
        n_tokens: int = 0,
    ) -> None:
        """Observe a step: the mean number of accepted drafts, and the time since the end of the step before, if it is clear.

        ``is_alone`` tells whether no other generation ran in between.
        """
        self.is_alone = is_alone
        times = self.times.of_size(n_sequences, n_tokens)
        if is_alone:
            times.observe(plan, seconds, n_tokens)
        # A pause, such as a slow caller's, neither allows more probing nor counts as a loss of a probe.
        expected = times.of(plan)
        seconds = expected if seconds is None else min(seconds, times.BEYOND_NOISE * expected)
        self.elapsed += seconds
        # Drafts that were expected to pay are no probes: a text that was hard for a while would otherwise not be probed again.
        if self.is_probing and plan.k > 0:
            gained = 1 + (1 - self.DOUBT) * n_accepted
            self.lost = max(self.lost + seconds - gained * times.estimate[0], 0.0)
        if plan.skips_head and n_accepted == plan.k == times.max_free:
            times.max_free = min(2 * times.max_free, MAX_COPY_TOKENS)


def _faster(times: StepTimes, plan: Plan, speed: float, offers: Sequence[Offer]) -> tuple[Plan, float]:
    """The plan with free drafts alone if it is faster, or else the given one; and its tokens per second."""
    free: list[Offer] = [{name: a for name, a in offer.items() if name != HEAD} for offer in offers]
    longest = max((len(a) for offer in free for a in offer.values()), default=0)
    speeds = [n / t for n, t in zip(joint_tokens(free, longest), times.free)]
    best = max((k for k in FREE_LENGTHS if k <= longest), key=speeds.__getitem__, default=0)
    if speeds[best] <= speed:
        return plan, speed
    k = min(best, times.max_free)
    return Plan(k, FREE), speeds[k]
