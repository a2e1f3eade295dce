"""Which drafts are accepted: the tokens have exactly the distribution of plain decoding, whatever the head drafts.

Logits processors see what plain decoding would show them; those that keep state, nothing else.
"""

import functools
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mlx_lm import sample_utils
from mlx_lm.sample_utils import categorical_sampling, make_logits_processors
from mlx_lm.sample_utils import make_sampler as stock_sampler
from mlx_lm.server import LogitsProcessorArguments
from scipy.stats import binomtest

from mlx_mtp import make_grammar, make_sampler, mtp_generate_step
from mlx_mtp.core.sampling.acceptance import Drafted, RejectionSampling, n_leading, residual
from mlx_mtp.core.sampling.processors import keeps_state
from mlx_mtp.core.sampling.sampler import BLOCK, Support, draw
from mlx_mtp.errors import MTPError
from mlx_mtp.server.engine.admission import _allow_no_end, make_budget, make_penalties
from tests.support.batches import Fault, failing_sampler
from tests.support.decoding import assert_goes_on, plain
from tests.support.distribution import CASES, NUCLEUS, PENALTY, SIGMAS, XTC, Case, by_mlx_lm, p_value, sigmas
from tests.support.distribution import LEVEL as JOINT_LEVEL
from tests.support.models import model_of, uncompiled
from tests.support.profiles import LONG, examples
from tests.support.scripted import script_copies
from tests.support.ways import company_of, every_way, generate

LEVEL = 1e-5  # of each chi-square test
N = 1_000_000 if LONG else 50_000  # draws of each case

probabilities = st.lists(st.integers(0, 9), min_size=6, max_size=6).filter(any).map(lambda x: np.array(x) / sum(x))


def log(p) -> mx.array:
    with np.errstate(divide="ignore"):
        return mx.array(np.log(p).astype(np.float32))


def probabilities_of(sampler, logprobs: mx.array, uniforms: mx.array | None = None) -> mx.array:
    """Of all tokens, after filters and temperature, [B, V]."""
    uniforms = mx.zeros((len(logprobs), 1)) if uniforms is None else uniforms
    return sampler.support(logprobs, uniforms).of_all(logprobs.shape[-1])


def assert_drawn_from(p: np.ndarray, tokens: mx.array):
    observed = np.bincount(np.array(tokens), minlength=len(p))
    assert not observed[p == 0].any()
    assert p_value(observed[p > 0], p[p > 0] * observed.sum()) > LEVEL


@examples(60)
@given(p=probabilities, q=probabilities)
def test_accepts_with_probability_p_over_q(p, q):
    drafts, n = np.flatnonzero(q), int(np.count_nonzero(q))
    bound = np.minimum(1.0, p[drafts] / q[drafts])
    logprobs = mx.stack([log(p)] * (n + 1))[None]
    proposals = [(Support(None, mx.array(q)[None]), mx.zeros((1, 1)))] * n
    acceptance = RejectionSampling(make_sampler(temp=1.0))
    texts = [Drafted(acceptance, 0, n)]
    for u, want in ((bound * 0.999, bound > 0), (np.minimum(bound * 1.001, 0.999999), bound == 1)):
        numbers = iter([mx.full((n + 1, 6), 0.5), mx.array([[*u, 0.5]])])  # for the other tokens, for accepting
        with mock.patch.object(mx.random, "uniform", lambda shape, key=None, numbers=numbers: next(numbers)):
            verdict = acceptance.accept(texts, logprobs, mx.array(drafts)[None], proposals)
        assert verdict.accepted.tolist() == [want.tolist()]
        assert mx.array_equal(verdict.tokens[0, :-1] == mx.array(drafts), verdict.accepted[0])


@examples(60)
@given(p=probabilities, q=probabilities)
def test_accepted_and_residual_add_up_to_p(p, q):
    rest = np.array(residual(mx.array(p), mx.array(q)), np.float64)
    emitted = np.minimum(p, q)
    if np.abs(p - q).max() > 1e-6:
        emitted = emitted + (1 - emitted.sum()) * rest / rest.sum()
    else:
        assert np.allclose(rest, p)  # where none is left
    assert np.allclose(emitted, p, atol=1e-6)


def test_closed_forms():
    for accepted in itertools.product([False, True], repeat=6):
        assert n_leading(list(accepted)) == len(list(itertools.takewhile(bool, accepted)))
    assert make_sampler() is sample_utils.greedy_sampler
    for options in (dict(min_p=1.1), dict(xtc_probability=-0.1), dict(xtc_probability=0.5, xtc_threshold=0.6)):
        with pytest.raises(ValueError, match="must be a number from 0 to"):
            make_sampler(temp=1.0, **options)
    for top_k in (8, 9, 2.5):  # as in mlx-lm
        with pytest.raises(ValueError, match=f"top_k must be an integer below the vocabulary's size of 8, not {top_k}"):
            make_sampler(temp=1.0, top_k=top_k)(log(TARGET)[None])
    mx.eval(mx.random.uniform())


# The CPU backend compiles kernels for each number, so all tests share them: min_p, xtc_threshold 0.1; top_p 0.9; temp as here.
SAMPLERS = [
    dict(temp=1.5),
    dict(temp=1.0, top_k=3),
    dict(temp=1.5, top_n_sigma=1.0),
    dict(temp=1.0, top_p=0.9),
    dict(temp=1.0, min_p=0.1, min_tokens_to_keep=7),
    dict(temp=1.0, xtc_probability=0.5, xtc_threshold=0.1, xtc_special_tokens=[1, 2]),
    dict(temp=0.7, top_p=0.9, top_k=5, min_p=0.1, xtc_probability=0.5, xtc_threshold=0.1),
]
TARGET = np.array([0.4, 0.2, 0.15, 0.1, 0.08, 0.045, 0.015, 0.01])
HEADS = dict(
    good=np.array([0.38, 0.22, 0.14, 0.12, 0.06, 0.05, 0.02, 0.01]),
    bad=TARGET[::-1],
    sure_of_what_is_unlikely=np.array([0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.993, 0.001]),
)


SETTINGS = st.fixed_dictionaries(
    {
        "temp": st.sampled_from([0.3, 1.0, 1.5]), "top_p": st.sampled_from([0.0, 0.3, 0.8, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.4, 1.0]), "min_tokens_to_keep": st.sampled_from([1, 3]),
        "top_k": st.sampled_from([0, 1, 3, 5]), "top_n_sigma": st.sampled_from([0.0, 0.1, 1.0, 2.5]),
        "xtc_probability": st.sampled_from([0.0, 1.0]),
        "xtc_threshold": st.sampled_from([0.05, 0.2]), "xtc_special_tokens": st.sampled_from([[], [1, 3]]),
    }
)  # fmt: skip


def is_near_the_cut(logprobs: mx.array, top_p: float) -> bool:
    """Whether the rounding of a sum decides on a token: its mass above is that of top-p, up to some roundings of float32."""
    p = -np.sort(-np.exp(np.array(logprobs.astype(mx.float32), np.float64)), axis=-1)
    p /= p.sum(axis=-1, keepdims=True)
    return bool((np.abs(np.cumsum(p, axis=-1) - p - top_p) < 1e-5).any())


@examples(150)
@given(
    options=SETTINGS,
    size=st.sampled_from([6, 9, 64, 320, 1280, 4160]),
    spread=st.sampled_from([1, 3, 8]),
    step=st.sampled_from([0.0, 0.5, 2.0]),
    n_allowed=st.sampled_from([1, 2, 4, None]),
    dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
    seed=st.integers(0, 2**32 - 1),
)
@uncompiled()
def test_filters_are_mlx_lms(options, size, spread, step, n_allowed, dtype, seed):
    """Also where logits are equal, a grammar allows few tokens, or top-k is taken before top-p and min-p, in blocks of rows."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, size)) * spread
    x = np.round(x / step) * step if step else x
    if n_allowed is not None:
        x[:, rng.permutation(size)[n_allowed:]] = -np.inf
    x = mx.array(x.astype(np.float32)).astype(dtype)
    x = x - mx.logsumexp(x, axis=-1, keepdims=True)
    n = options["top_n_sigma"]
    below = sigmas(x)
    assume(not (np.abs(below - n) < 1e-4).any())
    assume(not is_near_the_cut(mx.where(mx.array(below > n), -mx.inf, x) if n else x, options["top_p"]))
    got, want = probabilities_of(make_sampler(**options), x), by_mlx_lm(x, **options)
    assert not mx.any(((got > 0) != (want > 0)) & (mx.maximum(got, want) > 1e-30))  # float32 ends below
    assert mx.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("temp", [1e-300, 1e-39, 1e-6, 1e6, 1e39, 1e300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}], ids=str)
def test_a_temperature_of_any_size_gives_a_distribution(temp, filters):
    """The likeliest tokens as temperatures go to 0, all that remain alike as they grow, and never an excluded one."""
    x = mx.log(mx.array([[0.4, 0.0, 0.4, 0.15, 0.05]]))[:, mx.arange(320) % 5] - math.log(64)
    x = mx.where(mx.arange(320) < 5, x, -mx.inf)
    p = np.array(probabilities_of(make_sampler(temp=temp, **filters), x))[0]
    kept = np.flatnonzero(p)
    assert kept.tolist() == ([0, 2] if temp < 1 else [0, 2, 3] if "top_p" in filters else [0, 2, 3, 4])
    assert np.allclose(p[kept], 1 / len(kept), atol=1e-5)


def test_tokens_of_blocks_are_drawn_with_their_probabilities():
    """Of many tokens first a block is drawn, then a token in it: also a rare one, and never one with probability 0."""
    p, n = np.zeros(BLOCK**2 * 2), 20_000
    p[[0, 1, BLOCK - 1, BLOCK, 3000, len(p) - 1]] = TARGET[:6]
    p[5 * BLOCK : 6 * BLOCK] = 1e-3
    mx.random.seed(1)
    tokens = mx.concatenate([draw(mx.repeat(mx.array(p, mx.float32)[None], 500, axis=0)) for _ in range(n // 500)])
    assert_drawn_from(p / p.sum(), tokens)


def test_threads_draw_other_numbers_unless_one_is_seeded_there():
    """MLX's random state belongs to a thread, and is the same in all new ones. A trace takes it as it is."""
    sampler = make_sampler(temp=1.0, xtc_probability=0.5)

    def draw(seed, compile=lambda f, **_: f):
        if seed is not None:
            mx.random.seed(seed)
        state, step = mx.random.state[0].tolist(), compile(sampler, inputs=mx.random.state, outputs=mx.random.state)
        text = [step(mx.zeros((1, 50))).item() for _ in range(20)]
        return str(text), mx.random.state[0].tolist() == state

    mx.random.seed(1)
    texts, are_kept = [], []
    for args in ((None,), (None,), (None,), (2,), (1,), (1,), (1, mx.compile), (1, mx.compile)):
        with ThreadPoolExecutor(1) as thread:
            text, is_kept = thread.submit(draw, *args).result()
        texts.append(text)
        are_kept.append(is_kept)
    assert len({*texts[:5]}) == 5
    assert (texts[4], texts[6]) == (texts[5], texts[7])
    assert are_kept == [True] * 3 + [False] * 5


@pytest.mark.parametrize("options", SAMPLERS, ids=str)
def test_sampler_and_drafts_draw_from_mlx_lms_distribution(options):
    """Draft, accept and replace, then the next token: the target's distribution, and as many drafts accepted as possible.

    Of texts that are accepted together, some with a draft of the head, some with a copy, some without.
    """
    want = np.array(by_mlx_lm(log(TARGET)[None], **options)[0], np.float64)
    mx.random.seed(1)
    sampler = make_sampler(**options)
    logprobs = mx.repeat(log(TARGET)[None], 2 * N, axis=0).reshape(N, 2, -1)
    assert_drawn_from(want, sampler(logprobs[:, 0]))
    acceptance, third = RejectionSampling(sampler), N // 3
    texts = [Drafted(acceptance, 0)] * third + [Drafted(acceptance, 0, are_copies=True)] * third
    texts += [Drafted(acceptance, 0, n=0)] * (N - 2 * third)
    copies = mx.arange(N, dtype=mx.uint32) % len(TARGET)
    for head in HEADS.values():
        drafts, proposal = acceptance.draft(texts, mx.repeat(log(head)[None] + 100, N, axis=0))  # not normalized
        drafts = mx.where(mx.arange(N) < third, drafts, copies)
        verdict = acceptance.accept(texts, logprobs, drafts[:, None], [proposal])
        for part in (slice(third), slice(third, 2 * third), slice(2 * third, N)):
            assert_drawn_from(want, verdict.tokens[part, 0])
            if part.stop <= 2 * third:
                assert_drawn_from(want, verdict.tokens[part, 1])
        p, q = (probabilities_of(sampler, mx.repeat(log(p)[None], N, axis=0), proposal[1]) for p in (TARGET, head))
        most = np.array(mx.minimum(p, q).sum(axis=-1))[:third].mean(dtype=np.float64)
        assert abs(np.array(verdict.accepted[:third]).mean() - most) < 5 * math.sqrt(0.25 / third)


# Through the loop

# Copies, and the head behind a rejected one; and a caller's own sampler, of texts alone. Coupled drafts are those of a single
# run, see test_seeds.py.
BRIEF = [
    Case(2, NUCLEUS | XTC, copies=3, penalties=PENALTY),
    Case(2, NUCLEUS | SIGMAS, "right", acceptance="match", copies=3, n_rows=1),
]


@pytest.mark.parametrize("case", CASES if LONG else BRIEF, ids=str)
def test_joint_distribution_of_the_first_tokens(case):
    assert case.p_value(runs=5000 if LONG else 60) > JOINT_LEVEL


# Processors

PROMPT = [3, 1, 4, 1, 5]


class Alternating:
    """Even tokens at even calls, odd ones at odd: what it allows depends on how often it was called."""

    def __init__(self):
        self.calls = []

    def __call__(self, tokens, logits):
        self.calls.append(tokens.tolist())
        allowed = mx.arange(logits.shape[-1]) % 2 == len(self.calls) % 2
        return mx.where(allowed, logits, -mx.inf)


@every_way
@pytest.mark.parametrize(("depth", "penalty"), [(0, 1.4), (3, None), ("auto", 1.4)])
def test_stateful_processor_is_called_once_a_token_in_order(way, depth, penalty, monkeypatch):
    """Its text has no drafts, those beside it have theirs."""
    processor, others = Alternating(), make_logits_processors(repetition_penalty=penalty)
    stock = dict(logits_processors=[Alternating(), *others], max_tokens=20)
    truth = PROMPT + plain(PROMPT, model_of("qwen3_5"), **stock)
    script_copies(monkeypatch, [truth + [0] * 20, *company_of(model_of("qwen3_5"))], lambda i: True)
    options = dict(num_draft_tokens=depth, copy_drafts=5, max_tokens=20, text=truth, right=lambda i: i % 4 > 0)
    last = generate(way, PROMPT, model_of("qwen3_5"), logits_processors=[processor, *others], **options).last
    assert (last.all_tokens, last.counts.n_drafted) == (truth, 0)
    assert processor.calls == [truth[: len(PROMPT) + n] for n in range(20)]


def test_drafts_pass_the_same_processors():
    """A bias that forbids all but two tokens: unbiased drafts would hardly ever stand."""
    bias = make_logits_processors(logit_bias={t: -100.0 for t in range(32) if t not in (7, 9)})
    options = dict(logits_processors=bias, num_draft_tokens=1, max_tokens=100)
    counts = generate("alone", PROMPT, model_of("qwen3_5"), **options).last.counts
    assert sum(counts.accepted) > 0.3 * sum(counts.drafted)


class Cycling:
    calls = 0

    def __call__(self, logprobs):
        assert logprobs.shape == (1, 32)
        self.calls += 1
        return mx.argsort(logprobs, axis=-1)[..., -1 - self.calls % 3]


def second_best(logprobs):
    assert logprobs.shape == (1, 32)
    return mx.argsort(logprobs, axis=-1)[..., -2]


@every_way
@pytest.mark.parametrize("make", [Cycling, lambda: second_best], ids=["object", "function"])
def test_a_sampler_is_called_as_in_mlx_lm(way, make):
    """With one row; one that may keep state once a token."""
    ours, model = make(), model_of("qwen3_5")
    text = generate(way, PROMPT, model, sampler=ours, num_draft_tokens=3, max_tokens=25)
    assert text.tokens == plain(PROMPT, model, sampler=make(), max_tokens=25)
    assert getattr(ours, "calls", 0) <= 26


def test_keeps_state(demo):
    function, counting, tokenizer = lambda tokens, logits: logits, SimpleNamespace(keeps_state=True), demo[1]
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


@every_way
@pytest.mark.parametrize("width", [7, 41])
def test_logits_of_another_shape_end_their_own_text(way, width):
    """Those of a draft come first, and the drafts of a source are those of the model's tokens."""

    def process(tokens, logits):
        return mx.zeros((1, width)) if tokens.size >= len(PROMPT) + 2 else logits

    options = dict(logits_processors=[process], num_draft_tokens=3, copy_drafts=8, max_tokens=12)
    for sampler in (None, make_sampler(1.0)):
        text = generate(way, PROMPT, model_of("qwen3_5"), fails=MTPError, sampler=sampler, **options)
        assert (text.finish_reason, len(text.tokens)) == ("error", 2)
        assert str(text.last.error) == f"A logits processor returned an array of the shape (1, {width}), not (1, 32)."


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
    text = [token for token, _, _ in itertools.islice(steps, n)]
    assert {*text} == {0, 5}
    assert binomtest(text.count(0), n).pvalue > JOINT_LEVEL


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
