"""Going back inside a window: the state is that of a forward over the tokens kept, bit for bit."""

import copy

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mlx_mtp import make_prompt_cache, mtp_generate_step
from mlx_mtp.caches.prompt_cache import open_prompt_cache
from mlx_mtp.caches.recurrent import ArraysCache, open_windows, rollback
from tests.support.models import FAMILIES, arrays_equal, deep_model
from tests.support.profiles import LONG

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
WINDOW = [8, 9, 7, 9, 3, 2, 3, 8, 4]


def tokens(ids):
    return mx.array([ids])


def filled(model, prompt):
    cache = model.make_cache()
    if prompt:
        model(tokens(prompt), cache=cache)
        mx.eval([c.state for c in cache])
    return cache


def kept(cache):
    """What a cache of the backbone holds: its recurrent states, and its keys and values up to its offset."""
    return [c.cache if isinstance(c, ArraysCache) else [x[..., : c.offset, :] for x in c.state[:2]] for c in cache]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [pytest.param([], marks=pytest.mark.slow), PROMPT], ids=["empty", "filled"])
def test_rollback_gives_the_state_of_a_forward(family, prompt):
    model = deep_model(family)
    before = filled(model, prompt)
    wanted = {}  # after n tokens: their logits, what the cache then holds, the logits of one more
    for n in range(1, 10):
        theirs = copy.deepcopy(before)
        want = model(tokens(WINDOW[:n]), cache=theirs)
        wanted[n] = want, kept(theirs), model(tokens([7]), cache=copy.deepcopy(theirs))
    for n_tokens in range(1, 10) if LONG else (1, 2, 3, 6, 9):
        for n_confirmed in sorted({1, min(2, n_tokens), n_tokens}):
            for n in range(n_confirmed, n_tokens + 1):
                ours = copy.deepcopy(before)
                logits = model(tokens(WINDOW[:n_tokens]), cache=ours, n_confirmed=n_confirmed)
                rollback(ours, len(prompt), n)
                want, held, follow_up = wanted[n]
                assert arrays_equal(kept(ours), held)
                assert mx.array_equal(logits[:, :n], want)
                assert mx.array_equal(model(tokens([7]), cache=ours), follow_up)


def test_rollback_in_bfloat16():
    model = deep_model("qwen3_5", dtype=mx.bfloat16)
    before = filled(model, PROMPT)
    for n in range(1, 6):
        ours, theirs = copy.deepcopy(before), copy.deepcopy(before)
        model(tokens(WINDOW[:5]), cache=ours, n_confirmed=1)
        rollback(ours, len(PROMPT), n)
        model(tokens(WINDOW[:n]), cache=theirs)
        assert arrays_equal(kept(ours), kept(theirs))


def test_rollback_multiplies_with_no_weight(monkeypatch):
    model = deep_model("qwen3_5")
    cache = filled(model, PROMPT)
    model(tokens(WINDOW), cache=cache, n_confirmed=1)
    mx.eval([c.state for c in cache])

    def refuse(*_):
        raise AssertionError("a weight matrix was multiplied with")

    monkeypatch.setattr(nn.Linear, "__call__", refuse)
    rollback(cache, len(PROMPT), 4)
    mx.eval([c.state for c in cache])
    with pytest.raises(AssertionError, match="weight"):
        model(tokens([1]), cache=cache)


def test_rejects_rollback_without_a_record():
    model = deep_model("qwen3_5")
    cache = filled(model, PROMPT)
    with pytest.raises(ValueError, match="nothing to roll back"):
        rollback(cache, len(PROMPT) - 1, 1)
    cache = filled(model, PROMPT)
    model(tokens(WINDOW[:4]), cache=cache, n_confirmed=2)
    for n in (0, 1, 5, -1):
        with pytest.raises(ValueError, match="Cannot keep"):
            cache[0].rollback(n)
    cache[0].rollback(3)
    with pytest.raises(ValueError, match="nothing to roll back"):
        cache[0].rollback(3)


def test_rejects_a_second_window():
    model = deep_model("qwen3_5")
    cache = filled(model, PROMPT)
    model(tokens(WINDOW[:2]), cache=cache, n_confirmed=1)
    with pytest.raises(ValueError, match="was not finished"):
        model(tokens(WINDOW[:2]), cache=cache, n_confirmed=1)


def test_rejects_padded_prompts():
    padded = ArraysCache(size=2, left_padding=[0, 3])
    with pytest.raises(ValueError, match="padded"):
        padded.open_window(1)
    with pytest.raises(ValueError, match="make_cache"):
        open_windows([stock.ArraysCache(size=2)], 1, 1)


def test_closed_window_keeps_nothing():
    model = deep_model("qwen3_5")
    cache = filled(model, PROMPT)
    for n in (1, 3, 4):
        model(tokens(WINDOW[:4]), cache=cache, n_confirmed=1)
        rollback(cache, cache[model.model.fa_idx].offset - 4, n)
        assert all(c.window is None for c in cache if isinstance(c, ArraysCache))


def test_matches_mlx_lms_cache_outside_a_window():
    model = deep_model("qwen3_5")
    ours = filled(model, PROMPT)
    theirs = [stock.ArraysCache(size=2) if l.is_linear else stock.KVCache() for l in model.layers]
    model(tokens(PROMPT), cache=theirs)
    assert arrays_equal(
        kept(ours),
        [c.cache if isinstance(c, stock.ArraysCache) else [x[..., : c.offset, :] for x in c.state[:2]] for c in theirs],
    )
    assert [type(c).__name__ for c in ours] == [type(c).__name__ for c in theirs]


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_saves_and_loads_a_prompt_cache(family, tmp_path):
    model = deep_model(family)
    cache = make_prompt_cache(model)
    _, hidden = model(tokens(PROMPT), cache=cache, return_hidden=True)
    model.mtp_forward(hidden[:, :-1], tokens(PROMPT[1:]), cache[-2])
    cache[-1][0], cache[-1][1] = hidden[:, -1:], mx.array(len(PROMPT))
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    open_prompt_cache(model, loaded)
    assert len(loaded) == len(cache)
    a = model(tokens(WINDOW), cache=cache, n_confirmed=1)
    b = model(tokens(WINDOW), cache=loaded, n_confirmed=1)
    assert mx.array_equal(a, b)
    rollback(cache[:-2], len(PROMPT), 3)
    rollback(loaded[:-2], len(PROMPT), 3)
    assert arrays_equal(kept(cache[:-2]), kept(loaded[:-2]))


def test_adds_a_head_to_an_empty_cache():
    model = deep_model("qwen3_5")
    cache = stock.make_prompt_cache(model)
    open_prompt_cache(model, cache)
    assert len(cache) == len(model.layers) + 2


@pytest.mark.parametrize("family", FAMILIES)
def test_head_begins_after_tokens_it_lacks(family):
    """A cache that mlx-lm has filled, and one that it went on with after the head had seen a part."""
    model = deep_model(family)
    begun = make_prompt_cache(model)
    list(mtp_generate_step(tokens([1, 2, 3])[0], model, max_tokens=2, prompt_cache=begun))
    model(tokens(PROMPT), cache=begun)
    for cache, n in ((filled(model, PROMPT), len(PROMPT)), (begun, 5 + len(PROMPT))):
        open_prompt_cache(model, cache)
        assert len(cache) == len(model.layers) + 2
        assert cache[len(model.layers) - 1].offset == n
        assert cache[-2].empty()
        assert cache[-1].empty()
        assert open_prompt_cache(model, cache).first_position == n
        assert len(list(mtp_generate_step(tokens([7])[0], model, max_tokens=4, prompt_cache=cache))) == 4
        assert cache[-2].offset == 4
        # From there on it is in step, whoever adopts it.
        open_prompt_cache(model, cache)
        assert cache[-2].offset == 4
        assert open_prompt_cache(model, cache).first_position == n


def test_rejects_the_cache_of_another_model():
    model = deep_model("qwen3_5")
    with pytest.raises(ValueError, match="5 entries, and this model needs 6"):
        open_prompt_cache(model, make_prompt_cache(model)[1:])
    with pytest.raises(
        ValueError, match="Entry 0 of the prompt cache is a KVCache, and this model needs a ArraysCache"
    ):
        open_prompt_cache(model, make_prompt_cache(model)[:4][::-1])
