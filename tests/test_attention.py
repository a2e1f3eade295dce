"""Attention over a window in groups of rows: what it is in one call, and only in a window."""

import mlx.core as mx
import pytest
from mlx_lm.models import base

from mlx_mtp import make_prompt_cache
from mlx_mtp.caches.recurrent import rollback
from mlx_mtp.layers.attention import fused_queries
from tests.support.decoding import PROMPT, WINDOW, assert_cache_of, filled, mtp, plain
from tests.support.models import FAMILIES, deep_model

# The layer is the same in all of them.
FAMILY = pytest.mark.parametrize(
    "family", ["qwen3_5", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES[1:])]
)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def verify(model, bits, n, rows, **options):
    """The logits of a window of n tokens, and those of the token after half of it."""
    model.drafting.attention_rows = rows
    caches = filled(model, bits)
    logits = model(WINDOW[None, :n], cache=caches, n_confirmed=1, **options)
    rollback(caches, PROMPT.size, (n + 1) // 2)
    return mx.concatenate([logits, model(WINDOW[None, -1:], cache=caches)], axis=1)


@FAMILY
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_window_in_groups_is_the_window(family, bits):
    model = deep_model(family, **HEADS)
    for n in (2, 5, 9, 17):
        want = verify(model, bits, n, None)
        for rows in (1, 2, 3, 4):
            # Sums in another order: a few roundings of float32 (6e-8), which two layers pass on.
            assert mx.abs(verify(model, bits, n, rows) - want).max() < 1e-5 * mx.abs(want).max()


@pytest.fixture
def queries(monkeypatch):
    """The number of rows and of keys of each call of attention."""
    calls, original = [], base.scaled_dot_product_attention

    def attention(queries, keys, *args, **kwargs):
        calls.append((queries.shape[2], (keys[0] if isinstance(keys, tuple | list) else keys).shape[2]))
        return original(queries, keys, *args, **kwargs)

    for module in ("mlx_mtp.layers.attention", "mlx_mtp.layers.mtp", "mlx_lm.models.qwen3_next"):
        monkeypatch.setattr(f"{module}.scaled_dot_product_attention", attention)
    return calls


@FAMILY
@pytest.mark.parametrize("bits", [None, 8])
def test_only_a_window_is_grouped(queries, family, bits):
    model = deep_model(family)
    model.drafting.attention_rows = 4
    caches = filled(model, bits)
    assert queries == [(11, 11)] * 2  # two layers
    seen = []
    for n, before, kept in ((9, 11, 1), (4, 12, 4)):
        queries.clear()
        model(WINDOW[None, :n], cache=caches, n_confirmed=1)
        seen.append([*queries])
        rollback(caches, before, kept)
    grouped, whole = [(4, 15), (4, 19), (1, 20)], [(4, 16)]
    assert seen == [grouped * 2, whole * 2]
    queries.clear()
    plain(PROMPT, model, max_tokens=2)  # keeps its operations
    assert {rows for rows, _ in queries} == {PROMPT.size - 1, 1}


@FAMILY
@pytest.mark.parametrize("kv", [{}, {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}], ids=str)
def test_greedy_text(queries, family, kv):
    """Also with copies, whose windows have up to 17 tokens: their drafts are what the text said before."""
    model = deep_model(family, **HEADS)
    want = plain(PROMPT, model, max_tokens=12, **kv)
    prompt = [*PROMPT.tolist(), *plain(PROMPT, model, max_tokens=40), *PROMPT.tolist()]
    want_of_copies = plain(prompt, model, max_tokens=24)
    for rows in (1, 2, 3, 4):
        model.drafting.attention_rows, cache = rows, make_prompt_cache(model)
        assert mtp(PROMPT, model, max_tokens=12, num_draft_tokens=8, prompt_cache=cache, **kv) == want
        assert_cache_of(model, cache, PROMPT.size + 12)
        if rows > 2 and not kv:
            queries.clear()
            assert mtp(prompt, model, max_tokens=24, num_draft_tokens=0, copy_drafts=16) == want_of_copies
            assert max(n for n, n_keys in queries if n_keys > len(prompt)) == rows


def test_rows_of_fused_attention():
    # The first two: Qwen3.5-27B and 35B-A3B.
    for heads, kv_heads, rows in ((24, 4, 5), (16, 2, 4), (8, 2, 8), (2, 2, 8), (64, 1, 1)):
        model = deep_model("qwen3_5", num_attention_heads=heads, num_key_value_heads=kv_heads)
        assert fused_queries(model.layers[1].self_attn) == rows
