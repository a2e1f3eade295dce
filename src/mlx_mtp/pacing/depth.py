"""Choose the number and the source of the next drafts: the most expected tokens per second, by the steps observed so far.

A step with k drafts yields E(k) = 1 + a_1 + a_1 a_2 + ... tokens, where a_i is the probability that draft i is accepted, given
that the drafts before it are, and takes t(k) seconds; k = 0 is plain decoding. ``best_depth`` maximizes E(k) / t(k).
Several sequences share k. It minimizes the mean of t(k) / E_b(k) over the sequences b, so E is the harmonic mean of theirs. The
tokens per second of the whole batch would favor sequences that are already fast: others would end long after them.
``Rates`` estimates a for one text, ``StepTimes`` estimates t for one machine, and ``Depth`` chooses from both.
Nothing here reads a clock or draws a random number. docs/develop/depth.md has the measured effect of each constant.

The head's confidence in a draft is not used: the host knows it only after the drafts are computed, and to wait for them before
building the verify pass usually costs more than it saves. If waiting gains, ``--tune`` sets ``draft_p_min``.
"""

import math
from collections.abc import Mapping, Sequence

from .step_times import FREE, HEAD, MAX_DRAFT_TOKENS, PLAIN_PLAN, Plan, StepTimes

__all__ = ["MAX_DRAFT_TOKENS", "Depth", "Rates"]
# Numbers of drafts for sources other than the head; few, so that their times are soon known.
SOURCE_DEPTHS = (1, 2, 4, 8, 16)
MAX_COPY_TOKENS = SOURCE_DEPTHS[-1]


# The probability that each draft of a sequence is accepted, given that the drafts before it are, by source, each [K].
Offer = Mapping[str, Sequence[float]]


def best_depth(tokens: Sequence[float], seconds: Sequence[float]) -> int:
    """
    The depth with the most expected tokens per second; the lowest of equals.

    Args:
        tokens (Sequence[float]): The mean number of tokens that a step yields at each depth from 0, [K + 1].
        seconds (Sequence[float]): The time of a step at each depth, [K + 1].
    """
    rates = [n / t for n, t in zip(tokens, seconds)]
    return rates.index(max(rates))


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """The mean number of tokens that a step yields at each depth from 0, [K + 1]."""
    tokens, accepted = [1.0], 1.0
    for a in acceptance:
        accepted *= a
        tokens.append(tokens[-1] + accepted)
    return tokens


def joint_tokens(offers: Sequence[Offer], n: int) -> list[float]:
    """The harmonic mean of the tokens that each sequence's best source yields at each depth from 0 to n, [n + 1]."""
    of_each = [[max(own) for own in zip(*(_padded(a, n) for a in offer.values()))] for offer in offers if offer]
    of_each += [[1.0] * (n + 1) for offer in offers if not offer]
    return [len(of_each) / sum(1 / tokens for tokens in at_k) for at_k in zip(*of_each)]


def _padded(acceptance: Sequence[float], n: int) -> list[float]:
    """``expected_tokens`` up to depth n, where further drafts are not offered."""
    tokens = expected_tokens(acceptance[:n])
    return tokens + tokens[-1:] * (n + 1 - len(tokens))


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
    """Chooses the depth of every step of one sequence or several; docs/develop/depth.md has its rules.

    Times are kept after a text and are shared: a ``Depth`` given as ``num_draft_tokens`` passes its times to each generation,
    which makes a ``Depth`` of its own (``for_text``).

    Args:
        most (int): The largest depth.
        seconds (Mapping[int, float], optional): The time of a step by depth, measured earlier on this machine.
        times (StepTimes, optional): The times of steps, which it reads and updates. Default: ``None``, new ones, with
          ``seconds``.
        n_sequences (int): The number of sequences. Default: ``1``.
    """

    # The first step at a depth is not counted, and the others show whether it was slow.
    FIRST_DEPTHS = (0, 0, 0, 0, 1, 1)
    PROBING = 0.016  # the share of time that probing may lose
    FIRST_LOSS = 0.7  # the additional time, in plain steps, that probing may lose, so that it can begin
    # The gain over plain decoding that drafting requires, for each sequence and in all, since estimates have errors: in a large
    # batch a draft costs nearly as much as a token, rates of changing sequences have larger errors, and it ends as a small one.
    MARGIN, MOST_MARGIN = 0.03, 0.15
    # Plain steps after a probe of several sequences: within the margin a probe seems to cost nothing, and they bound its cost.
    PLAIN_AFTER_PROBE = 15
    DOUBT = 0.1  # the part of a probe's accepted drafts that is no gain: plain steps before a probe seem slower than they are

    def __init__(
        self,
        most: int,
        seconds: Mapping[int, float] | None = None,
        *,
        times: StepTimes | None = None,
        n_sequences: int = 1,
    ):
        self.most, self.n_sequences = most, n_sequences
        self.margin = min(n_sequences * self.MARGIN, self.MOST_MARGIN)
        self.times = StepTimes(most, seconds) if times is None else times
        self.first_rate = 1.0  # the acceptance rate of the head's first draft
        self.elapsed = self.lost = 0.0  # seconds; lost by probing, against plain decoding
        self.is_probing = False  # whether plain decoding was best when the latest steps were planned
        self.is_alone = True  # whether no other generation ran during the latest step
        self.planned: list[Plan] | None = None  # the next steps; ``None`` before the first
        self.unconfirmed, self.doubted = set[Plan](), set[Plan]()

    def for_text(self) -> "Depth":
        """Make a depth for another text with the same times."""
        return type(self)(self.most, times=self.times, n_sequences=self.n_sequences)

    def _first_steps(self) -> list[Plan]:
        knows_cost = len(self.times.seconds) >= 2  # of a draft
        return [Plan(k) for k in self.FIRST_DEPTHS if k > 0 or not knows_cost]

    def next(self, offers: Sequence[Offer], least: int = 0) -> Plan:
        """
        Args:
            offers (Sequence[Offer]): The sources of each sequence that have drafts, and their acceptance rates.
            least (int): The number of tokens to draft with the head in any case. It then chooses only for other sources.
        """
        n = max((len(offer[HEAD]) for offer in offers if HEAD in offer), default=0)
        if self.planned is None:  # not in the constructor: several ranks agree on times after it
            self.unconfirmed = set(self.times.seconds)
            self.planned = self._first_steps()
        if least == 0 and n > 0:
            self.planned = self.planned or self._plan(offers, n)
            return self.planned.pop(0)
        tokens = joint_tokens(offers, max(n, least))[least]
        best = Plan(least)
        return self._free(offers, tokens / self.times.of(best), is_safe=least > 0) or best

    def _plan(self, offers: Sequence[Offer], n: int) -> list[Plan]:
        plain, *others = self.times.estimate
        # The head's drafts of a single sequence; several may also draft from other sources in the same window.
        own = [{HEAD: offers[0][HEAD]}] if len(offers) == 1 else offers
        seconds, tokens = [(1 - self.margin) * plain, *others], joint_tokens(own, n)
        best = best_depth(tokens, seconds)
        self.is_probing, self.first_rate = best == 0, tokens[1] - 1
        speed = tokens[best] / seconds[best]
        if (free := self._free(offers, speed)) is not None:
            return [free]
        if best > 0:
            return [Plan(best)] if self._is_safe(speed * plain) else [PLAIN_PLAN, *self._trial(best, tokens, seconds)]
        if self.lost < self.PROBING * self.first_rate * self.elapsed + self.FIRST_LOSS * plain:
            # The best number of drafts costs least, and shows most if the text has changed.
            probe = best_depth(tokens, [math.inf, *others])
            n_plain = 0 if self.n_sequences == 1 else self.PLAIN_AFTER_PROBE
            return self._trial(best, tokens, seconds) or [Plan(probe), *[PLAIN_PLAN] * n_plain]
        return [PLAIN_PLAN]

    def _free(self, offers: Sequence[Offer], speed: float, is_safe: bool = False) -> Plan | None:
        """The plan with drafts of other sources alone, if it is faster than ``speed``, in tokens per second."""
        others: list[Offer] = [{name: a for name, a in offer.items() if name != HEAD} for offer in offers]
        longest = max((len(a) for offer in others for a in offer.values()), default=0)
        tokens, best = joint_tokens(others, longest), None
        for k in (k for k in SOURCE_DEPTHS if k <= longest):
            if tokens[k] / self.times.free[k] > speed:
                speed, best = tokens[k] / self.times.free[k], k
        if best is None:
            return None
        k = min(best, self.times.most_free)
        gain = tokens[k] / self.times.free[k] * self.times.estimate[0]
        return Plan(k, FREE) if is_safe or self._is_safe(gain) else PLAIN_PLAN

    def _is_safe(self, gain: float) -> bool:
        """Whether drafting can be chosen without measuring a plain step first.

        It can if plain decoding was measured recently, or is slower by more than noise. If other generations run in between,
        times cannot be measured, and a plain step would not help.

        Args:
            gain (float): The expected speed of drafting, relative to plain decoding.
        """
        is_slower = gain >= StepTimes.BEYOND_NOISE and self.times.n_counted.get(PLAIN_PLAN, 0) > 1
        return self.times.is_fresh(PLAIN_PLAN) or is_slower or not self.is_alone

    def _trial(self, best: int, tokens: Sequence[float], seconds: Sequence[float]) -> list[Plan]:
        """Three steps with two drafts, if their time is a guess and two drafts would be best if the second took no time."""
        if best > 1 or len(tokens) < 3 or self.times.is_fresh(Plan(2)):
            return []
        would_pay = tokens[2] / seconds[1] > (1 + self.margin) * tokens[best] / seconds[best]
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
        if plan.skips_head and n_accepted == plan.k == self.times.most_free:
            self.times.allow_more()

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
        if not plan.skips_head:  # another source may have no drafts next time
            self.planned = [plan, *(self.planned or [])]  # once more
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
