"""Generations open at once on one model: each drafts what was asked of it, and by what it knows of its own text."""

from functools import cache

import mlx.core as mx
import pytest

from mlx_mtp import BatchGenerator, Depth, DraftCounts, mtp_generate_step
from mlx_mtp.core.decoding import planner
from mlx_mtp.core.layers.drafting import Settings
from tests.support.batches import AT_ONCE
from tests.support.decoding import PROMPT, plain
from tests.support.models import tiny_model
from tests.support.scripted import Scripted

N = 40
PROMPTS = (PROMPT, mx.array([7, 7, 2, 9, 1, 1, 0, 4]))
COST = 0.2  # of a draft, in plain steps


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
        Timed.now += 1 + COST * (tokens.shape[1] - 1)
        return self._model(tokens, **kwargs)


def scripted(model, i, is_right=True):
    return Scripted(Timed(model), PROMPTS[i].tolist() + truths()[i], lambda _: is_right)


@pytest.fixture
def timed(monkeypatch):
    monkeypatch.setattr(planner, "perf_counter", lambda: Timed.now)


def start(models, numbers, **options):
    """Generations, one for each model and its number of drafts, and their counts."""
    counts = [DraftCounts() for _ in numbers]
    steps = [
        mtp_generate_step(prompt, model, max_tokens=-1, num_draft_tokens=k, counts=c, **options)
        for prompt, model, k, c in zip(PROMPTS, models, numbers, counts)
    ]
    return steps, counts


def take(steps, n):
    return [next(steps)[0] for _ in range(n)]


def in_turn(steps, n, turn=1):
    """n tokens of each, so many at a turn."""
    tokens = [[] for _ in steps]
    for _ in range(n // turn):
        for s, t in zip(steps, tokens):
            t += take(s, turn)
    return tokens


def close(steps):
    for s in steps:
        s.close()


@pytest.mark.parametrize("is_given", [False, True])
def test_auto_goes_by_its_own_text(timed, is_given):
    """Also where both were given the same ``Depth``."""
    model, known = tiny_model("qwen3_5"), {k: 1 + COST * k for k in range(9)}
    model.drafting.tuned = Settings(seconds=known)
    number = Depth(8, known) if is_given else "auto"
    models = [scripted(model, 0), scripted(model, 1, is_right=False)]
    steps, (right, wrong) = start(models, [number] * 2, copy_drafts="off")
    assert in_turn(steps, 2 * N) == [t[: 2 * N] for t in truths()]
    close(steps)
    assert right.tokens_per_step > 4
    assert wrong.drafted[0] <= 10  # of 80 windows: a draft costs a fifth of a plain step here


@pytest.mark.parametrize("turn", [1, 20])
@pytest.mark.parametrize("beside", ["auto", 5, "a batch"])
def test_steps_are_timed_where_no_other_generation_ran_in_between(timed, turn, beside):
    model = tiny_model("qwen3_5")
    (steps, *_), _ = start([scripted(model, 0)], ["auto"], copy_drafts="off")
    take(steps, N)
    if beside == "a batch":
        generator = BatchGenerator(Timed(model), num_draft_tokens=0)
        generator.insert([p.tolist() for p in PROMPTS], max_tokens=[3 * N] * 2)
        other = ((r.token,) for _ in range(3 * N) for r in generator.next_generated()[:1])
    else:
        (_, other), _ = start([None, scripted(model, 1)], [0, beside], copy_drafts="off")
    next(other)
    times = model.drafting.times
    n_before = sum(times.n_counted.values())
    in_turn([steps, other], 2 * N, turn)
    assert times.seconds == pytest.approx({plan: 1 + COST * plan.k for plan in times.seconds})
    if turn == 1:  # few are timed, if any
        take(steps, N)
    assert sum(times.n_counted.values()) > n_before + 2
    close([steps, other])


def test_two_that_cannot_be_timed_draft_by_a_guess(timed):
    """They take turns from their first token on."""
    model = tiny_model("qwen3_5")
    steps, counts = start([scripted(model, i) for i in range(2)], ["auto"] * 2, copy_drafts="off")
    assert in_turn(steps, N) == [t[:N] for t in truths()]
    close(steps)
    assert model.drafting.times.seconds == {}
    assert min(c.tokens_per_step for c in counts) > 3


def test_steps_beside_a_prefill_are_not_timed(timed):
    model = scripted(tiny_model("qwen3_5"), 0)
    generator = BatchGenerator(model, num_draft_tokens="auto", copy_drafts="off", prefill_step_size=16, **AT_ONCE)
    generator.insert([PROMPTS[0].tolist()], max_tokens=[1000])
    for _ in range(8):
        generator.next()
    generator.insert([[7] * 200], max_tokens=[1])
    while not generator.prompts[0].is_prefilled:
        generator.next()
    times = model.drafting.times
    assert len(generator) == 2
    assert times.seconds == pytest.approx({plan: 1 + COST * plan.k for plan in times.seconds})
