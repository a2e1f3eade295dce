"""Changing over between the head and mlx-lm's batch generator: no token lost, none twice, every cache right."""

import copy
from collections import Counter
from functools import cache

import mlx.core as mx
import pytest
from helpers import plain, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors
from scipy.stats import chisquare

from mlx_mtp import make_sampler, mtp_generate_step
from mlx_mtp.server.batch import Scheduler, Sequence, Token

STREAM = mx.default_stream(mx.default_device())
model_of = cache(tiny_model)


def scheduler_of(model, **kwargs) -> Scheduler:
    options = dict(mtp=True, on_switch=lambda to: None, kv_options={}, stream=STREAM, prefill_step_size=8)
    return Scheduler(model, **{**options, **kwargs})


def sequence_of(scheduler, prompt, max_tokens=20, stop=(), processors=(), n_segments=1, depth=3) -> Sequence:
    cut = len(prompt) // n_segments + 1
    segments = [prompt[i : i + cut] for i in range(0, len(prompt), cut)]
    matcher = StopSequences([list(s) for s in stop]).matcher()
    cache = scheduler.make_cache()
    return Sequence(segments, max_tokens, greedy_sampler, list(processors), matcher, cache, [], num_draft_tokens=depth)


def run(scheduler, arrivals, removals):
    """Sequences that come before a step, and leave before one -> of each its tokens, what ended it, and the caches shown."""
    tokens, ends = {s: [] for group in arrivals.values() for s in group}, {}
    shown = []
    for step in range(10_000):
        for s in arrivals.get(step, ()):
            scheduler.add(s)
        for s in removals.get(step, ()):
            if s not in ends:
                scheduler.remove(s)
                ends[s] = "removed"
        if not len(scheduler) and not scheduler.ready:
            if step > max([*arrivals, *removals]):
                break
            continue
        for event in scheduler.next():
            if isinstance(event, Token):
                assert event.sequence not in ends
                if event.sequence.sampler is greedy_sampler:
                    assert event.token == event.logprobs.argmax().item()
                tokens[event.sequence].append(event.token)
                if event.finish_reason is not None:
                    ends[event.sequence] = event.finish_reason
            elif event.prompt_cache is not None:
                shown.append(event)
    return tokens, ends, shown


def is_the_cache_of(prompt_cache, tokens, model):
    """What follows these tokens is what follows them in a cold run, with the head and without it."""
    follow = [7, 3]
    cold = plain([*tokens, *follow], model, max_tokens=6)
    ours = mtp_generate_step(mx.array(follow), model, max_tokens=6, prompt_cache=copy.deepcopy(prompt_cache))
    assert [token for token, *_ in ours] == cold
    assert plain(follow, model, max_tokens=6, prompt_cache=prompt_cache[: len(model.layers)]) == cold


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 31), min_size=1, max_size=30),  # prompt
        st.integers(1, 25),  # max_tokens
        st.integers(0, 40),  # arrives before this step
        st.none() | st.integers(1, 30),  # leaves after so many more
        st.integers(1, 3),  # segments
        st.booleans(),  # with a penalty
        st.none() | st.integers(2, 20),  # two tokens of the text that stop it
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("mtp", [True, False])
@settings(max_examples=12, deadline=None)
@given(requests=requests, depth=st.integers(0, 8) | st.just("auto"))
def test_whatever_comes_and_goes_each_says_what_it_says_alone(family, mtp, requests, depth):
    model = model_of(family)
    scheduler = scheduler_of(model, mtp=mtp)
    arrivals, removals, expected = {}, {}, {}
    for prompt, max_tokens, arrival, stay, n_segments, penalty, stop_at in requests:
        processors = make_logits_processors(repetition_penalty=1.3, repetition_context_size=50) if penalty else []
        text = plain(prompt, model, max_tokens=max_tokens, logits_processors=processors)
        end, stop = "length", []
        if stop_at is not None and stop_at <= len(text):
            stop = text[stop_at - 2 : stop_at]
            first = min(i for i in range(2, stop_at + 1) if text[i - 2 : i] == stop)
            text, end = text[:first], "stop"
        s = sequence_of(scheduler, prompt, max_tokens, [stop], processors, n_segments, depth)
        arrivals.setdefault(arrival, []).append(s)
        if stay is not None:
            removals.setdefault(arrival + stay, []).append(s)
        expected[s] = prompt, text, end
    tokens, ends, shown = run(scheduler, arrivals, removals)
    for s, (prompt, text, end) in expected.items():
        if ends[s] == "removed":
            assert tokens[s] == text[: len(tokens[s])]
        else:
            assert (tokens[s], ends[s]) == (text, end)
        assert s.tokens == (prompt + text)[: len(s.tokens)]
        if s.tokens:
            is_the_cache_of(s.prompt_cache, s.tokens, model)
    for event in shown:
        prompt, *_ = expected[event.sequence]
        assert event.key == prompt[: event.n_tokens]
        is_the_cache_of(event.prompt_cache, event.key, model)


def test_it_changes_over_when_a_second_comes_and_when_one_is_left():
    model, switches = model_of("qwen3_5"), []
    scheduler = scheduler_of(model, on_switch=switches.append)
    first, second = (sequence_of(scheduler, [i, 5, 2], n) for i, n in ((1, 40), (2, 8)))
    run(scheduler, {0: [first], 10: [second]}, {})
    assert switches == ["batch", "mtp"]
    assert sum(first.counts.drafted) > 0
    assert sum(second.counts.drafted) == 0


def test_sampled_tokens_have_the_distribution_of_plain_decoding_across_the_changes():
    """The second token of a sequence of two is drawn when it changes over. Chi-square at 1e-4, fixed seed."""
    model = tiny_model("qwen3_5", vocab_size=8)
    logits = model(mx.array([[3, 1]]))[0, -1]
    first = mx.softmax(logits).tolist()
    second = [mx.softmax(model(mx.array([[3, 1, i]]))[0, -1]).tolist() for i in range(8)]
    mx.random.seed(0)
    n, seen = 400, Counter()
    for _ in range(n):
        scheduler = scheduler_of(model)
        s, other = sequence_of(scheduler, [3, 1], 2), sequence_of(scheduler, [5], 1)
        s.sampler = make_sampler(temp=1.0)
        tokens, *_ = run(scheduler, {0: [s], 2: [other]}, {})
        seen[tuple(tokens[s])] += 1
    expected = [n * first[i] * second[i][j] for i in range(8) for j in range(8)]
    observed = [seen[i, j] for i in range(8) for j in range(8)]
    # Cells that are rare are taken together.
    rare = [i for i, e in enumerate(expected) if e < 5]
    common = [i for i, e in enumerate(expected) if e >= 5]
    if rare:
        observed = [observed[i] for i in common] + [sum(observed[i] for i in rare)]
        expected = [expected[i] for i in common] + [sum(expected[i] for i in rare)]
    assert chisquare(observed, expected, sum_check=False).pvalue > 1e-4
