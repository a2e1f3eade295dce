"""How many tokens to draft next: what yields most tokens per second, by what was seen of the text and of the machine.

A step with k drafts yields E(k) = 1 + a_1 + a_1 a_2 + ... tokens, where a_i is the probability that draft i stands given that
those before it stood, and takes t(k) seconds; k = 0 is plain decoding. ``best_depth`` is that choice. ``Acceptance`` and
``StepTimes`` estimate a and t as they go; ``Depth`` puts them together. Nothing here reads a clock or draws a number.

How sure the head is of a draft has no part in it: the host knows that only when the drafts are computed, and a step that waits
for them before it builds the verify pass as a rule loses more than it saves. Where it gains, ``mlx_mtp.tune`` finds it, and
``draft_p_min`` does it.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

MAX_DRAFT_TOKENS = 8


def best_depth(acceptance: Sequence[float], seconds: Sequence[float]) -> int:
    """
    The depth with the most expected tokens per second; of equals the lowest.

    Args:
        acceptance (Sequence[float]): The probability of each draft to stand, given that those before it stood, [K].
        seconds (Sequence[float]): Of a step at each depth from 0, [K + 1].
    """
    rates = [tokens / t for tokens, t in zip(expected_tokens(acceptance), seconds)]
    return rates.index(max(rates))


def expected_tokens(acceptance: Sequence[float]) -> list[float]:
    """The mean number of tokens that a step yields at each depth from 0, [K + 1]."""
    tokens, stands = [1.0], 1.0
    for a in acceptance:
        stands *= a
        tokens.append(tokens[-1] + stands)
    return tokens


class Acceptance:
    """A running estimate of a_i, which forgets: the text changes.

    What is known of a position fades with every step that drafts, towards what is known of the position before it: where one
    draft stands, the text is easy, and the next does about as well. So a depth that was given up is tried again once the
    drafts before it do well.

    Args:
        n (int): The number of positions.

    Attributes:
        estimate (list[float]): a_i, [n].
    """

    FADING = 0.96  # a step
    PRIOR = 0.7  # of the first draft
    WEIGHT = 2.0  # of what is expected without having been seen, in drafts

    def __init__(self, n: int):
        self.judged, self.stood = [0.0] * n, [0.0] * n
        self.estimate = self._estimate()

    def observe(self, n_drafted: int, n_accepted: int) -> None:
        self.judged = [x * self.FADING for x in self.judged]
        self.stood = [x * self.FADING for x in self.stood]
        for i in range(min(n_accepted + 1, n_drafted)):  # those after the first that falls were not judged
            self.judged[i] += 1
            self.stood[i] += i < n_accepted
        self.estimate = self._estimate()

    def _estimate(self) -> list[float]:
        estimates, expected = [], self.PRIOR
        for judged, stood in zip(self.judged, self.stood):
            expected = (stood + self.WEIGHT * expected) / (judged + self.WEIGHT)
            estimates.append(expected)
        return estimates


class StepTimes:
    """A running estimate of t(k), in seconds.

    The first step at a depth is not counted: it may have compiled something. Of a later one at most ``PAUSE`` times what
    was expected is believed: it may have been a pause elsewhere. Where steps take so much less than expected, it was the
    earlier ones that were slow: all depths are taken to be as much faster, until they are measured anew. Depths that were not
    used for a while are taken to lie on the line through the two next to them that were; a deeper step never takes less time.
    A longer context adds to all.

    Args:
        n (int): The greatest depth.
        seconds (Mapping[int, float], optional): What was measured before, by depth.

    Attributes:
        estimate (list[float]): t(k) at each depth from 0, [n + 1].
    """

    FOLLOWS = 0.08  # the part of a surprise that is believed once there were some steps
    GUESSED_SLOPE = 0.25  # of a plain step, for each draft, before two depths were tried
    PAUSE = 1.5  # times as long as expected is no step but a pause
    STALE = 100  # steps with drafts
    KNOWN = 4  # steps, for which a time that was measured before counts

    def __init__(self, n: int, seconds: Mapping[int, float] | None = None):
        self.n = n
        self.n_drafting = 0
        self.seconds = dict(seconds or {})
        self.tried = dict.fromkeys(self.seconds, 0)
        self.n_counted = dict.fromkeys(self.seconds, self.KNOWN)
        self.last_used = dict.fromkeys(self.seconds, 0)
        self.n_fast = 0  # steps in a row that took far less than one at the same or a lower depth did
        self.estimate = self._estimate()

    def observe(self, k: int, seconds: float | None) -> None:
        self.n_drafting += k > 0
        if seconds is not None and self.is_warm(k):
            self._count(k, seconds)
        self.tried[k] = self.tried.get(k, 0) + 1
        self.estimate = self._estimate()

    def is_warm(self, k: int) -> bool:
        """Whether the next step at a depth counts: it is not the first."""
        return self.tried.get(k, 0) > 0

    def _count(self, k: int, seconds: float) -> None:
        n = self.n_counted.get(k, 0) + 1
        self.n_counted[k], self.last_used[k] = n, self.n_drafting
        slowest = max((t for other, t in self.seconds.items() if other <= k), default=seconds)
        self.n_fast = self.n_fast + 1 if seconds < slowest / self.PAUSE else 0
        if self.n_fast == 2 or (self.n_fast == 1 and n == 2):
            # Not after one step alone, which may have begun while the host was late; but the first of two may be what was slow.
            self.seconds = {other: seconds / slowest * t for other, t in self.seconds.items()}
            self.n_counted = {k: 1}
            n = 1
        if self.seconds:
            seconds = min(seconds, self.PAUSE * self.estimate[k])
        if n == 1:
            self.seconds[k] = seconds
            return
        surprise = seconds - self.seconds[k]
        self.seconds[k] += max(self.FOLLOWS, 1 / n) * surprise
        if n > 4:
            for other in self.seconds.keys() - {k}:
                self.seconds[other] += self.FOLLOWS / 2 * surprise

    def is_known(self, k: int) -> bool:
        """Whether steps at a depth were counted, not long ago."""
        return k in self.seconds and not self.is_stale(k)

    def is_stale(self, k: int) -> bool:
        # Plain decoding the sooner, the fewer steps of it were seen: all others are weighed against it.
        limit = self.STALE if k > 0 else min(self.STALE, 8 * self.n_counted.get(k, 0))
        return self.n_drafting - self.last_used.get(k, 0) > limit

    def _estimate(self) -> list[float]:
        known = sorted((k, t) for k, t in self.seconds.items() if k == 0 or self.is_known(k))
        if not known:
            return [1 + self.GUESSED_SLOPE * k for k in range(self.n + 1)]
        if len(known) == 1:
            ((k, t),) = known
            base = t / (1 + self.GUESSED_SLOPE * k)
            known = [(k, t), (k + 1, t + self.GUESSED_SLOPE * base)]
        seconds = [_on_line(known, k) for k in range(self.n + 1)]
        return list(accumulate(reversed(seconds), min))[::-1]


def _on_line(points: Sequence[tuple[int, float]], x: int) -> float:
    """The value at x of the line through the two points around it, or the two nearest; no less than next to it."""
    i = max(1, min(len(points) - 1, bisect_left(points, (x,))))
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    slope = max((y1 - y0) / (x1 - x0), 0.0)
    return y0 + slope * (x - x0) if x >= x0 else max(y0 - slope * (x0 - x), 0.1 * y0)


class Depth:
    """Chooses the depth of every step, of one generation after another.

    It begins plain, unless times are known from before, drafts one token twice, and from then on takes the best depth by its
    estimates. Known times are forgotten where the first step at a depth does not agree with them.

    Where the best depth is 0, one token is drafted now and then to see whether the text has changed, the less often the fewer
    drafts stand: at a loss of at most ``PROBING`` times the first draft's acceptance of the time, and ``ADVANCE``, ``DOUBT``
    taken from what the drafts gained; never where even drafts that all stand would not pay.

    What two drafts take is a guess until they are tried. Where a pass over two tokens takes much longer than one over one, a
    third token often adds little: so where the best depth is 0 or 1, two are tried if they would pay were the second free.

    Args:
        most (int): The greatest depth.
        seconds (Mapping[int, float], optional): Of a step, by depth, as measured before on this machine.
    """

    FIRST = (0, 0, 0, 0, 1, 1)
    AGREES = 1.25  # a known time with a step that takes up to so many times as long, or as short
    PLAIN = (0, 0, 0)  # what it takes to measure plain decoding anew
    PROBING = 0.02
    ADVANCE = 1.2  # plain steps more: what the first drafts say is not yet the text
    DOUBT = 0.1  # of what a probe's drafts gained: plain decoding is left when it seemed slow, and so seems slower than it is
    MARGIN = 0.03  # that drafting must gain on plain decoding, since the estimates err
    SETTLED = 8  # plain steps, after which the machine is no longer thought to be warming up
    CLEAR = 1.5  # times as fast as plain decoding leaves no doubt
    DEEPER = 2  # than any depth tried is as far as the estimates reach

    def __init__(self, most: int, seconds: Mapping[int, float] | None = None):
        self.most = most
        self.times = StepTimes(most, seconds)
        self.begin()

    def begin(self) -> None:
        """Another text begins: how often its drafts stand is not known, but how long steps take may still hold."""
        self.acceptance = Acceptance(self.most)
        self.elapsed = self.lost = 0.0  # seconds; lost by probing, against plain decoding
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
        acceptance = self.acceptance.estimate
        best = best_depth(acceptance, seconds)
        if best > 0:
            # Whether drafting pays should not hang on how long a plain step took long ago.
            clear = plain * expected_tokens(acceptance)[best] >= self.CLEAR * seconds[best]
            if self.times.is_stale(0) and not (clear and self.times.n_counted.get(0, 0) > 1):
                return [*self.PLAIN, *self._trial(best, seconds)]
            return [min(best, max(self.times.tried) + self.DEEPER)]
        if self.lost < self.PROBING * acceptance[0] * self.elapsed + self.ADVANCE * plain:
            if self.times.n_counted.get(0, 0) > self.SETTLED and (trial := self._trial(best, seconds)):
                return trial
            if best_depth([1.0] * self.most, seconds) > 0:
                return [1]
        return [0]

    def _trial(self, best: int, seconds: Sequence[float]) -> list[int]:
        """Two steps with two drafts, where their time is a guess and they would be best if the second took nothing."""
        if best > 1 or self.most < 2 or self.times.is_known(2):
            return []
        tokens = expected_tokens(self.acceptance.estimate)
        would_pay = tokens[2] / seconds[1] > (1 + self.MARGIN) * tokens[best] / seconds[best]
        return [2, 2] if would_pay else []  # twice: the first step at a depth does not count

    def observe(self, k: int, n_accepted: int, seconds: float | None) -> None:
        """
        Args:
            k (int): The number of drafts of a step.
            n_accepted (int): Those that stood.
            seconds (float, optional): From the end of the step before to the end of this one; ``None`` where that cannot be
              told from the steps beside it.
        """
        if k in self.unconfirmed and self.times.is_warm(k) and seconds is not None:
            self.unconfirmed.remove(k)
            if not 1 / self.AGREES < seconds / self.times.seconds[k] < self.AGREES:
                self._forget_times()  # another context, another state of the machine: what was measured there is no help
        self.times.observe(k, seconds)
        estimate = self.times.estimate
        # A pause, such as one of whoever reads the tokens, is no time of which a part may go to probing, nor lost by a probe.
        seconds = estimate[k] if seconds is None else min(seconds, self.times.PAUSE * estimate[k])
        self.elapsed += seconds
        if k > 0:
            self.acceptance.observe(k, n_accepted)
            yielded = 1 + (1 - self.DOUBT) * n_accepted
            self.lost = max(self.lost + seconds - yielded * estimate[0], 0.0)
