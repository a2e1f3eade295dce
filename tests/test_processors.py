"""Logits processors see what plain decoding would show them; those that keep state, nothing else."""

import functools
from itertools import islice

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import categorical_sampling, make_logits_processors
from mlx_lm.sample_utils import make_sampler as stock_sampler
from mlx_lm.server import LogitsProcessorArguments
from scipy.stats import binomtest

from mlx_mtp import make_grammar, make_sampler, mtp_generate_step
from mlx_mtp.core.sampling.processors import keeps_state
from mlx_mtp.server.engine.admission import _allow_no_end, make_budget, make_penalties
from tests.support.batches import Fault, failing_sampler
from tests.support.decoding import assert_goes_on, plain
from tests.support.distribution import LEVEL
from tests.support.models import model_of
from tests.support.scripted import script_copies
from tests.support.ways import company_of, every_way, generate

PROMPT = [3, 1, 4, 1, 5]


class Alternating:
    """Even tokens at even calls, odd ones at odd: what it allows depends on how often it was called."""

    def __init__(self):
        self.calls = []

    def __call__(self, tokens, logits):
        self.calls.append(tokens.tolist())
        allowed = mx.arange(logits.shape[-1]) % 2 == len(self.calls) % 2
        return mx.where(allowed, logits, -mx.inf)


def run(processors, way="alone", model=None, **options):
    return generate(way, PROMPT, model or model_of("qwen3_5"), logits_processors=processors, **options)


@every_way
@pytest.mark.parametrize(("depth", "penalty"), [(0, 1.4), (3, None), ("auto", 1.4)])
def test_stateful_processor_is_called_once_a_token_in_order(way, depth, penalty, monkeypatch):
    """Its text has no drafts, those beside it have theirs."""
    processor, others = Alternating(), make_logits_processors(repetition_penalty=penalty)
    stock = dict(logits_processors=[Alternating(), *others], max_tokens=20)
    truth = PROMPT + plain(PROMPT, model_of("qwen3_5"), **stock)
    script_copies(monkeypatch, [truth + [0] * 20, *company_of(model_of("qwen3_5"))], lambda i: True)
    options = dict(num_draft_tokens=depth, copy_drafts=5, max_tokens=20, text=truth, right=lambda i: i % 4 > 0)
    last = run([processor, *others], way, **options).last
    assert (last.all_tokens, last.counts.n_drafted) == (truth, 0)
    assert processor.calls == [truth[: len(PROMPT) + n] for n in range(20)]


def test_drafts_pass_the_same_processors():
    """A bias that forbids all but two tokens: unbiased drafts would hardly ever stand."""
    bias = make_logits_processors(logit_bias={t: -100.0 for t in range(32) if t not in (7, 9)})
    counts = run(bias, num_draft_tokens=1, max_tokens=100).last.counts
    assert sum(counts.accepted) > 0.3 * sum(counts.drafted)


@every_way
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


def test_keeps_state(demo):
    def function(tokens, logits):
        return logits

    def counting(tokens, logits):
        return logits

    counting.keeps_state = True
    tokenizer = demo[1]
    every = dict(top_p=0.9, min_p=0.1, top_k=5, xtc_probability=0.5)
    samplers = [make(t, **more) for make in (stock_sampler, make_sampler) for t in (0.0, 0.7) for more in ({}, every)]
    samplers += [make_sampler(0.7, acceptance=name) for name in ("rejection", "coupled", "match")]
    for f in (
        *(function, functools.partial(function), functools.lru_cache(function), mx.compile(function)),
        *(mx.argmax, functools.partial(mx.argmax, axis=-1), categorical_sampling),
        *(*samplers, make_sampler(0.7, seed=1).at(0)),
        *make_logits_processors({1: 1.0}, 1.1, 20, 0.1, 20, 0.1, 20),
        make_grammar(tokenizer, regex="a+"),
        make_budget(tokenizer, 3, True, 5),
        functools.partial(_allow_no_end, [1], 5),
    ):
        assert not keeps_state(f), f
    alternating = Alternating()
    for f in (alternating, alternating.__call__, functools.partial(alternating), counting):
        assert keeps_state(f), f


@every_way
def test_sampler_that_raises_ends_its_own_text(way):
    """Behind the tokens that are right, from which its prompt cache goes on. Processors: see ``test_single_run.py``."""
    model = model_of("qwen3_5")
    truth = PROMPT + plain(PROMPT, model, max_tokens=22)
    for n_calls in (1, 4, 9):
        options = dict(sampler=failing_sampler(n_calls), num_draft_tokens=3, max_tokens=12, fails=Fault)
        text = generate(way, PROMPT, model, text=truth, right=lambda i: i % 3 == 0, **options)
        assert text.finish_reason == "error"
        assert isinstance(text.last.error, Fault)
        assert len(text.tokens) < n_calls
        assert text.last.all_tokens == truth[: len(PROMPT) + len(text.tokens)]
        assert_goes_on(model, text.last.prompt_cache, text.last.all_tokens)


def test_a_processor_that_fails_for_a_draft_alone_leaves_the_law():
    """Such a position has no draft: a token in its place would be accepted too often."""
    mx.random.seed(0)
    sizes, n = [], 300

    def process(tokens, logits):  # tokens 0 and 5 are equally likely; raises at the first call for most second drafts
        is_new = tokens.size not in sizes and sizes[-1:] == [tokens.size - 1]
        sizes.append(tokens.size)
        if is_new:
            raise Fault
        tokens = mx.arange(logits.shape[-1])
        return mx.where((tokens == 0) | (tokens == 5), mx.zeros_like(logits), -mx.inf)

    options = dict(sampler=make_sampler(temp=1.0), logits_processors=[process], num_draft_tokens=2, max_tokens=-1)
    steps = mtp_generate_step(mx.array(PROMPT), model_of("qwen3_5"), **options)
    text = [token for token, _, _ in islice(steps, n)]
    assert {*text} == {0, 5}
    assert binomtest(text.count(0), n).pvalue > LEVEL


@pytest.mark.parametrize("size", [None, 4])
def test_openais_penalties_count_the_tokens_of_the_answer(size):
    """All of them, and none of the prompt. With a context size, they are mlx-lm's."""
    prompt, answer = [1, 2, 2], [5, 7, 5, *range(10, 40), 5]
    given = LogitsProcessorArguments(None, 0.0, 20, 0.5, size, 0.25, size)
    logits = mx.zeros((1, 64))
    for process in make_penalties(given, len(prompt)):
        logits = process(mx.array(prompt + answer), logits)
    counted = answer if size is None else (prompt + answer)[-size:]
    want = [-(0.5 * (i in counted) + 0.25 * counted.count(i)) for i in range(64)]
    assert logits[0].tolist() == want
    first = mx.zeros((1, 64))
    for process in make_penalties(given, len(prompt)):
        first = process(mx.array(prompt), first)
    assert bool(mx.any(first)) == (size is not None)
