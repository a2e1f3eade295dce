"""Logits processors see what plain decoding would show them; those that keep state, nothing else."""

import functools

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_mtp import mtp_generate_step
from mlx_mtp.decoding.counts import DraftCounts
from mlx_mtp.decoding.processors import keeps_state
from tests.support.decoding import plain
from tests.support.models import DATA, load_reference, tiny_model

PROMPT = [3, 1, 4, 1, 5]
model_of = functools.cache(tiny_model)


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


def run(processors, model=None, **options):
    counts, model = DraftCounts(), model or model_of("qwen3_5")
    steps = mtp_generate_step(mx.array(PROMPT), model, logits_processors=processors, counts=counts, **options)
    return [token for token, _, _ in steps], counts


@settings(max_examples=20)
@given(
    kind=st.sampled_from([Alternating, Copied, RolledBack]),
    depth=st.integers(0, 6),
    max_tokens=st.integers(1, 30),
    penalty=st.sampled_from([None, 1.4]),
)
def test_stateful_processor_is_called_once_a_token_in_order(kind, depth, max_tokens, penalty):
    processor, stock = kind(), Alternating()
    others = make_logits_processors(repetition_penalty=penalty)
    tokens, _ = run([processor, *others], num_draft_tokens=depth, max_tokens=max_tokens)
    assert tokens == plain(PROMPT, model_of("qwen3_5"), logits_processors=[stock, *others], max_tokens=max_tokens)
    # Plain decoding and its like are one call ahead.
    histories = [PROMPT + tokens[:n] for n in range(max_tokens)]
    assert processor.calls[:max_tokens] == histories
    assert len(processor.calls) <= max_tokens + 1


@pytest.mark.parametrize("n", range(1, 12))
def test_stateful_processor_sees_only_yielded_tokens(n):
    processor = Copied()
    steps = mtp_generate_step(mx.array(PROMPT), model_of("qwen3_5"), logits_processors=[processor], num_draft_tokens=3)
    tokens = [next(steps)[0] for _ in range(n)]
    steps.close()
    assert processor.calls == [PROMPT + tokens[:i] for i in range(n)]


def test_stateful_processor_with_rollback_is_asked_about_drafts():
    """A draft of the wrong parity is never accepted."""
    model = load_reference(DATA / "dense")
    accepted = [
        sum(run([kind()], model, max_tokens=60, num_draft_tokens=2)[1].accepted)
        for kind in (Copied, RolledBack, Alternating)
    ]
    assert accepted[0] == accepted[1] > accepted[2]


def test_drafts_pass_the_same_processors():
    """A bias that forbids all but two tokens: unbiased drafts would hardly ever stand."""
    bias = make_logits_processors(logit_bias={t: -100.0 for t in range(32) if t not in (7, 9)})
    _, counts = run(bias, num_draft_tokens=1, max_tokens=100)
    assert sum(counts.accepted) > 0.3 * sum(counts.drafted)


def test_stateful_sampler_is_called_once_a_token():
    class Cycling:
        calls = 0

        def __call__(self, logprobs):
            self.calls += 1
            return mx.argsort(logprobs, axis=-1)[..., -1 - self.calls % 3]

    ours = Cycling()
    steps = mtp_generate_step(mx.array(PROMPT), model_of("qwen3_5"), sampler=ours, max_tokens=25, num_draft_tokens=3)
    assert [token for token, _, _ in steps] == plain(PROMPT, model_of("qwen3_5"), sampler=Cycling(), max_tokens=25)
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
