"""Simulated machines and texts for ``Depth``: what its tests require.

A step takes simulated time, a draft is accepted where the draw of its position in the text is below the acceptance rate there.
So every run with one seed decodes the same text and sees the same noise, whatever it drafts, and runs differ by their depths
alone. What a step takes is counted without noise: only ``Depth`` sees the noise.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from typing import Any

from mlx_mtp.checkpoint.checks import self_test
from mlx_mtp.core.pacing.depth import Rates
from mlx_mtp.core.pacing.step_times import HEAD, Plan, StepTimes

MOST = 8
NOISE, TEST_NOISE = 0.05, 0.03  # of a step's log time, and of the shortest one that the test of the device kept
LONG, MIDDLE, SHORT = 1500, 512, 256  # tokens
COSTS = ((0.05, 0.05), (0.15, 0.05), (0.2, 0.15), (0.4, 0.3), (0.7, 0.7), (1.05, 1.05))

# Published times of passes, relative to one row, by rows from 1: M3 Max and M4 Pro with 4-bit weights (mlx 3863, 3852), M4 Pro
# with 2-bit weights (3852), M3 Ultra with bfloat16 (4265), M5 Max with 70B in 4 bits (3791); numbers between them are read from
# lines, with a step behind 5 rows. In MLX 0.32, ``qmv_wide`` reads the weights again behind 10 rows, and ``qmm``, from 13 rows
# on, once for every 32 rows, as products of matrices in bfloat16 do for 64.
PUBLISHED = (
    (1.0, 1.0, 1.14, 1.28, 1.42, 2.04, 2.27, 2.5, 2.75),
    (1.0, 0.99, 1.13, 1.43, 1.75, 2.25, 2.55, 2.84, 3.1),
    (1.0, 1.3, 1.82, 2.34, 2.86, 3.38, 3.9, 4.42, 4.94),
    (1.0, *[1.99] * 35),
    (1.0, 1.05, 1.11, 1.27, 1.42, 1.9, 2.05, 2.2, 2.4),
)
A_DRAFT = 0.05  # plain steps


def _to_36_rows(few: tuple[float, ...]) -> tuple[float, ...]:
    slope = (few[8] - few[5]) / 3
    again = few[8] + 0.4 + 3 * slope
    return (*few, few[8] + slope, again - slope, *[again] * 21, *[2 * again] * 4)[:36] if len(few) == 9 else few


ROWS = tuple(map(_to_36_rows, PUBLISHED))

# Of the first draft and of each one after it, in plain steps; or the time of a step at each depth from 0, [MOST + 1].
Cost = tuple[float, ...]
STAIRCASES: dict[int, list[Cost]] = {  # by the number of sequences, which multiplies the rows
    B: [tuple(rows[B * (k + 1) - 1] + k * A_DRAFT for k in range(MOST + 1)) for rows in ROWS] for B in (1, 2, 4)
}
Make = Callable[..., Any]  # as Depth: of the greatest depth and known times


@dataclass(frozen=True)
class Text:
    """Draft i at token n is accepted at rate ``first * 0.95**i``, and ``second`` replaces ``first`` half way."""

    first: float
    second: float | None = None
    n_tokens: int = LONG

    def rates(self) -> tuple[list[float], list[float]]:
        second = self.first if self.second is None else self.second
        return [self.first * 0.95**i for i in range(MOST)], [second * 0.95**i for i in range(MOST)]


@dataclass(frozen=True)
class Disturbance:
    """A machine some of whose steps take longer, or seem to."""

    n_slow: int = 0  # the number of first steps that take ``factor`` times as long
    factor: float = 1.0
    pause: int | None = None  # a step
    # The host reads the clock half a plain step late at its multiples: the next step seems shorter.
    late: int | None = None
    busy: int | None = None  # as many steps of every 2 ``busy`` take ``factor`` times as long

    def seconds(self, step: int, t: float) -> float:
        if self.busy is not None:
            return self.factor * t if step // self.busy % 2 else t
        if step == self.pause:
            return t + 9
        if self.late is not None and step % self.late < 2:
            return t + 0.5 if step % self.late == 0 else t - 0.5
        return self.factor * t if step < self.n_slow else t


CALM = Disturbance()


@dataclass(frozen=True)
class Case:
    """A machine, a text, what ``Depth`` knows beforehand, and its least speed to plain and to the best fixed depth."""

    group: str
    cost: Cost
    text: Text
    to_plain: float
    to_best: float = 0.0
    growth: float = 0.0  # of a step, in plain steps, for each token of context
    disturbance: Disturbance = CALM
    known: tuple[tuple[int, float], ...] | None = None  # by depth; None for those of the test of the device
    before: tuple[Cost, Text] | None = None  # the machine and the text before this one
    staircase: int | None = None  # of ``ROWS``, for several sequences
    n_sequences: int = 1


def texts(rates: Sequence[float], n_tokens: int = LONG) -> list[Text]:
    return [Text(a, n_tokens=n_tokens) for a in rates]


def grid(group: str, costs: Sequence[Cost], texts: Sequence[Text], *bounds: float, **more: Any) -> list[Case]:
    return [Case(group, c, text, *bounds, **more) for c, text in product(costs, texts)]


def known(cost: Cost, depths: Sequence[int], speed: float = 1.0) -> tuple[tuple[int, float], ...]:
    return tuple((k, speed * seconds(cost, k)) for k in depths)


def cases() -> Iterator[Case]:
    rates, accepted = (0.0, 0.5, 0.8, 0.95), (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
    neighbors = [*pairwise(COSTS), *pairwise(COSTS[::-1])]
    yield from grid("never slower", COSTS, texts(rates), 0.98, 0.95)
    yield from grid("never slower, short", COSTS, texts(rates, SHORT), 0.98, 0.95)  # mostly beginning
    # As where a pass over two tokens costs 1.7 times one, and over five not much more.
    yield from grid("expensive first draft", [(first, 0.1) for first in (0.7, 0.85, 1.1)], texts(rates), 0.98, 0.93)
    yield from grid("changing text", COSTS, [Text(0.95, 0.1), Text(0.1, 0.95), Text(0.9, 0.5)], 0.98, 0.95)
    for B in (1, 2, 4):
        for i, c in enumerate(STAIRCASES[B]):
            more = {"staircase": i, "n_sequences": B} if B > 1 else {}
            yield from grid(f"staircase, {B} sequences", [c], texts(accepted, MIDDLE), 0.98, 0.97, **more)
    # As of a model that is not tested when it is loaded, such as one of several ranks.
    yield from grid("without times", (*COSTS, *STAIRCASES[1]), texts(rates), 0.97, 0.9, known=())
    # At the end a step takes two and a half times as long.
    yield from grid("growing context", COSTS, [Text(0.8)], 0.98, 0.95, growth=0.001)
    for c, speed in product(COSTS, (0.6, 1.8)):  # of this machine when it was slower or faster
        yield from grid("known times", [c], texts((0.0, 0.8)), 0.98, 0.95, known=known(c, range(5), speed))
    for of, c in neighbors:  # as with another context, where a draft costs half or twice as much
        of_other = known(of, (0, 1, 4))
        yield from grid("known times of another context", [c], texts((0.5, 0.95)), 0.97, 0.93, known=of_other)
    for c, (a, b) in product(COSTS, ((0.95, 0.0), (0.5, 0.5), (0.95, 0.95), (0.0, 0.95))):
        yield from grid("next text", [c], texts([b], SHORT), 0.97, 0.95, before=(c, Text(a, n_tokens=SHORT)))
    for n, (of, c) in product((6, 500), neighbors):
        before = of, Text(0.9, n_tokens=n)
        yield from grid("after another context", [c], texts((0.0, 0.95)), 0.94, 0.8, before=before)
    for step in range(4):
        yield from grid("pause at first", COSTS[2:], [Text(0.5)], 0.98, disturbance=Disturbance(pause=step))
    for group, disturbances in {
        "slow at first": [Disturbance(*slow) for slow in ((2, 3.0), (6, 3.0), (12, 1.6), (40, 3.0))],
        "late clock": [Disturbance(late=late) for late in (7, 20)],
        "busy machine": [Disturbance(busy=busy, factor=1.5) for busy in (10, 60)],  # beside other programs
    }.items():
        for disturbance in disturbances:
            yield from grid(group, COSTS, texts((0.0, 0.5, 0.95)), 0.97, disturbance=disturbance)


def seconds(cost: Cost, k: int) -> float:
    """Of a step with k drafts; a plain step takes 1."""
    if len(cost) > 2:
        return cost[k]
    return 1.0 + (cost[0] + cost[1] * (k - 1) if k else 0.0)


def ratio(case: Case, seeds: Sequence[int], make: Make) -> tuple[float, float]:
    """Auto's speed to plain decoding's and to the best fixed depth's."""
    auto = sum(auto_seconds(case, seed, make) for seed in seeds)
    fixed = [sum(fixed_seconds(case, seed, k) for seed in seeds) for k in range(MOST + 1)]
    return fixed[0] / auto, min(fixed) / auto


def auto_seconds(case: Case, seed: int, make: Make) -> float:
    cost, text = (case.cost, None) if case.before is None else case.before
    errors = random.Random(-seed)

    def tested(seconds: float) -> float:
        return seconds * errors.lognormvariate(0, TEST_NOISE)

    if case.staircase is None:
        known = {k: tested(seconds(cost, k)) for k in range(MOST + 1)} if case.known is None else dict(case.known)
        depth = make(MOST, known)
    else:
        rows, one = ROWS[case.staircase], STAIRCASES[1][case.staircase]
        passes = {n: tested(rows[n - 1]) for n in (1, 8, 9, *self_test.ROWS)}
        of_one, draft_cost = self_test.step_seconds(list(map(tested, one)), passes)
        depth = make(MOST, times=StepTimes(dict(zip(self_test.DRAFT_LENGTHS, of_one)), draft_cost))
    if text is not None:
        decode(Case("before", cost, text, 0), seed + 1000, depth)
    return decode(case, seed, depth.for_text())


def decode(case: Case, seed: int, depth: Any) -> float:
    """Seconds for the tokens of each text, at the depths that ``depth`` chooses, a ``Depth`` or a variant of it."""
    B, (of_each, noise) = case.n_sequences, draws(seed, case.n_sequences)
    n_tokens, growth, disturbed = case.text.n_tokens, case.growth, case.disturbance.seconds
    half, rates = n_tokens / 2, case.text.rates()
    costs = [seconds(case.cost, k) for k in range(MOST + 1)]
    seen_rates = [Rates(MOST) for _ in of_each]

    def next_depth() -> int:
        return depth.next([{HEAD: r.estimate} for r in seen_rates], n_sequences=B).k

    total, step, at, before, k = 0.0, 0, [0] * B, 0, next_depth()
    while sum(at) < n_tokens * B:
        t = costs[k] + growth * at[0]
        accepted = [n_accepted(rates[n >= half], right, n, k) for n, right in zip(at, of_each)]
        seen, mean = disturbed(step, t * noise[step]), sum(accepted) / B
        total += disturbed(step, t)
        # As in the loop: a plain step is over when the next one has begun, and at a change the clock says nothing.
        if k > 0:
            for r, n in zip(seen_rates, accepted):
                r.count_window(k, n)
            depth.observe(Plan(k), mean, seen if before > 0 else None, n_sequences=B)
            after = next_depth()
        else:
            after = next_depth()
            depth.observe(Plan(k), mean, seen if before == after == 0 else None, n_sequences=B)
        step, before, k = step + 1, k, after
        at = [n + a + 1 for n, a in zip(at, accepted)]
    return total * n_tokens * B / sum(at)


def n_accepted(rates: Sequence[float], right: Sequence[float], n: int, k: int) -> int:
    return next((i for i in range(k) if right[n + i] >= rates[i]), k)


@cache
def draws(seed: int, n_sequences: int) -> tuple[list[list[float]], list[float]]:
    """What decides whether a draft is right, by position in each text, and how much longer a step seems to take, by step."""
    n, rngs = LONG + MOST + 1, [random.Random(seed + 10_000 * b) for b in range(n_sequences)]
    right = [[rng.random() for _ in range(n)] for rng in rngs]
    return right, [rngs[0].lognormvariate(0, NOISE) * (5 if rngs[0].random() < 0.01 else 1) for _ in range(n)]


def fixed_seconds(case: Case, seed: int, k: int) -> float:
    """At depth k for the whole text. On a disturbed machine, auto is compared with plain decoding alone."""
    if case.disturbance != CALM:
        return sum(case.disturbance.seconds(i, 1.0) for i in range(case.text.n_tokens)) if k == 0 else float("inf")
    n_steps, positions, n = fixed_steps(case.text, case.n_sequences, seed, k)
    return (n_steps * seconds(case.cost, k) + case.growth * positions) * case.text.n_tokens / n


@cache
def fixed_steps(text: Text, n_sequences: int, seed: int, k: int) -> tuple[int, int, float]:
    """The number of steps, the sum of the positions at which they began, and the mean number of tokens."""
    (of_each, _), rates, half = draws(seed, n_sequences), text.rates(), text.n_tokens / 2
    at, n_steps, positions = [0] * n_sequences, 0, 0
    while sum(at) < text.n_tokens * n_sequences:
        n_steps, positions = n_steps + 1, positions + at[0]
        at = [n + n_accepted(rates[n >= half], right, n, k) + 1 for n, right in zip(at, of_each)]
    return n_steps, positions, sum(at) / n_sequences
