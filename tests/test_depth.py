"""The depth: the best by the estimates; the estimates follow; all of it simulated, on simulated time."""

import itertools
import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.decoding.depth import Acceptance, Depth, StepTimes, best_depth, expected_tokens

MOST = 8
rates = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@given(rates, st.data())
def test_the_best_depth_is_that_of_brute_force(acceptance, data):
    n = len(acceptance) + 1
    seconds = data.draw(st.lists(st.floats(0.01, 10), min_size=n, max_size=n))

    def tokens(k):
        """The mean over all patterns of k drafts, each right or wrong."""
        mean = 0.0
        for pattern in itertools.product([True, False], repeat=k):
            weight = 1.0
            for right, a in zip(pattern, acceptance):
                weight *= a if right else 1 - a
            mean += weight * (1 + len(list(itertools.takewhile(bool, pattern))))
        return mean

    by_force = [tokens(k) / t for k, t in enumerate(seconds)]
    assert by_force[best_depth(acceptance, seconds)] >= max(by_force) * (1 - 1e-9)


def test_of_equal_depths_the_lowest():
    assert best_depth([0.0, 0.0], [1.0, 1.0, 1.0]) == 0


def test_expected_tokens():
    assert expected_tokens([0.5, 0.5]) == [1.0, 1.5, 1.75]


def test_acceptance_counts_what_was_judged_and_forgets():
    a = Acceptance(3)
    for _ in range(300):
        a.observe(3, 1)  # the first stands, the second falls, the third is never judged
    first, second, third = a.estimate
    assert first > 0.95
    assert second < 0.1
    assert third < second + 0.01
    for _ in range(100):
        a.observe(3, 3)
    assert min(a.estimate) > 0.9


def test_times_follow_and_ignore_pauses():
    times = StepTimes(4)
    for k in (0, 1, 2):
        for seconds in (5.0, 1 + 0.2 * k, 1 + 0.2 * k):  # the first has compiled something
            times.observe(k, seconds)
    assert times.estimate == pytest.approx([1, 1.2, 1.4, 1.6, 1.8])
    for i in range(100):
        times.observe(2, 100.0 if i % 20 == 0 else 1.4)
    assert times.estimate[2] == pytest.approx(1.4, rel=0.1)
    for _ in range(200):
        times.observe(2, 2.4)  # a longer context: as much longer at every depth
    assert times.estimate[2] == pytest.approx(2.4, rel=0.01)
    assert times.estimate[0] == pytest.approx(1.5, rel=0.1)


class Machine:
    """Simulated text and machine. ``slope``: of one more draft, of a plain step; ``rates(n)``: acceptance after n tokens."""

    def __init__(self, first, slope, rates, seed=0, noise=0.05, growth=0.0):
        self.first, self.slope, self.rates = first, slope, rates
        self.random, self.noise, self.growth = random.Random(seed), noise, growth

    def seconds(self, k, n):
        t = 1.0 + self.growth * n + (self.first + self.slope * (k - 1) if k else 0.0)
        t *= self.random.lognormvariate(0, self.noise)
        return 5 * t if self.random.random() < 0.01 else t

    def accepted(self, k, n):
        stands = (self.random.random() < a for a in self.rates(n)[:k])
        return len(list(itertools.takewhile(bool, stands)))


def time_of(machine: Machine, n_tokens: int, choose) -> float:
    total, n, before, k = 0.0, 0, 0, choose.next()
    while n < n_tokens:
        seconds, accepted = machine.seconds(k, n), machine.accepted(k, n)
        # As in the loop: a plain step is over when the next one has begun, and at a change the clock says nothing.
        if k > 0:
            choose.observe(k, accepted, seconds if before > 0 else None)
            after = choose.next()
        else:
            after = choose.next()
            choose.observe(k, accepted, seconds if before == after == 0 else None)
        before, k = k, after
        total, n = total + seconds, n + accepted + 1
    return total * n_tokens / n


class Fixed:
    def __init__(self, k):
        self.k = k

    def next(self):
        return self.k

    def observe(self, *args):
        pass


@cache
def constant(a, decay=0.95):
    return lambda n: [a * decay**i for i in range(MOST)]


@cache
def halves(a, b, n_tokens):
    return lambda n: constant(a if n < n_tokens / 2 else b)(n)


COSTS = [(0.05, 0.05), (0.15, 0.05), (0.2, 0.15), (0.4, 0.3), (0.7, 0.7), (1.05, 1.05)]


def total(cost, rates, n_tokens, growth, make) -> float:
    """The time over some seeds."""
    seeds = range(12 if n_tokens > 1000 else 72)
    return sum(time_of(Machine(*cost, rates, seed, growth=growth), n_tokens, make()) for seed in seeds)


@cache
def fixed(cost, rates, n_tokens, growth) -> list[float]:
    return [total(cost, rates, n_tokens, growth, lambda k=k: Fixed(k)) for k in range(MOST + 1)]


@cache
def fresh(cost, rates, n_tokens, growth) -> float:
    return total(cost, rates, n_tokens, growth, lambda: Depth(MOST))


def ratio(cost, rates, n_tokens, growth=0.0, make=None) -> tuple[float, float]:
    """Auto's speed to plain decoding's and to the best fixed depth's; ``make``: a Depth that knows something."""
    others = fixed(cost, rates, n_tokens, growth)
    auto = total(cost, rates, n_tokens, growth, make) if make else fresh(cost, rates, n_tokens, growth)
    return others[0] / auto, min(others) / auto


@pytest.mark.parametrize("cost", COSTS, ids=str)
@pytest.mark.parametrize("a", [0.0, 0.5, 0.8, 0.95])
def test_never_slower_than_plain_and_near_the_best_fixed_depth(cost, a):
    to_plain, to_best = ratio(cost, constant(a), 1500)
    assert to_plain >= 0.98
    assert to_best >= 0.95
    # A short text is mostly beginning.
    to_plain, to_best = ratio(cost, constant(a), 256)
    assert to_plain >= 0.97
    assert to_best >= 0.9


@pytest.mark.parametrize("cost", [(0.7, 0.1), (0.85, 0.1), (1.1, 0.1)], ids=str)
@pytest.mark.parametrize("a", [0.0, 0.5, 0.8, 0.95])
def test_a_first_draft_that_costs_far_more_than_the_next(cost, a):
    """As where a pass over two tokens costs 1.7 times one, and over five not much more."""
    to_plain, to_best = ratio(cost, constant(a), 1500)
    assert to_plain >= 0.98
    assert to_best >= 0.93


@pytest.mark.parametrize("cost", COSTS, ids=str)
@pytest.mark.parametrize("a", [(0.95, 0.1), (0.1, 0.95), (0.9, 0.5)])
def test_a_text_that_changes_half_way(cost, a):
    to_plain, to_best = ratio(cost, halves(*a, 1500), 1500)
    assert to_plain >= 0.98
    assert to_best >= 0.95


@pytest.mark.parametrize("cost", COSTS, ids=str)
def test_a_context_that_grows_until_a_step_takes_two_and_a_half_times_as_long(cost):
    to_plain, to_best = ratio(cost, constant(0.8), 1500, growth=0.001)
    assert to_plain >= 0.98
    assert to_best >= 0.95


@pytest.mark.parametrize("cost", COSTS, ids=str)
@pytest.mark.parametrize("speed", [0.6, 1.8])  # of the machine now to that of then
@pytest.mark.parametrize("a", [0.0, 0.8])
def test_times_that_are_known_do_no_harm_whatever_the_speed_is_now(cost, speed, a):
    known = {k: speed * (1 + (cost[0] + cost[1] * (k - 1) if k else 0)) for k in range(5)}
    to_plain, to_best = ratio(cost, constant(a), 1500, make=lambda: Depth(MOST, known))
    assert to_plain >= 0.98
    assert to_best >= 0.95


@pytest.mark.parametrize("of", [COSTS[0], COSTS[-1]], ids=str)
@pytest.mark.parametrize("cost", [COSTS[0], COSTS[3], COSTS[-1]], ids=str)
@pytest.mark.parametrize("a", [0.5, 0.95])
def test_times_of_quite_another_machine_are_unlearned(of, cost, a):
    known = {0: 1.0, 1: 1 + of[0], 4: 1 + of[0] + 3 * of[1]}
    to_plain, to_best = ratio(cost, constant(a), 1500, make=lambda: Depth(MOST, known))
    assert to_plain >= 0.96
    assert to_best >= 0.85


def test_times_that_are_known_hold_while_the_first_steps_agree():
    depth = Depth(MOST, {0: 0.5, 1: 0.6, 2: 0.7})
    assert [depth.next(), depth.next()] == [1, 1]
    for seconds in (5.0, 0.7):  # the first has compiled something
        depth.observe(1, 1, seconds)
    assert depth.times.estimate[0] == pytest.approx(0.5, rel=0.05)
    for seconds in (5.0, 1.4):
        depth.observe(2, 2, seconds)
    assert 0 not in depth.times.seconds
    assert [depth.next() for _ in Depth.FIRST] == list(Depth.FIRST)


def after_a_text(machine: Machine, n_tokens: int) -> Depth:
    depth = Depth(MOST)
    time_of(machine, n_tokens, depth)
    depth.begin()
    return depth


@pytest.mark.parametrize("cost", COSTS, ids=str)
@pytest.mark.parametrize(("a", "a_before"), [(0.0, 0.95), (0.5, 0.5), (0.95, 0.95), (0.95, 0.0)])
def test_the_next_text_begins_with_the_times_of_the_one_before(cost, a, a_before):
    to_plain, to_best = ratio(
        cost, constant(a), 256, make=lambda: after_a_text(Machine(*cost, constant(a_before)), 256)
    )
    assert to_plain >= 0.97
    assert to_best >= 0.92
    _, without = ratio(cost, constant(a), 256)
    assert to_best >= without - 0.01


@pytest.mark.parametrize("n_tokens", [6, 500])
@pytest.mark.parametrize("of", [COSTS[0], COSTS[-1]], ids=str)
@pytest.mark.parametrize("cost", [COSTS[0], COSTS[3], COSTS[-1]], ids=str)
@pytest.mark.parametrize("a", [0.0, 0.95])
def test_times_of_an_earlier_text_on_quite_another_machine_are_forgotten(n_tokens, of, cost, a):
    to_plain, to_best = ratio(cost, constant(a), 1500, make=lambda: after_a_text(Machine(*of, constant(0.9)), n_tokens))
    assert to_plain >= 0.97
    assert to_best >= 0.93


def test_another_text_begins_without_what_was_seen_of_the_one_before():
    depth = after_a_text(Machine(*COSTS[0], constant(0.0)), 500)
    assert depth.acceptance.estimate == Acceptance(MOST).estimate
    assert depth.elapsed == depth.lost == 0


class Disturbed(Machine):
    """Step i, which would take t, takes ``disturbed(i, t)``."""

    def __init__(self, disturbed, *args):
        super().__init__(*args)
        self.disturbed, self.steps = disturbed, itertools.count()

    def seconds(self, k, n):
        return self.disturbed(next(self.steps), super().seconds(k, n))


def disturbed_total(disturbed, cost, a, make) -> float:
    return sum(time_of(Disturbed(disturbed, *cost, constant(a), seed), 1500, make()) for seed in range(12))


@cache
def disturbed_plain(disturbed) -> float:
    return disturbed_total(disturbed, COSTS[0], 0.0, lambda: Fixed(0))  # whatever drafts cost and however they stand


def to_plain_where(disturbed, cost, a) -> float:
    """Auto's speed to plain decoding's."""
    return disturbed_plain(disturbed) / disturbed_total(disturbed, cost, a, lambda: Depth(MOST))


@cache
def paused(step):
    return lambda i, t: t + 9 if i == step else t


@cache
def slow_at_first(n_steps, factor):
    return lambda i, t: factor * t if i < n_steps else t


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("cost", COSTS[2:], ids=str)
def test_a_pause_at_the_beginning_is_not_taken_for_the_speed_of_plain_decoding(cost, step):
    assert to_plain_where(paused(step), cost, 0.5) >= 0.98


@pytest.mark.parametrize(("n_slow", "factor"), [(2, 3.0), (6, 3.0), (12, 1.6), (40, 3.0)])
@pytest.mark.parametrize("cost", COSTS, ids=str)
@pytest.mark.parametrize("a", [0.0, 0.5, 0.95])
def test_a_machine_that_is_slow_at_first(cost, a, n_slow, factor):
    assert to_plain_where(slow_at_first(n_slow, factor), cost, a) >= 0.94


@pytest.mark.parametrize("when", ["between plain steps", "at drafts"])
def test_pauses_of_whoever_reads_the_tokens_change_nothing(when):
    """They are no time that decoding took, of which a part may go to probing, nor time that a probe lost."""

    def n_drafting_steps(pause):
        depth, n = Depth(MOST), 0
        for i in range(2000):
            k = depth.next()
            n += k > 0
            pauses = i % 50 == 49 if when == "between plain steps" else k > 0 and n % 20 == 19
            # One draft in three stands, which does not pay.
            depth.observe(k, int(k > 0 and n % 3 == 0), 1 + 0.6 * k + pause * pauses)
        return n

    assert n_drafting_steps(pause=100.0) == pytest.approx(n_drafting_steps(pause=0.0), rel=0.25)
