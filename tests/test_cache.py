"""Going back inside a window: the state is that of a forward over the tokens kept, bit for bit."""

import copy

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mlx_mtp import make_prompt_cache
from mlx_mtp.caches.prompt_cache import open_prompt_cache, release
from mlx_mtp.caches.recurrent import ArraysCache, open_windows, rollback
from mlx_mtp.caches.rows import KVOptions, Rows
from tests.support.decoding import PROMPT, WINDOW, filled, mtp
from tests.support.models import FAMILIES, arrays_equal, deep_model, model_of
from tests.support.profiles import LONG


def tokens(ids):
    return mx.array([ids])


def kept(cache):
    """What a cache of the backbone holds: its recurrent states, and its keys and values up to its offset."""
    is_recurrent = [isinstance(c, stock.ArraysCache) for c in cache]
    return [c.cache if r else [x[..., : c.offset, :] for x in c.state[:2]] for c, r in zip(cache, is_recurrent)]


FORMS = [*((family, mx.float32) for family in FAMILIES), ("qwen3_5", mx.bfloat16)]


@pytest.mark.parametrize(("family", "dtype"), FORMS)
@pytest.mark.parametrize("prompt", [pytest.param([], marks=pytest.mark.slow), PROMPT], ids=["empty", "filled"])
def test_rollback_gives_the_state_of_a_forward(family, prompt, dtype):
    model = deep_model(family, dtype=dtype)
    before = filled(model, prompt=prompt)
    wanted = {}  # after n tokens: their logits, what the cache then holds, the logits of one more
    for n in range(1, 10):
        theirs = copy.deepcopy(before)
        want = model(WINDOW[None, :n], cache=theirs)
        wanted[n] = want, kept(theirs), model(tokens([7]), cache=copy.deepcopy(theirs))
    for n_tokens in range(1, 10) if LONG else (1, 2, 3, 6, 9):
        for n_confirmed in sorted({1, min(2, n_tokens), n_tokens}):
            for n in range(n_confirmed, n_tokens + 1):
                ours = copy.deepcopy(before)
                logits = model(WINDOW[None, :n_tokens], cache=ours, n_confirmed=n_confirmed)
                rollback(ours, len(prompt), n)
                want, held, follow_up = wanted[n]
                assert arrays_equal(kept(ours), held)
                if dtype == mx.float32:
                    assert mx.array_equal(logits[:, :n], want)
                    assert mx.array_equal(model(tokens([7]), cache=ours), follow_up)


def test_rollback_multiplies_with_no_weight(monkeypatch):
    model = deep_model("qwen3_5")
    cache = filled(model)
    model(WINDOW[None, :9], cache=cache, n_confirmed=1)
    mx.eval([c.state for c in cache])

    def refuse(*_):
        raise AssertionError("a weight matrix was multiplied with")

    monkeypatch.setattr(nn.Linear, "__call__", refuse)
    rollback(cache, len(PROMPT), 4)
    mx.eval([c.state for c in cache])
    with pytest.raises(AssertionError, match="weight"):
        model(tokens([1]), cache=cache)


def test_windows():
    """A closed one keeps nothing, and outside of one the cache is mlx-lm's."""
    model = deep_model("qwen3_5")
    cache = filled(model)
    theirs = [stock.ArraysCache(size=2) if l.is_linear else stock.KVCache() for l in model.layers]
    model(PROMPT[None], cache=theirs)
    assert arrays_equal(kept(cache), kept(theirs))
    assert [type(c).__name__ for c in cache] == [type(c).__name__ for c in theirs]
    for n in (1, 3, 4):
        model(WINDOW[None, :4], cache=cache, n_confirmed=1)
        rollback(cache, cache[1].offset - 4, n)
        assert cache[0].window is cache[2].window is None
    with pytest.raises(ValueError, match="nothing to roll back"):
        rollback(cache, cache[1].offset - 1, 1)
    model(WINDOW[None, :4], cache=cache, n_confirmed=2)
    with pytest.raises(ValueError, match="was not finished"):
        model(WINDOW[None, :2], cache=cache, n_confirmed=1)
    for n in (0, 1, 5, -1):
        with pytest.raises(ValueError, match="Cannot keep"):
            cache[0].rollback(n)
    cache[0].rollback(3)
    with pytest.raises(ValueError, match="nothing to roll back"):
        cache[0].rollback(3)
    with pytest.raises(ValueError, match="padded"):
        ArraysCache(size=2, left_padding=[0, 3]).open_window(1)
    with pytest.raises(ValueError, match="make_cache"):
        open_windows([stock.ArraysCache(size=2)], 1, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_saves_and_loads_a_prompt_cache(family, tmp_path):
    model, file = deep_model(family), str(tmp_path / "cache.safetensors")
    cache = make_prompt_cache(model)
    _, hidden = model(PROMPT[None], cache=cache, return_hidden=True)
    model.mtp(model.model.embed_tokens(PROMPT[None, 1:]), hidden[:, :-1], cache[-2])
    cache[-1][0], cache[-1][1] = hidden[:, -1:], mx.array(len(PROMPT))
    save_prompt_cache(file, cache)
    loaded = load_prompt_cache(file)
    open_prompt_cache(model, loaded)
    assert len(loaded) == len(cache)
    a, b = (model(WINDOW[None, :9], cache=c, n_confirmed=1) for c in (cache, loaded))
    assert mx.array_equal(a, b)
    for c in (cache, loaded):
        rollback(c[:-2], len(PROMPT), 3)
    assert arrays_equal(kept(cache[:-2]), kept(loaded[:-2]))


@pytest.mark.parametrize("family", FAMILIES)
def test_head_begins_after_tokens_it_lacks(family):
    """An empty cache, one that mlx-lm has filled, and one that it went on with after the head had seen a part."""
    model = deep_model(family)
    begun = make_prompt_cache(model)
    mtp([1, 2, 3], model, max_tokens=2, prompt_cache=begun)
    model(PROMPT[None], cache=begun)
    for cache, n in ((model.make_cache(), 0), (filled(model), len(PROMPT)), (begun, 5 + len(PROMPT))):
        open_prompt_cache(model, cache)
        assert len(cache) == len(model.layers) + 2
        assert cache[len(model.layers) - 1].offset == n
        assert cache[-2].empty()
        assert cache[-1].empty()
        if n > 0:
            assert open_prompt_cache(model, cache).first_position == n
            assert len(mtp([7], model, max_tokens=4, prompt_cache=cache)) == 4
            assert cache[-2].offset == 4
            # From there on it is in step, whoever adopts it.
            assert open_prompt_cache(model, cache).first_position == n
            assert cache[-2].offset == 4


def test_rejects_the_cache_of_another_model():
    model = deep_model("qwen3_5")
    for cache, message in [
        (make_prompt_cache(model)[1:], "5 entries, and this model needs 6"),
        (
            make_prompt_cache(model)[:4][::-1],
            "Entry 0 of the prompt cache is a KVCache, and this model needs a ArraysCache",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            open_prompt_cache(model, cache)


def test_rows_take_the_arrays_of_a_single_prompt_cache_without_a_copy():
    model = model_of("qwen3_5")
    cache = open_prompt_cache(model, None)
    for c, layer in zip(cache.backbone, model.layers):
        if not layer.is_linear:
            shape = (1, layer.self_attn.num_key_value_heads, 8192 + 256, layer.self_attn.head_dim)
            c.keys, c.values, c.offset = mx.ones(shape), mx.ones(shape), 8192
            mx.eval(c.keys, c.values)
    rows = Rows(model, KVOptions())
    rows.join([cache])
    release(cache)
    del c
    size, before = rows.nbytes, mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        rows.start_pass()
        mx.eval(model(mx.array([[7]]), cache=rows.entries))
        rows.end_pass(1)
        rows.commit([1])
    assert mx.get_peak_memory() - before < size / 4
    assert rows.extract(0)[-1].offset == 8192 + 3
