"""Logits processors see what plain decoding would show them; those that keep state, nothing else."""

import functools

import mlx.core as mx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_mtp import mtp_generate_step
from mlx_mtp.sampling.processors import keeps_state
from tests.support.batches import Fault, failing_sampler
from tests.support.decoding import assert_goes_on, plain
from tests.support.models import model_of
from tests.support.profiles import examples
from tests.support.scripted import script_copies
from tests.support.ways import alone_and_beside_others, company_of, every_way, generate

PROMPT = [3, 1, 4, 1, 5]


class Alternating:
    """Even tokens at even calls, odd ones at odd: what it allows depends on how often it was called."""

    def __init__(self, calls=()):
        self.calls = list(calls)

    def __call__(self, tokens, logits):
        self.calls.append(tokens.tolist())
        allowed = mx.arange(logits.shape[-1]) % 2 == len(self.calls) % 2
        return mx.where(allowed, logits, -mx.inf)


class Copied(Alternating):
    def copy(self):
        return Copied(self.calls)


class RolledBack(Alternating):
    def rollback(self, n):
        del self.calls[-n:]


def run(processors, way="alone", model=None, **options):
    return generate(way, PROMPT, model or model_of("qwen3_5"), logits_processors=processors, **options)


@every_way
@examples(5)
@given(
    kind=st.sampled_from([Alternating, Copied, RolledBack]),
    depth=st.integers(0, 6),
    max_tokens=st.integers(1, 30),
    penalty=st.sampled_from([None, 1.4]),
    copies=st.booleans(),
)
@example(kind=RolledBack, depth=4, max_tokens=20, penalty=None, copies=False)
def test_stateful_processor_is_called_once_a_token_in_order(way, kind, depth, max_tokens, penalty, copies):
    processor, others = kind(), make_logits_processors(repetition_penalty=penalty)
    stock = dict(logits_processors=[Alternating(), *others], max_tokens=max_tokens)
    truth = PROMPT + plain(PROMPT, model_of("qwen3_5"), **stock)
    options = dict(num_draft_tokens=depth, max_tokens=max_tokens, text=truth, right=lambda i: i % 4 > 0)
    with pytest.MonkeyPatch.context() as patch:
        if copies:
            script_copies(patch, [truth + [0] * 20, *company_of(model_of("qwen3_5"))], lambda i: i % 4 > 0)
            options["copy_drafts"] = 5
        assert run([processor, *others], way, **options).last.all_tokens == truth
    # Plain decoding and its like are one call ahead.
    assert processor.calls[:max_tokens] == [truth[: len(PROMPT) + n] for n in range(max_tokens)]
    assert len(processor.calls) <= max_tokens + 1


def test_stateful_processor_sees_only_yielded_tokens():
    for n in range(1, 12):
        processor = Copied()
        options = dict(logits_processors=[processor], num_draft_tokens=3)
        steps = mtp_generate_step(mx.array(PROMPT), model_of("qwen3_5"), **options)
        tokens = [next(steps)[0] for _ in range(n)]
        steps.close()
        assert processor.calls == [PROMPT + tokens[:i] for i in range(n)]


def test_stateful_processor_with_rollback_is_asked_about_drafts(trained):
    """A draft of the wrong parity is never accepted."""
    accepted = [
        sum(run([kind()], model=trained[0], max_tokens=24, num_draft_tokens=2).last.counts.accepted)
        for kind in (Copied, RolledBack, Alternating)
    ]
    assert accepted[0] == accepted[1] > accepted[2]


def test_drafts_pass_the_same_processors():
    """A bias that forbids all but two tokens: unbiased drafts would hardly ever stand."""
    bias = make_logits_processors(logit_bias={t: -100.0 for t in range(32) if t not in (7, 9)})
    counts = run(bias, num_draft_tokens=1, max_tokens=100).last.counts
    assert sum(counts.accepted) > 0.3 * sum(counts.drafted)


@alone_and_beside_others
def test_stateful_sampler_is_called_once_a_token(way):
    class Cycling:
        calls = 0

        def __call__(self, logprobs):
            self.calls += 1
            return mx.argsort(logprobs, axis=-1)[..., -1 - self.calls % 3]

    ours, model = Cycling(), model_of("qwen3_5")
    text = generate(way, PROMPT, model, sampler=ours, num_draft_tokens=3, max_tokens=25)
    assert text.tokens == plain(PROMPT, model, sampler=Cycling(), max_tokens=25)
    assert ours.calls <= 26


def test_keeps_state():
    def function(tokens, logits):
        return logits

    assert not keeps_state(function)
    assert not keeps_state(functools.partial(function))
    assert not keeps_state(make_sampler(temp=0.7))
    assert not any(keeps_state(p) for p in make_logits_processors({1: 1.0}, 1.1, 20, 0.1, 20, 0.1))
    assert keeps_state(Alternating())
    assert keeps_state(Alternating().__call__)
    assert keeps_state(functools.partial(Alternating()))


# Those that raise end their own text, and no other

N = 12


def assert_fails_as(way, truth, k, right=lambda i: i % 3 == 0, **options):
    """What is right up to where it fails, and its prompt cache goes on."""
    options |= dict(fails=Fault, text=truth, right=right, num_draft_tokens=k, max_tokens=N)
    text = generate(way, PROMPT, model_of("qwen3_5"), **options)
    assert text.finish_reason == "error"
    assert isinstance(text.last.error, Fault)
    known = truth[: len(PROMPT) + len(text.tokens)]
    assert text.last.all_tokens == known
    assert_goes_on(model_of("qwen3_5"), text.last.prompt_cache, known)
    return text


@functools.cache
def truth_of_plain():
    return PROMPT + plain(PROMPT, model_of("qwen3_5"), max_tokens=N + 10)


@alone_and_beside_others
@pytest.mark.parametrize(("k", "at"), [(0, 5), (1, 2), (2, 1), (3, 9)])
def test_function_that_raises(way, k, at):
    def failing(tokens, logits):
        if len(tokens) >= len(PROMPT) + at:
            raise Fault
        return logits

    assert len(assert_fails_as(way, truth_of_plain(), k, logits_processors=[failing]).tokens) <= at


@alone_and_beside_others
def test_sampler_that_raises(way):
    for n_calls in range(1, N) if way == "alone" else (1, 4, 9):
        text = assert_fails_as(way, truth_of_plain(), 3, sampler=failing_sampler(n_calls))
        assert len(text.tokens) < n_calls
