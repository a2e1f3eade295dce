"""Which drafts are accepted: the tokens have exactly the distribution of plain decoding, whatever the head drafts."""

import itertools
import math
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mlx_lm import sample_utils

import mlx_mtp
from mlx_mtp.core.sampling.acceptance import Drafted, Proposal, RejectionSampling, n_leading, residual
from mlx_mtp.core.sampling.sampler import BLOCK, Support, draw, largest
from tests.support.distribution import CASES, Case, p_value
from tests.support.distribution import LEVEL as JOINT_LEVEL
from tests.support.models import uncompiled
from tests.support.profiles import LONG, examples

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
    logprobs, proposals = (
        mx.stack([log(p)] * (n + 1))[None],
        [Proposal(Support(None, mx.array(q)[None]), mx.zeros((1, 1)))] * n,
    )
    acceptance = RejectionSampling(mlx_mtp.make_sampler(temp=1.0))
    texts = [Drafted(acceptance, 0, n)]
    for u, want in ((bound * 0.999, bound > 0), (np.minimum(bound * 1.001, 0.999999), bound == 1)):
        numbers = iter([mx.full((n + 1, 6), 0.5), mx.array([[*u, 0.5]])])  # for the other tokens, for accepting
        with mock.patch.object(mx.random, "uniform", lambda shape, numbers=numbers: next(numbers)):
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
    assert mlx_mtp.make_sampler() is sample_utils.greedy_sampler
    for options in (dict(min_p=1.1), dict(xtc_probability=-0.1), dict(xtc_probability=0.5, xtc_threshold=0.6)):
        with pytest.raises(ValueError, match="must be from 0 to"):
            mlx_mtp.make_sampler(temp=1.0, **options)
    mx.eval(mx.random.uniform())


# The CPU backend compiles kernels for each number, so all tests share them: min_p, xtc_threshold 0.1; top_p 0.9; temp as here.
SAMPLERS = [
    dict(temp=1.5),
    dict(temp=1.0, top_k=3),
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


def by_mlx_lm(monkeypatch, p: np.ndarray, **options) -> np.ndarray:
    """What mlx-lm's sampler of these options samples from: the mean over XTC's uniform number."""
    monkeypatch.setattr(sample_utils, "categorical_sampling", lambda x, temp: mx.softmax(x * (1 / temp), axis=-1))
    chance = options.pop("xtc_probability", 0.0)
    mean = 0.0
    for xtc, weight in ((0.0, 1 - chance), (1.0, chance)):
        sampler = sample_utils.make_sampler(**options, xtc_probability=xtc)
        mean += weight * np.array(sampler(log(p)[None])[0], np.float64)
    return mean / mean.sum()


SETTINGS = st.fixed_dictionaries(
    {
        "temp": st.sampled_from([0.3, 1.0, 1.5]), "top_p": st.sampled_from([0.0, 0.3, 0.8, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.4, 1.0]), "min_tokens_to_keep": st.sampled_from([1, 3]),
        "top_k": st.sampled_from([0, 1, 3, 5]), "xtc_probability": st.sampled_from([0.0, 1.0]),
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
    assume(not is_near_the_cut(x, options["top_p"]))
    softmax = lambda x, temp: mx.softmax(x.astype(mx.float32) * (1 / temp), axis=-1)  # noqa: E731
    with mock.patch.object(sample_utils, "categorical_sampling", softmax):
        want = sample_utils.make_sampler(**options)(x)
    got = probabilities_of(mlx_mtp.make_sampler(**options), x)
    assert not mx.any(((got > 0) != (want > 0)) & (mx.maximum(got, want) > 1e-30))  # float32 ends below
    assert mx.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("temp", [1e-300, 1e-39, 1e-6, 1e6, 1e39, 1e300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}], ids=str)
def test_a_temperature_of_any_size_gives_a_distribution(temp, filters):
    """The likeliest tokens as temperatures go to 0, all that remain alike as they grow, and never an excluded one."""
    x = mx.log(mx.array([[0.4, 0.0, 0.4, 0.15, 0.05]]))[:, mx.arange(320) % 5] - math.log(64)
    x = mx.where(mx.arange(320) < 5, x, -mx.inf)
    p = np.array(probabilities_of(mlx_mtp.make_sampler(temp=temp, **filters), x))[0]
    kept = np.flatnonzero(p)
    assert kept.tolist() == ([0, 2] if temp < 1 else [0, 2, 3] if "top_p" in filters else [0, 2, 3, 4])
    assert np.allclose(p[kept], 1 / len(kept), atol=1e-5)


def test_of_equal_tokens_of_blocks_top_k_keeps_those_that_mlx_lm_keeps():
    """The blocks of a row stay in their order."""
    for seed in range(10):
        x = mx.random.randint(0, 3, (2, BLOCK * BLOCK), key=mx.random.key(seed)).astype(mx.float32)
        ids, values = largest(x, 7)
        want = mx.argpartition(-x, kth=6, axis=-1)[:, :7]  # as in ``apply_top_k``
        assert mx.sort(ids, axis=-1).tolist() == mx.sort(want, axis=-1).tolist()
        assert mx.array_equal(values, mx.take_along_axis(x, ids, axis=-1))


def test_tokens_of_blocks_are_drawn_with_their_probabilities():
    """Of many tokens first a block is drawn, then a token in it: also a rare one, and never one with probability 0."""
    p, n = np.zeros(BLOCK**2 * 2), 20_000
    p[[0, 1, BLOCK - 1, BLOCK, 3000, len(p) - 1]] = TARGET[:6]
    p[5 * BLOCK : 6 * BLOCK] = 1e-3
    mx.random.seed(1)
    tokens = mx.concatenate([draw(mx.repeat(mx.array(p, mx.float32)[None], 500, axis=0)) for _ in range(n // 500)])
    assert_drawn_from(p / p.sum(), tokens)


def test_top_k_is_below_the_size_of_the_vocabulary():
    """As in mlx-lm."""
    for top_k in (8, 9, 2.5):
        with pytest.raises(ValueError, match=f"top_k must be an integer below the vocabulary's size of 8, not {top_k}"):
            mlx_mtp.make_sampler(temp=1.0, top_k=top_k)(log(TARGET)[None])


@pytest.mark.parametrize("options", SAMPLERS, ids=str)
def test_sampler_and_drafts_draw_from_mlx_lms_distribution(options, monkeypatch):
    """Draft, accept and replace, then the next token: the target's distribution, and as many drafts accepted as possible.

    Of texts that are accepted together, some with a draft of the head, some with a copy, some without.
    """
    want = by_mlx_lm(monkeypatch, TARGET, **options)
    mx.random.seed(1)
    sampler = mlx_mtp.make_sampler(**options)
    logprobs = mx.repeat(log(TARGET)[None], 2 * N, axis=0).reshape(N, 2, -1)
    assert_drawn_from(want, sampler(logprobs[:, 0]))
    acceptance, third = RejectionSampling(sampler), N // 3
    texts = [Drafted(acceptance, 0)] * third + [Drafted(acceptance, 0, are_copies=True)] * third
    texts += [Drafted(acceptance, 0, n=0)] * (N - 2 * third)
    copies = mx.arange(N, dtype=mx.uint32) % len(TARGET)
    for head in HEADS.values():
        drafts, proposal = acceptance.draft(texts, mx.repeat(log(head)[None], N, axis=0))
        drafts = mx.where(mx.arange(N) < third, drafts, copies)
        verdict = acceptance.accept(texts, logprobs, drafts[:, None], [proposal])
        for part in (slice(third), slice(third, 2 * third), slice(2 * third, N)):
            assert_drawn_from(want, verdict.tokens[part, 0])
            if part.stop <= 2 * third:
                assert_drawn_from(want, verdict.tokens[part, 1])
        p, q = (
            probabilities_of(sampler, mx.repeat(log(p)[None], N, axis=0), proposal.uniforms) for p in (TARGET, head)
        )
        most = np.array(mx.minimum(p, q).sum(axis=-1))[:third].mean(dtype=np.float64)
        assert abs(np.array(verdict.accepted[:third]).mean() - most) < 5 * math.sqrt(0.25 / third)


@pytest.mark.parametrize("options", SAMPLERS, ids=str)
def test_drafts_of_logits_of_any_size(options):
    """The head's logits are not normalized; their exponentials may exceed float32."""
    acceptance = RejectionSampling(mlx_mtp.make_sampler(**options))
    found = []
    for size in (0.0, 100.0):
        mx.random.seed(1)  # XTC's number
        _, proposal = acceptance.draft([Drafted(acceptance, 0)], log(TARGET)[None] + size)
        found.append(proposal.support.of_all(len(TARGET)))
    assert mx.allclose(*found, atol=1e-4)


def test_draft_and_target_share_the_uniform_number_of_xtc():
    """So every draft of a head that is the target itself is accepted."""
    acceptance = RejectionSampling(mlx_mtp.make_sampler(temp=1.0, xtc_probability=0.5, xtc_threshold=0.1))
    mx.random.seed(3)
    G, k = 50, 8
    texts, logits = [Drafted(acceptance, 0, k)] * G, mx.repeat(log(TARGET)[None], G, axis=0)
    drafts, proposals = zip(*(acceptance.draft(texts, logits) for _ in range(k)))
    verdict = acceptance.accept(texts, mx.stack([logits] * (k + 1), axis=1), mx.stack(drafts, axis=1), proposals)
    assert mx.all(verdict.accepted)


# Through the loop

# Copies, and the head behind a rejected one; and a caller's own sampler. Coupled drafts are those of a single run, see
# test_seeds.py.
BRIEF = [
    Case(2, copies=3, temp=1.0, top_p=0.9, xtc_probability=0.5),
    Case(2, "right", acceptance="match", copies=3, temp=1.0, top_p=0.9),
]


@pytest.mark.parametrize("case", CASES if LONG else BRIEF, ids=lambda case: case.name)
def test_joint_distribution_of_the_first_tokens(case):
    assert case.p_value(runs=5000 if LONG else 60) > JOINT_LEVEL
