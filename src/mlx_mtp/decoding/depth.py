"""How many tokens to draft next: the number with the most expected tokens per second, from what was observed so far.

A step with k drafts yields E(k) = 1 + a_1 + a_1 a_2 + ... tokens, where a_i is the probability that draft i is accepted given
that those before it were, and takes t(k) seconds; k = 0 is plain decoding. ``best_depth`` maximizes E(k) / t(k).
``Acceptance`` estimates a for one text, ``StepTimes`` estimates t for one machine, and ``Depth`` chooses from both. Nothing
here reads a clock or draws a random number. docs/depth.md gives what each constant is worth.

How confident the head is in a draft plays no part: the host knows that only once the drafts are computed, and a step that waits
for them before it builds the verify pass usually loses more than it saves. Where it gains, ``--tune`` finds it and
``draft_p_min`` does it.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

MAX_DRAFT_TOKENS = 8
BEYOND_NOISE = 1.4  # a ratio of times; two steps that differ by less may take the same time


def best_depth(acceptance: Sequence[float], seconds: Sequence[float]) -> int:
    """
    The depth with the most expected tokens per second; the lowest of equals.

    Args:
        acceptance (Sequence[float]): The probability that each draft is accepted, given that those before it were, [K].
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


class Acceptance:
    """A running estimate of a_i that forgets, since the text changes.

    What is known of a position fades with every step that drafts, towards the estimate of the position before it: where one
    draft is accepted, the text is easy, and the next does about as well. So a depth that was given up is tried again once the
    drafts before it do well.

    Args:
        n (int): The number of positions.

    Attributes:
        estimate (list[float]): a_i, [n].
    """

    FADING = 0.96  # a step: 25 steps back counts a third, so a change of the text shows within a paragraph
    PRIOR = 0.7  # of the first draft: between prose and code
    WEIGHT = 2.0  # drafts that the prior and the position before count for

    def __init__(self, n: int):
        self.n_verified, self.n_accepted = [0.0] * n, [0.0] * n
        self.estimate = self._estimate()

    def observe(self, n_drafted: int, n_accepted: int) -> None:
        self.n_verified = [x * self.FADING for x in self.n_verified]
        self.n_accepted = [x * self.FADING for x in self.n_accepted]
        for i in range(min(n_accepted + 1, n_drafted)):  # nothing is learned of drafts after the first rejected one
            self.n_verified[i] += 1
            self.n_accepted[i] += i < n_accepted
        self.estimate = self._estimate()

    def _estimate(self) -> list[float]:
        estimates, expected = [], self.PRIOR
        for n_verified, n_accepted in zip(self.n_verified, self.n_accepted):
            expected = (n_accepted + self.WEIGHT * expected) / (n_verified + self.WEIGHT)
            estimates.append(expected)
        return estimates


class StepTimes:
    """A running estimate of t(k), in seconds.

    The first step at a depth is not counted: it may have compiled something. A step far longer than expected is counted as
    ``BEYOND_NOISE`` times what was expected: the machine may have paused. When steps become far shorter, the earlier ones were
    slow: the times of all depths shrink alike, until they are measured again. A longer context adds to all depths. A depth
    that was not used for a while lies on the line through the two nearest that were.

    Args:
        n (int): The greatest depth.
        seconds (Mapping[int, float], optional): Times measured before, by depth.

    Attributes:
        estimate (list[float]): t(k) at each depth from 0, [n + 1].
    """

    FOLLOWS = 0.08  # the part of a difference that a time follows, and half of it at the other depths
    GUESSED_SLOPE = 0.5  # plain steps for each draft, until two depths were measured
    STALE = 100  # steps with drafts after which a time is no longer relied on

    def __init__(self, n: int, seconds: Mapping[int, float] | None = None):
        self.n = n
        self.n_drafting = 0  # steps with drafts
        self.seconds = dict(seconds or {})
        self.warm: set[int] = set()  # depths that were used
        self.n_counted = dict.fromkeys(self.seconds, 1)
        self.last_used = dict.fromkeys(self.seconds, 0)
        self.n_fast = 0  # steps in a row that were far shorter than expected
        self.estimate = self._estimate()

    def observe(self, k: int, seconds: float | None) -> None:
        self.n_drafting += k > 0
        if seconds is not None and k in self.warm:
            self._count(k, seconds)
        self.warm.add(k)
        self.estimate = self._estimate()

    def without_pause(self, k: int, seconds: float) -> float:
        """At most ``BEYOND_NOISE`` times what a step is expected to take."""
        return min(seconds, BEYOND_NOISE * self.estimate[k])

    def _count(self, k: int, seconds: float) -> None:
        self.n_counted[k] = self.n_counted.get(k, 0) + 1
        self.last_used[k] = self.n_drafting
        self._shrink(k, seconds)
        if self.seconds:
            seconds = self.without_pause(k, seconds)
        if self.n_counted[k] == 1:
            self.seconds[k] = seconds
            return
        difference = seconds - self.seconds[k]
        self.seconds[k] += max(self.FOLLOWS, 1 / self.n_counted[k]) * difference
        for other in self.seconds.keys() - {k}:
            self.seconds[other] += self.FOLLOWS / 2 * difference

    def _shrink(self, k: int, seconds: float) -> None:
        """Scales all times down when steps become far shorter than one at the same or a lower depth was."""
        slowest = max((t for other, t in self.seconds.items() if other <= k), default=seconds)
        self.n_fast = self.n_fast + 1 if seconds < slowest / BEYOND_NOISE else 0
        # One alone may have begun while the host was late, unless the only one before it was the slow one.
        if self.n_fast == 2 or (self.n_fast == 1 and self.n_counted[k] == 2):
            self.seconds = {other: seconds / slowest * t for other, t in self.seconds.items()}
            self.n_counted = {k: 1}

    def is_known(self, k: int) -> bool:
        """Whether steps at a depth were measured, not long ago and since times last shrank."""
        return k in self.n_counted and self.n_drafting - self.last_used[k] <= self.STALE

    def _estimate(self) -> list[float]:
        points = sorted((k, t) for k, t in self.seconds.items() if k == 0 or self.is_known(k)) or [(0, 1.0)]
        if points[0][0] > 0:
            k, t = points[0]
            points.insert(0, (0, t / (1 + self.GUESSED_SLOPE * k)))
        if len(points) == 1:
            points.append((1, points[0][1] * (1 + self.GUESSED_SLOPE)))
        return _on_lines(points, self.n)


def _on_lines(points: Sequence[tuple[int, float]], n: int) -> list[float]:
    """The values at 0 to n of the lines through the points, from 0 on. No line falls, and the last one goes on."""
    values = [points[0][1]]
    for (x0, y0), (x1, y1) in pairwise(points):
        slope = max((y1 - y0) / (x1 - x0), 0.0)
        end = n if x1 == points[-1][0] else x1
        values += [y0 + slope * x for x in range(1, end - x0 + 1)]
    return values


class Depth:
    """Chooses the depth of every step, of one generation after another.

    It begins plain, unless times are known from before, drafts one token twice, and then takes the best depth by its estimates.
    It forgets the known times if the first steps at a depth contradict them.

    Where plain decoding is best, it probes: it drafts one token now and then to see whether the text has changed, less often
    the fewer drafts are accepted. Probing loses at most ``PROBING`` times the first draft's acceptance of the time.

    How long a step with two drafts takes is a guess until it is tried. Where a pass over two tokens takes much longer than one
    over one, a third token often adds little. So where the best depth is 0 or 1, it tries two if they would pay were the second
    free.

    Args:
        most (int): The greatest depth.
        seconds (Mapping[int, float], optional): The time of a step, by depth, as measured before on this machine.
    """

    FIRST = (0, 0, 0, 0, 1, 1)  # the first step at a depth is not counted, and the others show whether it was slow
    PROBING = 0.02  # of the time, at most, lost to probing
    MARGIN = 0.03  # of the speed that drafting must gain on plain decoding, since the estimates err
    DOUBT = 0.1  # of a probe's accepted drafts not counted as gain: probes follow plain steps that seem slower than they are

    def __init__(self, most: int, seconds: Mapping[int, float] | None = None):
        self.most = most
        self.times = StepTimes(most, seconds)
        self.begin()

    def begin(self) -> None:
        """Another text begins: its acceptance is not known, but the times of steps may still hold."""
        self.acceptance = Acceptance(self.most)
        self.elapsed = self.lost = 0.0  # seconds; lost by drafting, against plain decoding
        self.planned = [k for k in self.FIRST if k > 0]
        self.unconfirmed = set(self.times.seconds)
        if len(self.unconfirmed) < 2:  # nothing says what a draft costs
            self._forget_times()

    def _forget_times(self) -> None:
        self.times = StepTimes(self.most)
        self.planned, self.unconfirmed = list(self.FIRST), set()

    def next(self) -> int:
        if not self.planned:
            self.planned = self._plan()
        return self.planned.pop(0)

    def _plan(self) -> list[int]:
        plain, *others = self.times.estimate
        seconds = [(1 - self.MARGIN) * plain, *others]
        best = best_depth(self.acceptance.estimate, seconds)
        if best > 0:
            return [best] if self._is_safe(best) else [0, *self._trial(best, seconds)]
        if self.lost < self.PROBING * self.acceptance.estimate[0] * self.elapsed + plain:
            return self._trial(best, seconds) or [1]
        return [0]

    def _is_safe(self, best: int) -> bool:
        """Whether plain decoding was measured not long ago, or measured at all and slower beyond doubt."""
        if self.times.is_known(0):
            return True
        plain, drafting = self.times.estimate[0], self.times.estimate[best]
        gain = plain * expected_tokens(self.acceptance.estimate)[best] / drafting
        return gain >= BEYOND_NOISE and self.times.n_counted.get(0, 0) > 1

    def _trial(self, best: int, seconds: Sequence[float]) -> list[int]:
        """Three steps with two drafts, where their time is a guess and they would be best if the second took no time."""
        if best > 1 or self.most < 2 or self.times.is_known(2):
            return []
        tokens = expected_tokens(self.acceptance.estimate)
        would_pay = tokens[2] / seconds[1] > (1 + self.MARGIN) * tokens[best] / seconds[best]
        # The first step at a depth is not counted, and one more would leave a pause for the time of two.
        return [2, 2, 2] if would_pay else []

    def observe(self, k: int, n_accepted: int, seconds: float | None) -> None:
        """
        Args:
            k (int): The number of drafts of a step.
            n_accepted (int): The number of them that were accepted.
            seconds (float, optional): From the end of the step before to the end of this one; ``None`` where the steps beside
              it do not tell.
        """
        if seconds is not None:
            self._confirm(k, seconds)
        self.times.observe(k, seconds)
        self._account(k, n_accepted, seconds)
        if k > 0:
            self.acceptance.observe(k, n_accepted)

    def _confirm(self, k: int, seconds: float) -> None:
        """Forgets the known times if the first step that counts at a depth contradicts them."""
        if k in self.unconfirmed and k in self.times.warm:
            self.unconfirmed.remove(k)
            if not 1 / BEYOND_NOISE < seconds / self.times.seconds[k] < BEYOND_NOISE:
                self._forget_times()  # another context, another state of the machine

    def _account(self, k: int, n_accepted: int, seconds: float | None) -> None:
        """Adds a step to the time elapsed, and to the time lost by drafting what it took longer than plain decoding."""
        estimate = self.times.estimate
        # A pause, such as a slow reader's, neither allows more probing nor counts as lost by a probe.
        seconds = estimate[k] if seconds is None else self.times.without_pause(k, seconds)
        self.elapsed += seconds
        if k > 0:
            n_tokens = 1 + (1 - self.DOUBT) * n_accepted
            self.lost = max(self.lost + seconds - n_tokens * estimate[0], 0.0)
