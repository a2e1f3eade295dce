"""Choose the number and the source of the next drafts: the most expected tokens per second, by the steps observed so far.

A step with k drafts yields E(k) = 1 + a_1 + a_1 a_2 + ... tokens, where a_i is the probability that draft i is accepted, given
that the drafts before it are, and takes t(k) seconds; k = 0 is plain decoding. ``best_depth`` maximizes E(k) / t(k).
``Rates`` estimates a for one text, ``StepTimes`` estimates t for one machine, and ``Depth`` chooses from both for one text.
Nothing here reads a clock or draws a random number. docs/develop/depth.md has the measured effect of each constant.

The head's confidence in a draft is not used: the host knows it only after the drafts are computed, and to wait for them before
building the verify pass usually costs more than it saves. If waiting gains, ``--tune`` sets ``draft_p_min``.
"""

import math
from collections.abc import Mapping, Sequence

from .step_times import PLAIN_PLAN, Plan, StepTimes

MAX_DRAFT_TOKENS = 8
# Numbers of drafts for sources other than the head; few, so that their times are soon known.
SOURCE_DEPTHS = (1, 2, 4, 8, 16)
MAX_COPY_TOKENS = SOURCE_DEPTHS[-1]


def best_depth(acceptance: Sequence[float], seconds: Sequence[float]) -> int:
    """
    The depth with the most expected tokens per second; the lowest of equals.

    Args:
        acceptance (Sequence[float]): The probability that each draft is accepted, given that the drafts before it are, [K].
        seconds (Sequence[float]): The time of a step at each depth from 0, [K + 1].
    """
    rates = [tokens / t for tokens, t in zip(expected_tokens(acceptance), seconds)]
    return rates.index(max(rates))


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """The mean number of tokens that a step yields at each depth from 0, [K + 1]."""
    tokens, accepted = [1.0], 1.0
    for a in acceptance:
        accepted *= a
        tokens.append(tokens[-1] + accepted)
    return tokens


class Rates:
    """A running estimate of the acceptance rate in each of n buckets, such as the positions in a window.

    Without new counts, the estimate of a bucket moves towards that of the bucket before it.

    Args:
        n (int): The number of buckets.

    Attributes:
        estimate (list[float]): [n].
    """

    # The decay of a count with each later count: to a third after 25, so it follows the text within a paragraph.
    FADING = 0.96
    PRIOR = 0.7  # the rate of the first bucket before any count: between prose and code
    WEIGHT = 2.0  # the weight of the prior or the bucket before, in drafts

    def __init__(self, n: int):
        self.n_verified, self.n_accepted = [0.0] * n, [0.0] * n
        self.estimate = self._estimate()

    @property
    def has_counts(self) -> bool:
        """Whether anything was counted."""
        return any(self.n_verified)

    def count(self, bucket: int, accepted: bool) -> None:
        """Count one draft; earlier counts of the same bucket decay."""
        self.n_verified[bucket] = self.FADING * self.n_verified[bucket] + 1
        self.n_accepted[bucket] = self.FADING * self.n_accepted[bucket] + accepted
        self.estimate = self._estimate()

    def count_window(self, n_drafted: int, n_accepted: int) -> None:
        """Count a window, whose positions are the buckets; all earlier counts decay.

        If a draft is accepted, the text is predictable, and the next draft is accepted about as often. So an abandoned depth is
        tried again once the drafts before it are accepted more often.
        """
        self.n_verified = [self.FADING * n for n in self.n_verified]
        self.n_accepted = [self.FADING * n for n in self.n_accepted]
        for i in range(min(n_accepted + 1, n_drafted)):  # drafts after the first rejected one tell nothing
            self.n_verified[i] += 1
            self.n_accepted[i] += i < n_accepted
        self.estimate = self._estimate()

    def _estimate(self) -> list[float]:
        estimates, expected = [], self.PRIOR
        for n_verified, n_accepted in zip(self.n_verified, self.n_accepted):
            expected = (n_accepted + self.WEIGHT * expected) / (n_verified + self.WEIGHT)
            estimates.append(expected)
        return estimates


class Depth:
    """Chooses the depth of every step of a text.

    Times are kept after a text and are shared: a ``Depth`` given as ``num_draft_tokens`` passes its times to each generation,
    which makes a ``Depth`` for its own text (``for_text``).

    It begins with plain steps, unless it has times already, then drafts one token twice, and then chooses the best depth by its
    estimates. It forgets given times if the first two steps at a depth contradict them; a single step may include a pause.

    If plain decoding is best, it probes: it drafts from time to time to see whether the text has changed, less often if fewer
    drafts are accepted. The share of time lost by probing is at most ``PROBING`` times the first draft's acceptance.

    The time of a step with two drafts is a guess until it is measured. If a pass over two tokens takes much longer than a pass
    over one, a third token often adds little. So if the best depth is 0 or 1, it tries two drafts if they would be faster with
    the second one free.

    If another source offers drafts, such as copies of repeated text, it compares them with the head's. Their acceptance rate is
    known without drafting, but the time of a step with many of them is not: it begins with few, and doubles the number if all
    are accepted.

    Args:
        most (int): The largest depth.
        seconds (Mapping[int, float], optional): The time of a step by depth, measured earlier on this machine.
        times (StepTimes, optional): The times of steps, which it reads and updates. Default: ``None``, new ones, with
          ``seconds``.
        only (int, optional): Always draft this many tokens with the head, and choose only for other sources. Default: ``None``.
        rates (Rates, optional): The acceptance rates of the head's drafts, which it reads and updates. Default: ``None``, the
          rates of a new text.
    """

    # The first step at a depth is not counted, and the others show whether it was slow.
    FIRST_DEPTHS = (0, 0, 0, 0, 1, 1)
    PROBING = 0.016  # the share of time that probing may lose
    FIRST_LOSS = 0.7  # the additional time, in plain steps, that probing may lose, so that it can begin
    # The gain over plain decoding, relative to its speed, that drafting requires, since estimates have errors.
    MARGIN = 0.03
    PLAIN_AFTER_PROBE = 0  # plain steps after a probe
    DOUBT = 0.1  # the part of a probe's accepted drafts that is no gain: plain steps before a probe seem slower than they are

    def __init__(
        self,
        most: int,
        seconds: Mapping[int, float] | None = None,
        *,
        times: StepTimes | None = None,
        only: int | None = None,
        rates: Rates | None = None,
    ):
        self.most, self.only = most, only
        self.times = StepTimes(most, seconds) if times is None else times
        self.rates = Rates(most) if rates is None else rates
        self.elapsed = self.lost = 0.0  # seconds; lost by probing, against plain decoding
        self.is_probing = False  # whether plain decoding was best when the latest steps were planned
        self.has_begun = False  # whether the first step was chosen
        self.is_alone = True  # whether no other generation ran during the latest step
        self.planned: list[Plan] = []
        self.unconfirmed, self.doubted = set[Plan](), set[Plan]()

    def for_text(self) -> "Depth":
        """Make a depth for another text, with new acceptance rates and the same times."""
        return type(self)(self.most, times=self.times)

    def _begin(self) -> None:
        """Plan the first steps by the current times. Not in the constructor: several ranks agree on times after it."""
        self.has_begun = True
        self.unconfirmed = set(self.times.seconds) - self.times.guessed
        self.planned = self._first_steps()

    def _first_steps(self) -> list[Plan]:
        if self.only is not None:
            return []
        if len(self.times.seconds) - len(self.times.guessed) < 2:  # the cost of a draft is unknown yet
            return [Plan(k) for k in self.FIRST_DEPTHS]
        return [] if self.rates.has_counts else [Plan(k) for k in self.FIRST_DEPTHS if k > 0]

    def next(self, offers: Mapping[str, Sequence[float]] | None = None) -> Plan:
        """
        Args:
            offers (Mapping[str, Sequence[float]], optional): The acceptance rates of each other source with drafts: the
              probability that each draft is accepted, given that the drafts before it are.
        """
        if not self.has_begun:
            self._begin()
        if not self.planned:
            self.planned = self._plan(offers or {})
        return self.planned.pop(0)

    def _plan(self, offers: Mapping[str, Sequence[float]]) -> list[Plan]:
        plain, *others = self.times.estimate
        seconds = [(1 - self.MARGIN) * plain, *others]
        best = best_depth(self.rates.estimate, seconds) if self.only is None else self.only
        self.is_probing = best == 0
        tokens = expected_tokens(self.rates.estimate)[best]
        if (free := self._best_source(offers, tokens / seconds[best])) is not None:
            gain = expected_tokens(offers[free.source])[free.k] / self.times.of(free) * plain
            return [free if self.only or self._is_safe(gain) else PLAIN_PLAN]
        if self.only is not None:
            return [Plan(self.only)]
        if best > 0:
            is_safe = self._is_safe(tokens / seconds[best] * plain)
            return [Plan(best)] if is_safe else [PLAIN_PLAN, *self._trial(best, seconds)]
        if self.lost < self.PROBING * self.rates.estimate[0] * self.elapsed + self.FIRST_LOSS * plain:
            # The best number of drafts costs least, and shows most if the text has changed.
            probe = best_depth(self.rates.estimate, [math.inf, *others])
            return self._trial(best, seconds) or [Plan(probe), *[PLAIN_PLAN] * self.PLAIN_AFTER_PROBE]
        return [PLAIN_PLAN]

    def _is_safe(self, gain: float) -> bool:
        """Whether drafting can be chosen without measuring a plain step first.

        It can if plain decoding was measured recently, or is slower by more than noise. If other generations run in between,
        times cannot be measured, and a plain step would not help.

        Args:
            gain (float): The expected speed of drafting, relative to plain decoding.
        """
        is_slower = gain >= StepTimes.BEYOND_NOISE and self.times.n_counted.get(PLAIN_PLAN, 0) > 1
        return self.times.is_fresh(PLAIN_PLAN) or is_slower or not self.is_alone

    def _best_source(self, offers: Mapping[str, Sequence[float]], speed: float) -> Plan | None:
        """The plan of the fastest other source, if it is faster than ``speed``, in tokens per second."""
        best = None
        for source, acceptance in offers.items():
            tokens, seconds = expected_tokens(acceptance), self.times.source_estimate(source)
            rates = {k: tokens[k] / seconds[k] for k in SOURCE_DEPTHS if k < len(tokens)}
            k = max(rates, key=rates.__getitem__)
            if rates[k] > speed:
                speed, best = rates[k], Plan(min(k, self.times.most_of(source)), source)
        return best

    def _trial(self, best: int, seconds: Sequence[float]) -> list[Plan]:
        """Three steps with two drafts, if their time is a guess and two drafts would be best if the second took no time."""
        if best > 1 or self.most < 2 or self.times.is_fresh(Plan(2)):
            return []
        tokens = expected_tokens(self.rates.estimate)
        would_pay = tokens[2] / seconds[1] > (1 + self.MARGIN) * tokens[best] / seconds[best]
        # The first step at a depth is not counted. With only one more, a pause could be mistaken for the time of two drafts.
        return [Plan(2)] * 3 if would_pay else []

    def observe(self, plan: Plan, n_accepted: float, seconds: float | None, is_alone: bool = True) -> None:
        """
        Args:
            plan (Plan): The plan of the step.
            n_accepted (float): The number of accepted drafts; the mean of several sequences.
            seconds (float, optional): The time from the end of the step before to the end of this step; ``None`` if it may
              include other steps.
            is_alone (bool): Whether no other generation ran in between.
        """
        self.is_alone = is_alone
        seconds = self._confirm(plan, seconds) if is_alone and seconds is not None else None
        if is_alone:
            self.times.observe(plan, seconds)
        self._account(plan, n_accepted, seconds)
        if not plan.skips_head and plan.k > 0:
            self.rates.count_window(plan.k, int(n_accepted))
        elif plan.skips_head and n_accepted == plan.k == self.times.most_of(plan.source):
            self.times.allow_more(plan.source)

    def _confirm(self, plan: Plan, seconds: float) -> float | None:
        """The time of a step if it counts.

        The first step that contradicts the given times does not count. After the second one, the times are forgotten.
        """
        known = self.times.seconds.get(plan)  # None if another text has dropped it
        if known is None or plan not in self.unconfirmed or plan not in self.times.warm:
            return seconds
        ratio = seconds / known
        if 1 / StepTimes.BEYOND_NOISE < ratio < StepTimes.BEYOND_NOISE:
            self.unconfirmed.remove(plan)
            return seconds
        if plan in self.doubted:
            self.times.forget()  # another context, another state of the machine
            self.planned, self.unconfirmed = self._first_steps(), set()
            return seconds
        self.doubted.add(plan)
        if self.only is None and not plan.skips_head:  # another source may have no drafts next time
            self.planned.insert(0, plan)  # once more
        return None

    def _account(self, plan: Plan, n_accepted: float, seconds: float | None) -> None:
        """Add a step to the time elapsed, and a probe's time beyond that of plain decoding to the time lost.

        Drafts that were expected to pay are no probes: a text that was hard for a while would otherwise not be probed again.
        """
        # A pause, such as a slow caller's, neither allows more probing nor counts as a loss of a probe.
        seconds = self.times.of(plan) if seconds is None else self.times.without_pause(plan, seconds)
        self.elapsed += seconds
        if plan.k > 0:
            n_tokens = 1 + (1 - self.DOUBT) * n_accepted
            lost = max(self.lost + seconds - n_tokens * self.times.estimate[0], 0.0)
            self.lost = lost if self.is_probing else min(lost, self.lost)
