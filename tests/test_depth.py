"""The best depth by the estimates, the estimates, and both on simulated machines and texts.

Of generations that are open at once on one model, each drafts what was asked of it, and by what it knows of its own text.
"""

import contextlib
import itertools
import math
import random
from functools import cache
from statistics import median

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp import BatchGenerator, DraftCounts, mtp_generate_step
from mlx_mtp.core.decoding import planner
from mlx_mtp.core.pacing.depth import Depth, Rates, best_length, expected_tokens, joint_tokens
from mlx_mtp.core.pacing.step_times import FREE, HEAD, N_LENGTHS, PLAIN_PLAN, Plan, StepTimes
from mlx_mtp.core.sampling.acceptance import n_leading
from tests.support.batches import AT_ONCE, run
from tests.support.decoding import PROMPT, plain
from tests.support.depth_simulation import LONG, MOST, cases, ratio
from tests.support.models import tiny_model
from tests.support.scripted import Scripted, scripted


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.data())
def test_best_length_is_that_of_brute_force(acceptance, data):
    n = len(acceptance) + 1
    seconds = data.draw(st.lists(st.floats(0.01, 10), min_size=n, max_size=n))

    def tokens(k):
        """The mean over all patterns of k drafts, each right or wrong."""
        patterns = [*itertools.product([True, False], repeat=k)]
        weights = [math.prod(a if right else 1 - a for right, a in zip(p, acceptance)) for p in patterns]
        return sum(weight * (1 + n_leading(p)) for weight, p in zip(weights, patterns))

    by_force = [tokens(k) / t for k, t in enumerate(seconds)]
    assert by_force[best_length(expected_tokens(acceptance), seconds)] >= max(by_force) * (1 - 1e-9)
    assert best_length([1.0] * n, [1.0] * n) == 0  # the lowest of equals


def test_rates_forget():
    rates = Rates(3)
    for n_accepted, n in ((1, 300), (3, 100)):
        for _ in range(n):
            rates.count_window(3, n_accepted)
    assert min(rates.estimate) > 0.9


def test_times_follow_and_ignore_pauses():
    times = StepTimes()
    for k in (0, 1, 2):
        for seconds in (5.0, *[1 + 0.2 * k] * 4):  # the first one compiles
            times.observe(Plan(k), seconds)
    assert times.estimate[:3] == pytest.approx([1, 1.2, 1.4])
    for i in range(100):
        times.observe(Plan(2), 100.0 if i % 20 == 0 else 1.4)
    assert times.estimate[2] == pytest.approx(1.4)
    for _ in range(200):
        times.observe(Plan(2), 1.9)  # a longer context: longer at every depth
    assert times.estimate[2] == pytest.approx(1.9, rel=0.01)
    assert times.estimate[0] == pytest.approx(1.25, rel=0.02)
    # A step takes no longer than one with more drafts: this time of one draft includes a pause.
    assert StepTimes({0: 1.0, 1: 5.0, 2: 1.2}).estimate[:3] == pytest.approx([1.0, 1.2, 1.2])


@pytest.mark.parametrize("few", [{}, {0: 0.5}, {1: 0.5, 2: 0.6}])
def test_too_few_known_times_are_those_of_a_typical_machine(few):
    assert StepTimes(few).estimate[:5] == pytest.approx([0.02, 0.024, 0.028, 0.032, 0.036])
    assert not StepTimes(few).knows_plain(gain=9.0)  # it is measured first


KNOWN = {0: 0.5, 1: 0.6, 2: 0.7}


def test_known_times_hold_until_several_steps_contradict_them():
    times = StepTimes(KNOWN)
    for plan, seconds, factor in ((Plan(2), 2.8, 4), (PLAIN_PLAN, 0.5, 1)):  # what seemed long were pauses
        before = times.estimate
        for _ in range(StepTimes.N_ODD - 1):
            times.observe(plan, seconds)
        assert times.estimate == before
        times.observe(plan, seconds)
        assert times.estimate[:3] == pytest.approx([factor * t for t in KNOWN.values()])
        assert times.knows_plain(gain=1.0) is (plan == PLAIN_PLAN)  # otherwise it is measured first
    for _ in range(2 * StepTimes.STALE):
        times.observe(Plan(1), 0.6)
    assert (times.knows_plain(gain=1.4), times.knows_plain(gain=1.5)) == (False, True)


@pytest.mark.parametrize("seconds", [0.3, 3.0])
def test_the_time_of_a_copy_says_nothing_about_other_steps(seconds):
    """It needs no pass of the head, and its time before it is measured is a bound."""
    times = StepTimes(KNOWN)
    times.observe(PLAIN_PLAN, 0.6)
    before = times.estimate
    for _ in range(StepTimes.N_ODD):
        times.observe(Plan(4, FREE), seconds)
    assert times.free[4] == seconds
    assert times.estimate == before


SEEDS = [
    *(pytest.param(case, 4, id=case.group) for case in [*cases()][::38]),
    *(pytest.param(case, 24, id=f"{case.group}, many seeds", marks=pytest.mark.slow) for case in cases()),
]


@pytest.mark.parametrize(("case", "n_seeds"), SEEDS)
def test_speed(case, n_seeds):
    """Auto's, to plain decoding's and to the best fixed depth's. A short text is a sixth of a long one: 3 times the seeds."""
    to_plain, to_best = ratio(case, range(n_seeds if case.text.n_tokens == LONG else 3 * n_seeds), Depth)
    assert to_plain >= case.to_plain
    assert to_best >= case.to_best


@pytest.mark.parametrize("when", ["between plain steps", "at drafts"])
def test_a_slow_reader_changes_nothing(when):
    """Its pauses neither allow more probing nor count as lost by a probe."""

    def n_drafting_steps(pause):
        depth, rates, n = Depth(MOST), Rates(MOST), 0
        for i in range(2000):
            k = depth.next([{"head": rates.estimate}]).k
            n += k > 0
            pauses = i % 50 == 49 if when == "between plain steps" else k > 0 and n % 20 == 19
            # One draft in three is accepted, which does not pay.
            accepted = int(k > 0 and n % 3 == 0)
            rates.count_window(k, accepted)
            depth.observe(Plan(k), accepted, 1 + 0.6 * k + pause * pauses)
        return n

    assert n_drafting_steps(pause=100.0) == pytest.approx(n_drafting_steps(pause=0.0), rel=0.25)


@pytest.mark.parametrize(("gain", "k"), [(1.02, 0), (1.04, 1)])
def test_a_gain_within_the_errors_of_estimates_is_none(gain, k):
    depth = Depth(1, {0: 1.0, 1: 1.5 / gain})
    depth.lost = math.inf  # no more probes
    assert depth.next([{HEAD: [0.5]}]) == Plan(k)


# Of several sequences: the fewest seconds per token, in the mean of the sequences


@given(sequences=st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=8))
def test_joint_tokens_have_the_mean_seconds_per_token_of_the_sequences(sequences):
    means = [sum(1 / n for n in tokens) / len(sequences) for tokens in zip(*map(expected_tokens, sequences))]
    assert [1 / n for n in joint_tokens([{"head": rates} for rates in sequences], 4)] == pytest.approx(means)


def linear(B, k):
    """Every draft of a row costs as much as another token of a plain step's B does beyond the first."""
    return 1 + 0.1 * (B - 1) + 0.1 * B * k


TIMES = {k: linear(1, k) for k in range(9)}  # of one sequence, as after the test of the device


def simulate(sequences, n_steps, seconds=linear, depth=None, n_tokens=0):
    """The depths of steps with these sequences, where a step of B sequences with k drafts takes ``seconds(B, k)``.

    The longest sequence has ``n_tokens``.
    """
    asked, B, coins = [], len(sequences), random.Random(0)
    depth = depth or Depth(8, TIMES)
    for _ in range(n_steps):
        offers = [{"head": [rate] * 8} for rate in sequences]
        asked.append(k := depth.next(offers, n_sequences=B, n_tokens=n_tokens).k)
        accepted = [n_leading([coins.random() < rate for _ in range(k)]) for rate in sequences]
        depth.observe(Plan(k), sum(accepted) / B, seconds(B, k), n_sequences=B, n_tokens=n_tokens)
    return asked


def test_rows_of_different_texts_share_a_depth():
    """Rows of which every draft is right are worth drafts for the batch, but fewer beside one that is never right."""
    right, wrong = 1.0, 0.0
    # Seconds per token, in the mean: (1.3 + 0.4 k) (3 / (k + 1) + 1) / 4, which is least at k = 2.
    usual = [median(simulate(sequences, 100)[60:]) for sequences in ([right] * 4, [right, right, right, wrong])]
    assert usual == [8, 2]
    assert sum(simulate([right, *[wrong] * 7], 100)[60:]) < 10


def test_times_of_a_new_size_are_those_of_the_next_smaller_one_by_rows():
    """And the head drafts for all sequences at once: 0.05 a draft."""
    seconds = lambda B, k: linear(B, k) + 0.05 * k  # noqa: E731
    times = StepTimes({k: seconds(1, k) for k in range(9)}, 0.05)
    for B in (2, 4):
        simulate([0.9] * B, 100, seconds, Depth(8, times=times))
    for B in (3, 5):
        assert times.of_size(B).estimate == pytest.approx([seconds(B, k) for k in range(N_LENGTHS)])


def after(n_tokens):
    """The seconds of a step after so many tokens: attention to them takes as long for each row of a pass."""
    return lambda B, k: linear(B, k) + 3e-4 * n_tokens * B * (k + 1)


@pytest.mark.parametrize("n_tokens", [1500, 5000, 40_000])
@pytest.mark.parametrize("B", [1, 2, 4])
def test_long_texts_begin_with_times_of_their_length(B, n_tokens):
    """They follow from those of short texts and from what a key costs: no step is lost to learn them."""
    times = StepTimes(TIMES, 1e-9, {0: 3e-4, 4: 5 * 3e-4})
    expected = [after(n_tokens)(B, k) for k in range(9)]
    assert times.of_size(B, n_tokens).estimate[:9] == pytest.approx(expected)
    best, depth = best_length(expected_tokens([0.8] * 8), expected), Depth(8, times=times)
    asked = simulate([0.8] * B, 40, after(n_tokens), depth, n_tokens)
    assert asked[:20] == [best] * 20 if best > 0 else max(asked) == 1  # of a probe
    assert min(simulate([0.8] * B, 40, linear, depth)) > best  # in short texts


def test_texts_of_other_lengths_do_not_change_the_times_of_a_length():
    """Also where nothing is known of keys: a plain step is measured first, and what a length takes is learned once."""
    depth = Depth(8, TIMES)
    first = simulate([0.8], 60, after(40_000), depth, 40_000)
    simulate([0.8], 60, linear, depth)
    again = simulate([0.8], 60, after(40_000), depth, 40_000)
    assert (max(first), max(again)) == (6, 1)


def test_the_times_of_a_step_are_those_of_the_longest_text(equal_steps):
    model = tiny_model("qwen3_5")
    run(scripted(model, [[5] * 1000, [3]], [90, 90], lambda uid, i: True, "auto", **AT_ONCE)[0])
    assert {size for size, times in model.pace.times.by_size.items() if times.seconds} == {(2, 0), (2, 1)}


@pytest.mark.parametrize("slower", [1, 3])
@pytest.mark.parametrize(("draft_cost", "B", "best"), [(1e-9, 3, 6), (0.0, 3, 6), (1e-9, 5, 4)])
def test_a_new_size_begins_with_what_is_known(draft_cost, B, best, slower):
    depth = Depth(8, times=StepTimes(TIMES, draft_cost))
    simulate([0.9] * 2, 100, depth=depth)
    asked = simulate([0.9] * B, 40, lambda B, k: slower * linear(B, k), depth)
    n = 1 if slower == 1 else StepTimes.N_ODD
    # A plain step is measured first if as many rows are not tested, and otherwise after a change.
    first = [0] * n if B > 4 or draft_cost == 0 else [best] * n + [0] * (n > 1)
    # What is best does not depend on the speed of the machine.
    assert asked == first + [best] * (40 - len(first))
    # And comes back to a size as it left it.
    assert simulate([0.9] * 2, 1, depth=depth) != [0]


@pytest.mark.parametrize("pause", range(8))
def test_a_pause_in_a_new_size_does_not_make_it_draft(pause):
    """Drafts pay in the batch of two and cost in that of sixteen, where a step at the beginning takes five times as long."""
    depth, steps = Depth(8, TIMES), iter(range(1000))
    simulate([0.9] * 2, 100, lambda B, k: 1 + 0.1 * k, depth)
    asked = simulate([0.9] * 16, 300, lambda B, k: (1 + k) * (5 if next(steps) == pause else 1), depth)
    assert asked[100:].count(0) > 180  # before, it may probe for a share of the seconds of both


def test_times_are_kept_from_one_batch_to_the_next(equal_steps, monkeypatch):
    """The first step, which follows prompts, tells what was accepted, and not how long it took."""
    model, kept, seen, observe = tiny_model("qwen3_5"), [], [], Depth.observe
    model.pace.times = StepTimes(dict.fromkeys(range(9), 1.0))
    monkeypatch.setattr(Depth, "observe", lambda *args, **how: (seen.append(args[1:4]), observe(*args, **how)))
    for _ in range(2):
        seen.clear()
        run(scripted(model, [[1, 2], [3]], [80, 80], lambda uid, i: True, "auto")[0])
        kept.append(dict(model.pace.times.by_size))
    assert kept[0].keys() == {(1, 0), (2, 0)}
    assert kept[0] == kept[1]  # the same objects
    assert seen[0] == (Plan(8), 8, None)
    measured = kept[0][2, 0].seconds
    assert {PLAIN_PLAN, Plan(16, FREE)} <= measured.keys()  # plain steps are the first, and sixteen copies the best
    assert {*measured.values()} == {1.0}


# Several generations at once

N = 40
PROMPTS = (PROMPT, mx.array([7, 7, 2, 9, 1, 1, 0, 4]))
DRAFT_COST = 0.2  # of a draft, in plain steps


@cache
def truths():
    model = tiny_model("qwen3_5")
    return [plain(prompt, model, max_tokens=4 * N) for prompt in PROMPTS]


class Timed:
    """A model whose passes move the clock, and nothing else does."""

    now = 0.0

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, tokens, **kwargs):
        Timed.now += 1 + DRAFT_COST * (tokens.shape[1] - 1)
        return self._model(tokens, **kwargs)


def scripted_text(model, i, is_right=True):
    return Scripted(Timed(model), PROMPTS[i].tolist() + truths()[i], lambda _: is_right)


@pytest.fixture
def start(monkeypatch):
    """Makes generations, timed by ``Timed``, one for each model and its number of drafts, and their counts."""
    monkeypatch.setattr(planner, "perf_counter", lambda: Timed.now)
    with contextlib.ExitStack() as stack:

        def start(models, numbers):
            counts = [DraftCounts() for _ in numbers]
            options = dict(max_tokens=-1, copy_drafts="off")
            steps = [
                mtp_generate_step(prompt, model, num_draft_tokens=k, counts=c, **options)
                for prompt, model, k, c in zip(PROMPTS, models, numbers, counts)
            ]
            return [stack.enter_context(contextlib.closing(s)) for s in steps], counts

        yield start


def in_turn(steps, n, turn=1):
    """n tokens of each, so many at a turn."""
    tokens = [[] for _ in steps]
    for _ in range(n // turn):
        for s, own in zip(steps, tokens):
            own += [token for token, *_ in itertools.islice(s, turn)]
    return tokens


@pytest.mark.parametrize("is_given", [False, True])
def test_auto_goes_by_its_own_text(start, is_given):
    """Also where both were given the same ``Depth``."""
    model, known = tiny_model("qwen3_5"), {k: 1 + DRAFT_COST * k for k in range(9)}
    model.pace.times = StepTimes(known)
    number = Depth(8, known) if is_given else "auto"
    models = [scripted_text(model, 0), scripted_text(model, 1, is_right=False)]
    steps, (right, wrong) = start(models, [number] * 2)
    assert in_turn(steps, 2 * N) == [t[: 2 * N] for t in truths()]
    assert right.tokens_per_step > 4
    assert wrong.drafted[0] <= 10  # of 80 windows: a draft costs a fifth of a plain step here


@pytest.mark.parametrize("turn", [1, 20])
@pytest.mark.parametrize("beside", ["auto", 5, "a batch"])
def test_steps_are_timed_where_no_other_generation_ran_in_between(start, turn, beside):
    model = tiny_model("qwen3_5")
    steps, _ = start([scripted_text(model, 0)], ["auto"])
    in_turn(steps, N)
    if beside == "a batch":
        generator = BatchGenerator(Timed(model), num_draft_tokens=0)
        generator.insert([p.tolist() for p in PROMPTS], max_tokens=[3 * N] * 2)
        other = ((r.token,) for _ in range(3 * N) for r in generator.next_generated()[:1])
    else:
        (_, other), _ = start([None, scripted_text(model, 1)], [0, beside])
    next(other)
    times = model.pace.times
    n_before = sum(times.n_counted.values())
    in_turn([*steps, other], 2 * N, turn)
    assert times.seconds == pytest.approx({plan: 1 + DRAFT_COST * plan.k for plan in times.seconds})
    if turn == 1:  # few are timed, if any
        in_turn(steps, N)
    assert sum(times.n_counted.values()) > n_before + 2


def test_two_that_cannot_be_timed_draft_by_a_guess(start):
    """They take turns from their first token on."""
    model = tiny_model("qwen3_5")
    steps, counts = start([scripted_text(model, i) for i in range(2)], ["auto"] * 2)
    assert in_turn(steps, N) == [t[:N] for t in truths()]
    assert model.pace.times.seconds == {}
    assert min(c.tokens_per_step for c in counts) > 3


@pytest.mark.usefixtures("start")
def test_steps_beside_a_prefill_are_not_timed():
    model = scripted_text(tiny_model("qwen3_5"), 0)
    generator = BatchGenerator(model, num_draft_tokens="auto", copy_drafts="off", prefill_step_size=16, **AT_ONCE)
    generator.insert([PROMPTS[0].tolist()], max_tokens=[1000])
    for _ in range(8):
        generator.next()
    generator.insert([[7] * 200], max_tokens=[1])
    while not generator.prompts[0].is_prefilled:
        generator.next()
    times = model.pace.times
    assert len(generator) == 2
    assert times.seconds == pytest.approx({plan: 1 + DRAFT_COST * plan.k for plan in times.seconds})
