"""Going back inside a window: the state is that of a forward over the tokens kept, bit for bit."""

import copy
from unittest.mock import Mock, patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cache as stock

from mlx_mtp import MTPError, make_prompt_cache, mtp_generate_step
from mlx_mtp.core.caches import indexed
from mlx_mtp.core.caches.prompt_cache import open_prompt_cache
from mlx_mtp.core.caches.recurrent import Split, rewound
from mlx_mtp.core.caches.rows import Ends, KVOptions, KVRows, Rows
from mlx_mtp.core.layers.compiled import Compiler
from tests.support.decoding import PROMPT, WINDOW, filled, one_by_one, rows_of
from tests.support.models import FAMILIES, FLASH, arrays_equal, deep_model, model_of, tiny_model
from tests.support.profiles import LONG


def kept(cache):
    arrays_of = lambda c: [getattr(c, name)[..., : c.offset, :] for name in indexed.names_of(c)]  # noqa: E731
    return [c.cache if isinstance(c, stock.ArraysCache) else arrays_of(c) for c in cache]


FORMS = [*((family, mx.float32) for family in FAMILIES), ("qwen3_5", mx.bfloat16)]


@pytest.mark.parametrize(("family", "dtype"), FORMS)
@pytest.mark.parametrize("prompt", [[], PROMPT] if LONG else [PROMPT], ids=len)
def test_rollback_gives_the_state_of_a_forward(family, prompt, dtype):
    """Of a window with 1, 2 or all tokens confirmed, after each number of tokens that a rollback can keep."""
    model = deep_model(family, dtype=dtype)
    before, rows = filled(model, prompt=prompt), rows_of(model, prompts=[prompt])
    state = rows.state
    wanted = {}  # after n tokens: their logits, what the cache then holds, the logits of one more
    for n in range(1, 10):
        theirs = copy.deepcopy(before)
        want = model(WINDOW[None, :n], cache=theirs)
        wanted[n] = want, kept(theirs), model(mx.array([[7]]), cache=copy.deepcopy(theirs))
    for n_tokens in range(1, 10) if LONG else (1, 2, 3, 6, 9):
        for n_confirmed in sorted({1, min(2, n_tokens), n_tokens}):
            for n in range(n_confirmed, n_tokens + 1):
                rows.state = state
                logits = rows.run(model, WINDOW[None, :n_tokens], n_confirmed=n_confirmed)
                rows.commit([n])
                ours = rows.extract(0, rows.n_tokens[0])
                want, held, follow_up = wanted[n]
                assert arrays_equal(kept(ours), held)
                if dtype == mx.float32:
                    assert mx.array_equal(logits[:, :n], want)
                    assert mx.array_equal(model(mx.array([[7]]), cache=ours), follow_up)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_compiled", [False, True] if LONG else [True])
def test_rows_roll_back_to_ends_of_their_own(family, is_compiled):
    """The cache of each row is that of a prefill of its tokens, with and without drafts that are kept."""
    model, prompts = deep_model(family), [PROMPT, PROMPT[:3], PROMPT[2:]]
    compiler, window = Compiler() if is_compiled else None, mx.stack([mx.roll(WINDOW[:5], b) for b in range(3)])
    for n_confirmed, all_kept in (
        (1, ((1, 1, 1), (1, 3, 5), (4, 4, 4))),
        (2, ((2, 2, 2), (2, 5, 3))),
        (5, ((5, 5, 5),)),
    ):
        for counts in all_kept:
            rows = rows_of(model, prompts=prompts)
            rows.run(model, window, n_confirmed=n_confirmed, compiler=compiler)
            rows.commit(counts)
            for b, (prompt, n) in enumerate(zip(prompts, counts)):
                theirs = filled(model, prompt=mx.concatenate([mx.array(prompt), window[b, :n]]))
                held = zip(tree_flatten(kept(rows.extract(b, len(prompt) + n))), tree_flatten(kept(theirs)))
                assert all(mx.allclose(x, y, rtol=1e-4, atol=1e-4) for (_, x), (_, y) in held)


def test_a_rollback_to_the_confirmed_tokens_computes_nothing():
    model = deep_model("qwen3_5")
    rows = rows_of(model)
    mx.eval(rows.run(model, WINDOW[None, :4], n_confirmed=1), rows.snapshots)
    snapshots = rows.snapshots
    rows.commit([1])
    assert all(own is x for held, arrays in zip(rows.state.recurrent, snapshots) for own, x in zip(held, arrays))


def test_confirmed_tokens_cannot_be_rolled_back():
    model = deep_model("qwen3_5")
    rows = rows_of(model)
    rows.run(model, WINDOW[None, :4], n_confirmed=2)
    with pytest.raises(MTPError, match="2 tokens of the window are confirmed: they cannot be rolled back to 1"):
        rows.commit([1])


def test_rollback_multiplies_with_no_weight(monkeypatch):
    model = deep_model("qwen3_5")
    rows = rows_of(model)
    mx.eval(rows.run(model, WINDOW[None, :9], n_confirmed=1))
    refuse = Mock(side_effect=AssertionError("a weight matrix was multiplied with"))
    monkeypatch.setattr(nn.Linear, "__call__", refuse)
    rows.commit([4])
    mx.eval(rows.state.recurrent)
    with pytest.raises(AssertionError, match="weight"):
        rows.run(model, mx.array([[1]]))


def test_windows():
    """A pass that is over keeps nothing, and outside of one the cache is mlx-lm's."""
    model = deep_model("qwen3_5")
    cache, rows = filled(model), rows_of(model)
    theirs = [stock.ArraysCache(size=2) if l.is_linear else stock.KVCache() for l in model.layers]
    model(PROMPT[None], cache=theirs)
    assert arrays_equal(kept(cache), kept(theirs))
    assert [type(c).__name__ for c in cache] == [type(c).__name__ for c in theirs]
    for n in (1, 3, 4):
        rows.run(model, WINDOW[None, :4], n_confirmed=1)
        rows.commit([n])
        assert all(c.split is None for c in rows.extract(0, rows.n_tokens[0]) if isinstance(c, stock.ArraysCache))
    assert rows.n_tokens == (len(PROMPT) + 1 + 3 + 4,)
    rows.commit([1])  # no pass is in flight
    assert rows.n_tokens == (len(PROMPT) + 8,)


def test_rows_take_the_arrays_of_a_single_prompt_cache_without_a_copy():
    model = model_of("qwen3_5")
    cache = open_prompt_cache(model, None)
    for c, layer in zip(cache.backbone, model.layers):
        if not layer.is_linear:
            shape = (1, layer.self_attn.num_key_value_heads, 8192 + 256, layer.self_attn.head_dim)
            c.keys, c.values, c.offset = mx.ones(shape), mx.ones(shape), 8192
            mx.eval(c.keys, c.values)
    rows = Rows(model, KVOptions())
    rows.join([cache], [KVOptions()])
    del cache, c
    size, before = rows.nbytes, mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        mx.eval(rows.run(model, mx.array([[7]])))
        rows.commit([1])
    assert mx.get_peak_memory() - before < size / 4
    assert rows.extract(0, rows.n_tokens[0])[-1].offset == 8192 + 3


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", FLASH])
def test_window_over_a_quantized_cache(family, bits):
    """MLX has had a ``quantized_matmul`` that was wrong for two rows with several queries to a key-value head."""
    model, close = tiny_model(family, 3, num_attention_heads=8, num_key_value_heads=2), dict(rtol=1e-3, atol=1e-3)
    want = one_by_one(model, filled(model, bits), WINDOW[:9])
    for n, n_kept in ((2, 1), (9, 2), (9, 7)):
        rows = rows_of(model, bits)
        assert mx.allclose(rows.run(model, WINDOW[None, :n], n_confirmed=1), want[:, :n], **close)
        rows.commit([n_kept])
        assert mx.allclose(
            one_by_one(model, rows.extract(0, rows.n_tokens[0]), WINDOW[n_kept:9]), want[:, n_kept:], **close
        )


def test_all_last_inputs_are_rolled_back():
    """Each keeps the inputs before the first token that is dropped, in every row, and the state is replayed once."""
    lengths, kept = (3, 9, 2), (1, 4)
    inputs = [mx.random.normal((2, n + 4, 5), key=mx.random.key(n)) for n in lengths]
    drafts = [mx.random.normal((2, 3, 2, 4), key=mx.random.key(i)) for i in range(3)]
    drafts += [mx.random.uniform(shape=(2, 3, 2), key=mx.random.key(i)) for i in (3, 4)]
    snapshot = [inputs[0][:, 1:4], mx.ones((2, 2, 4, 4)), *(x[:, 1 : 1 + n] for x, n in zip(inputs[1:], lengths[1:]))]
    (arrays,) = rewound([Split(4, 1, snapshot, tuple(inputs), tuple(drafts), True)], kept)
    first, state, *others = arrays
    for held, x, n in zip((first, *others), inputs, lengths):
        assert all(mx.array_equal(held[b], x[b, kept[b] : kept[b] + n]) for b in range(2))
    assert mx.array_equal(state[0], snapshot[1][0])  # the row that keeps no draft
    (alone,) = rewound([Split(4, 1, snapshot[:2], (inputs[0],), tuple(drafts), True)], kept)
    assert mx.array_equal(state, alone[1])


@pytest.mark.parametrize("bits", [None, 8])
def test_rows_of_named_arrays(bits, tmp_path):
    """Rows of different lengths, two of them from files, hold what each cache holds alone, and give it back."""
    sizes, lengths, keys = dict(keys=(2, 32), values=(2, 32), index_keys=(1, 8)), (0, 3, 300), mx.random.key(0)
    tokens = lambda n: [mx.random.normal((1, H, n, D), key=keys) for H, D in sizes.values()]  # noqa: E731
    alone = [indexed.IndexedKVCache() for _ in lengths]
    for c, n in zip(alone, lengths):
        if n > 0:
            c.update_and_fetch(*tokens(n))
    if bits:
        alone = [c.to_quantized(32, bits) for c in alone]
    stock.save_prompt_cache(str(tmp_path / "caches.safetensors"), alone)
    loaded = [indexed.adopted(c) for c in stock.load_prompt_cache(str(tmp_path / "caches.safetensors"))]
    assert [type(c) for c in loaded[1:]] == [type(c) for c in alone[1:]]
    rows = KVRows(alone[0])
    rows.join([alone[0], *loaded[1:]], Ends())
    rows.ends = Ends(lengths, (0, 0, 0))
    new = tokens(5)
    rows.update_and_fetch(*(mx.repeat(x, 3, axis=0) for x in new))
    for b, (c, n) in enumerate(zip(alone, lengths)):
        want = c.update_and_fetch(*new)
        got = rows.extract(b, n + 5)
        assert got.offset == n + 5
        for name, x in zip(c.names, want):
            held = getattr(got, name)
            of_each = zip(held, x) if isinstance(held, list) else [(held, x)]
            assert all(mx.array_equal(a[:, :, : n + 5], e) for a, e in of_each)
    rows.filter([2, 0], 305)
    assert [x.shape[0] for x in rows.arrays if isinstance(x, mx.array)] == [2] * (1 if bits else 3)


def test_the_end_of_a_text_runs_no_attention_of_the_head():
    """The keys of its last inputs are added to the prompt cache, while a pass may be in flight."""
    model = model_of("qwen3_5")
    cache = make_prompt_cache(model)
    steps = mtp_generate_step(mx.array(PROMPT), model, num_draft_tokens=1, prompt_cache=cache, max_tokens=5)
    for _ in range(5):
        next(steps)
    with patch.object(type(model.mtp), "last", side_effect=AssertionError):
        assert list(steps) == []
    assert cache[-2].offset == len(PROMPT) + 5 - 1
