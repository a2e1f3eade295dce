"""One depth for all sequences: the fewest seconds per token, in the mean of the sequences."""

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.core.pacing.depth import Depth, expected_tokens, joint_tokens
from mlx_mtp.core.pacing.step_times import N_LENGTHS, Plan, StepTimes
from tests.support.batches import run
from tests.support.models import tiny_model
from tests.support.scripted import scripted


@given(sequences=st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=8))
def test_joint_tokens_have_the_mean_seconds_per_token_of_the_sequences(sequences):
    means = [sum(1 / n for n in tokens) / len(sequences) for tokens in zip(*map(expected_tokens, sequences))]
    assert [1 / n for n in joint_tokens([{"head": rates} for rates in sequences], 4)] == pytest.approx(means)


def linear(B, k):
    """Every draft of a row costs as much as another token of a plain step's B does beyond the first."""
    return 1 + 0.1 * (B - 1) + 0.1 * B * k


TIMES = {k: linear(1, k) for k in range(9)}  # of one sequence, as after the test of the device


def simulate(sequences, n_steps, seconds=linear, depth=None):
    """The depths of steps with these sequences, where a step of B sequences with k drafts takes ``seconds(B, k)``."""
    asked, B, coins = [], len(sequences), random.Random(0)
    depth = depth or Depth(8, TIMES)
    for _ in range(n_steps):
        asked.append(k := depth.next([{"head": [rate] * 8} for rate in sequences], n_sequences=B).k)
        accepted = []
        for rate in sequences:
            coin = [coins.random() < rate for _ in range(k)]
            accepted.append(coin.index(False) if False in coin else k)
        depth.observe(Plan(k), sum(accepted) / B, seconds(B, k), n_sequences=B)
    return asked


@pytest.mark.parametrize("rate", [0.0, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("B", [1, 2, 4, 8])
def test_takes_the_depth_with_the_most_tokens_per_second(B, rate):
    asked = simulate([rate] * B, 200)[60:]
    tokens = [sum(rate**i for i in range(k + 1)) for k in range(9)]
    gained = sum(tokens[k] for k in asked) / sum(linear(B, k) for k in asked)
    # A smaller gain is left to plain decoding.
    assert gained > 0.93 * max(n / linear(B, k) for k, n in enumerate(tokens))


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


def test_times_are_kept_from_one_batch_to_the_next(equal_steps):
    model, kept = tiny_model("qwen3_5"), []
    model.drafting.times = StepTimes(dict.fromkeys(range(9), 1.0))
    for _ in range(2):
        run(scripted(model, [[1, 2], [3]], [80, 80], lambda uid, i: True, "auto")[0])
        kept.append(dict(model.drafting.times.by_size))
    assert kept[0].keys() == {1, 2}
    assert kept[0] == kept[1]  # the same objects
    measured = {plan.k: t for plan, t in kept[0][2].seconds.items()}
    assert {0, 16} <= measured.keys()  # plain steps are the first, and sixteen copies the best
    assert {*measured.values()} == {1.0}
