"""The head as a draft model in mlx-lm's own speculative loop."""

import copy
import gc
import weakref

import mlx.core as mx
import mlx_lm
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache
from mlx_lm.models.cache import make_prompt_cache as stock_make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_mtp
from mlx_mtp.core.caches.indexed import names_of
from mlx_mtp.core.caches.recurrent import RecurrentCache
from mlx_mtp.core.layers.drafting import DraftLMHead
from tests.support.batches import Fault, failing_sampler
from tests.support.decoding import mtp, plain
from tests.support.models import FAMILIES, model_of, tiny_model
from tests.support.profiles import LONG, examples

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
CODE = "class Queue:\n    def __init__(self, maxsize=0):\n"  # a text that goes on


def steps(prompt, model, **kwargs):
    draft_model = model.make_draft_model()
    return list(speculative_generate_step(mx.array(prompt), draft_model.target, draft_model, **kwargs))


def speculative(prompt, model, **kwargs):
    return [token for token, _, _ in steps(prompt, model, **kwargs)]


def make_caches(draft_model):
    return stock_make_prompt_cache(draft_model.target) + stock_make_prompt_cache(draft_model)


def read(draft_model, tokens, target, draft):
    """Both models read tokens -> the draft model's logits."""
    logits = draft_model(mx.array([tokens]), cache=draft)
    draft_model.target(mx.array([tokens]), cache=target)
    return logits


@examples(5)
@given(
    family=st.sampled_from(FAMILIES),
    prompt=st.lists(st.integers(0, 31), min_size=1, max_size=40),
    depth=st.integers(0, 8),
    prefill=st.integers(1, 50),
    max_tokens=st.integers(1, 40 if LONG else 20),
)
def test_greedy_tokens_match_plain_decoding(family, prompt, depth, prefill, max_tokens):
    model = model_of(family)
    options = dict(max_tokens=max_tokens, prefill_step_size=prefill)
    assert speculative(prompt, model, num_draft_tokens=depth, **options) == plain(prompt, model, **options)


def test_text_through_mlx_lms_stream_generate(trained):
    (model, tokenizer), depth = trained, 2
    theirs = mlx_lm.stream_generate(model, tokenizer, CODE, 32)
    draft_model = model.make_draft_model()
    options = dict(draft_model=draft_model, num_draft_tokens=depth)
    ours = list(mlx_lm.stream_generate(draft_model.target, tokenizer, CODE, 32, **options))
    assert [(r.text, r.token, r.finish_reason) for r in ours] == [(r.text, r.token, r.finish_reason) for r in theirs]
    # As many drafts stand as in our own loop, but for the first and the last window, which differ.
    own = mlx_mtp.stream_generate(model, tokenizer, CODE, 32, num_draft_tokens=depth)
    n_drafts = sum(r.from_draft for r in ours)
    assert abs(n_drafts - sum(r.from_draft for r in own)) <= 2 * depth
    assert n_drafts > 8


def test_options_of_mlx_lms_loop_and_failures_come_through():
    model = model_of("qwen3_5")
    # Not penalties: mlx-lm's speculative loop does not show its processors the prompt, so they differ with any draft model.
    for options in (
        dict(logits_processors=make_logits_processors(logit_bias={5: 1.5})),
        dict(kv_bits=8, kv_group_size=32, quantized_kv_start=0),
        dict(sampler=make_sampler(temp=0.0)),
    ):
        options["max_tokens"] = 20
        assert speculative(PROMPT, model, num_draft_tokens=3, **options) == plain(PROMPT, model, **options)
    model = model_of("qwen3_5")
    for n_calls in range(1, 9):
        with pytest.raises(Fault):
            speculative(PROMPT, model, sampler=failing_sampler(n_calls), num_draft_tokens=2)
    assert speculative(PROMPT, model, max_tokens=9) == plain(PROMPT, model, max_tokens=9)


def test_drafts_come_from_the_draft_vocabulary():
    model, n = tiny_model("qwen3_5"), 12
    model.drafting.lm_head = DraftLMHead(model.output_layer, list(range(n)))
    got = steps(PROMPT, model, max_tokens=40, num_draft_tokens=3)
    assert [token for token, _, _ in got] == plain(PROMPT, model, max_tokens=40)
    assert any(token < n for token, _, _ in got)
    assert all(token < n for token, _, from_draft in got if from_draft)
    draft_model = model.make_draft_model()
    *target, draft = make_caches(draft_model)
    read(draft_model, PROMPT[:-1], target, [draft])
    logits = draft_model(mx.array([PROMPT[-1:]]), cache=[draft])
    assert logits.shape == (1, 1, 32)
    assert mx.isfinite(logits[0, 0]).tolist() == [i < n for i in range(32)]


@pytest.mark.parametrize("family", FAMILIES if LONG else FAMILIES[::2])
def test_head_rows_come_from_verified_hidden_states(family):
    model = model_of(family)
    prompt_cache = make_caches(model.make_draft_model())
    tokens = speculative(PROMPT, model, max_tokens=30, num_draft_tokens=3, prompt_cache=prompt_cache)
    draft, text = prompt_cache[-1], mx.array([PROMPT + tokens])
    n, rows = draft.n_verified, mlx_mtp.make_prompt_cache(model)[-2]
    assert len(PROMPT) < n < text.size
    _, hidden = model(text[:, :n], cache=model.make_cache(), return_hidden=True)
    model.mtp(model.model.embed_tokens(text[:, 1 : n + 1]), hidden, rows)
    for a, b in zip(*([getattr(c, name) for name in names_of(rows)] for c in (draft.kv, rows))):
        assert mx.allclose(a[..., :n, :], b[..., :n, :], atol=1e-4)
    # And the target's cache is that of the tokens yielded but the last.
    n_tokens, fresh = text.size - 1, model.make_cache()
    assert {c.offset for c in prompt_cache[:-1] if not isinstance(c, RecurrentCache)} == {n_tokens}
    model(text[:, :n_tokens], cache=fresh)
    for a, b in zip(prompt_cache, fresh):
        if isinstance(a, RecurrentCache):
            assert a.split is None
            assert all(mx.allclose(x, y, atol=1e-4) for x, y in zip(a.cache, b.cache))


def test_trimming():
    """The target's cache is trimmed while it is empty, and inside its window; the model's own, never."""
    model = model_of("qwen3_5")
    draft_model, own = model.make_draft_model(), model.make_cache()
    assert not can_trim_prompt_cache(own)
    plain(PROMPT, model, max_tokens=3, prompt_cache=own)
    assert not can_trim_prompt_cache(own)
    with pytest.raises(ValueError, match="requires a trimmable prompt cache"):  # another draft model, as in mlx-lm
        next(speculative_generate_step(mx.array(PROMPT), model, model_of("qwen3_next")))
    *target, draft = make_caches(draft_model)
    assert can_trim_prompt_cache(target)
    assert trim_prompt_cache(target, 5) == 0
    read(draft_model, PROMPT, target, [draft])
    assert not can_trim_prompt_cache(target)
    for token in (7, 8):
        draft_model(mx.array([[token]]), cache=[draft])
    with pytest.raises(ValueError, match="can trim its last 0 tokens, not 1"):
        draft.trim(1)
    draft_model.target(mx.array([[7, 8, 9]]), cache=target)
    assert can_trim_prompt_cache(target)
    before = [c.offset for c in target if not isinstance(c, RecurrentCache)]
    for n in (3, 10):
        with pytest.raises(ValueError, match="Cannot keep"):
            trim_prompt_cache(target, n)
    assert [c.offset for c in target if not isinstance(c, RecurrentCache)] == before
    with pytest.raises(ValueError, match="can trim its last 1 tokens, not 2"):
        trim_prompt_cache([draft], 2)


def test_lru_prompt_cache_never_trims_the_result():
    model = model_of("qwen3_5")
    cache = make_caches(model.make_draft_model())
    text = PROMPT + speculative(PROMPT, model, max_tokens=12, num_draft_tokens=3, prompt_cache=cache)[:-1]
    lru = LRUPromptCache()
    lru.insert_cache("model", PROMPT[:3], model.make_cache())
    lru.insert_cache("model", text, cache)
    assert len(lru) == 2  # a trimmable cache would have replaced its prefix
    found, rest = lru.fetch_nearest_cache("model", text[:-4] + [0])
    assert (len(found), rest) == (len(model.layers), (text[:-4] + [0])[3:])
    with pytest.raises(ValueError, match="requires a trimmable prompt cache"):
        speculative([7], model, prompt_cache=cache)


@pytest.mark.parametrize("n", [1, 2, 4, 7, 11])
def test_resumes_without_the_draft_model(n):
    """In plain generation, and in our own loop, which takes a cache that is still empty."""
    model = model_of("qwen3_5")
    draft_model = model.make_draft_model()
    cache = make_caches(draft_model)
    options = dict(max_tokens=50, num_draft_tokens=3, prompt_cache=cache)
    loop = speculative_generate_step(mx.array(PROMPT), draft_model.target, draft_model, **options)
    text = PROMPT + [next(loop)[0] for _ in range(n)]
    loop.close()
    n_cached = cache[1].offset
    assert len(text) - 1 <= n_cached <= len(text)
    more, last, options = [*text[n_cached:], 7, 2], text[n_cached:] or [7], dict(max_tokens=8)
    fresh = [copy.deepcopy(cache)[:-1] for _ in range(2)]
    got = plain(more, model, prompt_cache=fresh[0], prefill_step_size=2, **options)
    assert got == plain(text[:n_cached] + more, model, **options)
    assert not can_trim_prompt_cache(fresh[0])
    got = mtp(last, model, num_draft_tokens=3, prompt_cache=fresh[1], **options)
    assert got == plain(text[:n_cached] + last, model, **options)
    empty = make_caches(draft_model)[:-1]
    assert mtp(PROMPT, model, prompt_cache=empty, **options) == plain(PROMPT, model, **options)


NO_CACHE = r"call target\.make_cache\(\) before each"


def test_rejects_what_cannot_draft():
    with pytest.raises(ValueError, match="no MTP head"):
        tiny_model("qwen3_5", mtp_num_hidden_layers=0).make_draft_model()
    draft_model = tiny_model("qwen3_5").make_draft_model()
    with pytest.raises(ValueError, match="needs its cache"):
        draft_model(mx.array([[1]]))
    with pytest.raises(ValueError, match=NO_CACHE):
        draft_model.make_cache()
    cache = make_caches(draft_model)
    with pytest.raises(ValueError, match=NO_CACHE):
        draft_model.make_cache()
    assert len(cache) == len(draft_model.target.layers) + 1
    # It keeps no cache alive.
    kept, cache = weakref.ref(draft_model.target.make_cache()[0]), None
    gc.collect()
    assert kept() is None
    with pytest.raises(ValueError, match=NO_CACHE):
        draft_model.make_cache()


def test_drops_the_hidden_states_of_a_long_prompt():
    model = model_of("qwen3_5")
    options = dict(max_tokens=1, num_draft_tokens=2, prefill_step_size=100)
    cache = make_caches(model.make_draft_model())
    speculative([i % 32 for i in range(600)], model, prompt_cache=cache, **options)
    assert cache[-1].hidden.shape[1] <= 4
    assert cache[-1].tokens.size <= 4
