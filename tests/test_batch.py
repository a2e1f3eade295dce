"""The server's scheduler, from one sequence to several and back: each token once, every cache right."""

import copy
import math
from collections import Counter
from functools import cache

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors
from scipy.stats import chisquare

from mlx_mtp import make_sampler, mtp_generate_step
from mlx_mtp.server.batch import Failure, Generation, NewToken, Scheduler
from tests.support.decoding import plain
from tests.support.models import tiny_model

STREAM = mx.default_stream(mx.default_device())
model_of = cache(tiny_model)


def scheduler_of(model, **kwargs) -> Scheduler:
    # Prompts are read whenever there are some, whatever the clock says.
    pace = dict(prefill_step_size=8, max_token_gap=math.inf, min_decode_share=0.0)
    options = dict(mtp=True, on_switch=lambda to: None, kv_options={}, stream=STREAM, **pace)
    return Scheduler(model, **{**options, **kwargs})


def sequence_of(
    scheduler, prompt, max_tokens=20, stop=(), processors=(), n_segments=1, depth=3, sampler=greedy_sampler
) -> Generation:
    cut = len(prompt) // n_segments + 1
    segments = [prompt[i : i + cut] for i in range(0, len(prompt), cut)]
    matcher = StopSequences([list(s) for s in stop]).matcher()
    cache = scheduler.make_cache()
    return Generation(segments, max_tokens, sampler, list(processors), matcher, cache, [], num_draft_tokens=depth)


def run(scheduler, arrivals, removals):
    """Add and remove sequences before these steps -> the tokens of each, why each ended, and the caches shown."""
    tokens, ends = {s: [] for group in arrivals.values() for s in group}, {}
    shown = []
    for step in range(10_000):
        for s in arrivals.get(step, ()):
            scheduler.add(s)
        for s in removals.get(step, ()):
            if s not in ends:
                scheduler.remove(s)
                ends[s] = "removed"
        if not len(scheduler):
            if step > max([*arrivals, *removals]):
                break
            continue
        for event in scheduler.next():
            if isinstance(event, NewToken):
                assert event.generation not in ends
                if event.generation.sampler is greedy_sampler:
                    assert event.token == event.logprobs.argmax().item()
                tokens[event.generation].append(event.token)
                if event.finish_reason is not None:
                    ends[event.generation] = event.finish_reason
            elif event.prompt_cache is not None:
                shown.append(event)
    return tokens, ends, shown


def is_cache_of(prompt_cache, tokens, model):
    """What follows these tokens equals what follows them in a cold run, with the head and without it."""
    follow = [7, 3]
    cold = plain([*tokens, *follow], model, max_tokens=4)
    ours = mtp_generate_step(mx.array(follow), model, max_tokens=4, prompt_cache=copy.deepcopy(prompt_cache))
    assert [token for token, *_ in ours] == cold
    assert plain(follow, model, max_tokens=4, prompt_cache=prompt_cache[: len(model.layers)]) == cold


requests = st.lists(
    st.fixed_dictionaries(
        dict(
            prompt=st.lists(st.integers(0, 31), min_size=1, max_size=20),
            max_tokens=st.integers(1, 16),
            arrival=st.integers(0, 24),  # the step before which it arrives
            stay=st.none() | st.integers(1, 20),  # steps after which it is removed
            n_segments=st.integers(1, 3),
            penalty=st.booleans(),
            stop_at=st.none() | st.integers(2, 12),  # where two tokens of its text stop it
            seed=st.none() | st.integers(0, 2**64 - 1),
        )
    ),
    min_size=1,
    max_size=4,
)


def expected(model, request):
    """(how to make its sequence, its text in a single run, why that ends)"""
    sampler = greedy_sampler if request["seed"] is None else make_sampler(1.0, seed=request["seed"])
    processors = (
        make_logits_processors(repetition_penalty=1.3, repetition_context_size=50) if request["penalty"] else []
    )
    text = plain(
        request["prompt"], model, max_tokens=request["max_tokens"], logits_processors=processors, sampler=sampler
    )
    end, stop, stop_at = "length", [], request["stop_at"]
    if stop_at is not None and stop_at <= len(text):
        stop = text[stop_at - 2 : stop_at]
        first = min(i for i in range(2, stop_at + 1) if text[i - 2 : i] == stop)
        text, end = text[:first], "stop"
    how = dict(processors=processors, stop=[stop], n_segments=request["n_segments"], sampler=sampler)
    return how, text, end


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mtp", [True, pytest.param(False, marks=pytest.mark.slow)])
@settings(max_examples=8)
@given(requests=requests, depth=st.integers(0, 8) | st.just("auto"))
def test_each_sequence_equals_its_single_run(family, mtp, requests, depth):
    model = model_of(family)
    scheduler = scheduler_of(model, mtp=mtp)
    arrivals, removals, singles = {}, {}, {}
    for r in requests:
        how, text, end = expected(model, r)
        s = sequence_of(scheduler, r["prompt"], r["max_tokens"], depth=depth, **how)
        arrivals.setdefault(r["arrival"], []).append(s)
        if r["stay"] is not None:
            removals.setdefault(r["arrival"] + r["stay"], []).append(s)
        singles[s] = r["prompt"], text, end
    tokens, ends, shown = run(scheduler, arrivals, removals)
    for s, (prompt, text, end) in singles.items():
        if ends[s] == "removed":
            assert tokens[s] == text[: len(tokens[s])]
        else:
            assert (tokens[s], ends[s]) == (text, end)
        assert s.tokens == (prompt + text)[: len(s.tokens)]
        if s.tokens:
            is_cache_of(s.prompt_cache, s.tokens, model)
    for event in shown:
        prompt, *_ = singles[event.generation]
        assert event.key == prompt[: event.n_tokens]
        is_cache_of(event.prompt_cache, event.key, model)


def test_switches_when_a_second_arrives_and_when_one_is_left():
    model, switches = model_of("qwen3_5"), []
    model.drafting.timing = None  # auto then tries drafts, whatever the clock says
    scheduler = scheduler_of(model, on_switch=switches.append)
    first, second = (sequence_of(scheduler, [i, 5, 2], n) for i, n in ((1, 40), (2, 8)))
    run(scheduler, {0: [first], 10: [second]}, {})
    assert switches == ["batch", "mtp"]
    assert sum(first.counts.drafted) > 0
    assert sum(second.counts.drafted) > 0  # in the batch


@pytest.mark.parametrize("n_tokens", [2, 14])
def test_a_processor_that_raises_leaves_the_other_alone(n_tokens):
    """While both generate, or once the one that fails is alone: the next to come is not hurt either."""
    model = model_of("qwen3_5")
    scheduler = scheduler_of(model)

    def failing(tokens, logits):
        if len(tokens) > 3 + n_tokens:
            raise RuntimeError("no")
        return logits

    failing_one, other = sequence_of(scheduler, [1, 5, 2], 30, processors=[failing]), sequence_of(scheduler, [2, 5], 9)
    scheduler.add(failing_one)
    scheduler.next()
    scheduler.next()
    scheduler.add(other)
    tokens, failures = [], []
    while len(scheduler):
        for event in scheduler.next():
            if isinstance(event, Failure):
                failures.append((event.generation, str(event.error)))
            elif isinstance(event, NewToken) and event.generation is other:
                tokens.append(event.token)
    assert failures == [(failing_one, "no")]
    assert tokens == plain([2, 5], model, max_tokens=9)
    third = sequence_of(scheduler, [7, 1], 5)
    assert run(scheduler, {0: [third]}, {})[0][third] == plain([7, 1], model, max_tokens=5)


def test_seed_gives_one_text_across_switches():
    model, switches = model_of("qwen3_5"), []
    want = plain([1, 5, 2], model, max_tokens=40, sampler=make_sampler(1.0, seed=3))
    assert want != plain([1, 5, 2], model, max_tokens=40, sampler=make_sampler(1.0, seed=4))
    for arrivals in ([], [10], [0, 1], [5, 20]):
        scheduler = scheduler_of(model, on_switch=switches.append)
        first = sequence_of(scheduler, [1, 5, 2], 40, sampler=make_sampler(1.0, seed=3))
        others = {step: [sequence_of(scheduler, [2, step], 6, sampler=make_sampler(1.0))] for step in arrivals}
        tokens, *_ = run(scheduler, {**others, 0: [first, *others.get(0, [])]}, {})
        assert tokens[first] == want
    assert switches == ["batch", "mtp"] * 4


def test_sampled_tokens_keep_their_distribution_across_switches():
    """The second token of a sequence of two is drawn at a switch. Chi-square at 1e-4, fixed seed."""
    V = 4
    model = tiny_model("qwen3_5", vocab_size=V, num_hidden_layers=2)
    logits = model(mx.array([[3, 1]]))[0, -1]
    first = mx.softmax(logits).tolist()
    second = [mx.softmax(model(mx.array([[3, 1, i]]))[0, -1]).tolist() for i in range(V)]
    mx.random.seed(0)
    n, observed = 200, Counter()
    for _ in range(n):
        scheduler = scheduler_of(model)
        s = sequence_of(scheduler, [3, 1], 2, sampler=make_sampler(temp=1.0))
        tokens, *_ = run(scheduler, {0: [s], 2: [sequence_of(scheduler, [2], 1)]}, {})
        observed[tuple(tokens[s])] += 1
    pairs = [(n * first[i] * second[i][j], observed[i, j]) for i in range(V) for j in range(V)]
    rare = [pair for pair in pairs if pair[0] < 5]  # these are merged
    pairs = [pair for pair in pairs if pair[0] >= 5] + [tuple(map(sum, zip(*rare)))] * bool(rare)
    want, got = zip(*pairs)
    assert len(want) > 4
    assert chisquare(got, want, sum_check=False).pvalue > 1e-4
