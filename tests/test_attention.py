"""Attention over a window in groups of queries: what it is in one call, by the rule of Metal's fused kernels."""

import mlx.core as mx
import pytest
from mlx_lm.models import base, cache

from mlx_mtp import make_prompt_cache
from mlx_mtp.core.layers import passes
from mlx_mtp.core.layers.layer import attend, group_size
from tests.support.decoding import PROMPT, WINDOW, assert_cache_of, mtp, plain, rows_of
from tests.support.models import GROUPED, deep_model


def test_the_rule_of_metal():
    for heads, kv_heads, head_dim, sizes in (
        (24, 4, 256, {1: 1, 5: 5, 6: 5, 17: 5}),  # Qwen3.5-27B
        (16, 2, 256, {4: 4, 5: 4, 8: 4, 17: 4}),  # 35B-A3B, Qwen3-Next
        (24, 4, 128, {5: 5, 6: 5, 8: 5, 9: 9, 17: 17}),  # more than 8 have a kernel of their own
        (64, 1, 256, {1: 1, 2: 2, 17: 17}),  # not even one query is fused
        (24, 4, 192, {2: 2, 17: 17}),
    ):
        assert {n: group_size(n, heads, kv_heads, head_dim) for n in sizes} == sizes


@pytest.fixture
def calls(monkeypatch):
    """The number of queries and of keys of each call of attention."""
    calls, original = [], base.scaled_dot_product_attention

    def attention(queries, keys, *args, **kwargs):
        calls.append((queries.shape[2], (keys[0] if isinstance(keys, tuple | list) else keys).shape[2]))
        return original(queries, keys, *args, **kwargs)

    for module in ("mlx_mtp.core.layers.layer", "mlx_lm.models.qwen3_next"):
        monkeypatch.setattr(f"{module}.scaled_dot_product_attention", attention)
    return calls


@pytest.mark.parametrize("kind", ["causal", "bool", "float"])
@pytest.mark.parametrize("most", [None, 1, 17])
def test_groups_are_the_whole(calls, most, kind):
    B, T, N = 2, 9, 30
    shapes = (16, T), (2, N), (2, N)
    queries, keys, values = (mx.random.normal((B, H, n, 96), key=mx.random.key(n)) for H, n in shapes)
    may = mx.arange(N) <= mx.arange(N - T, N)[:, None]
    may = mx.stack([may, may & (mx.arange(N) >= 4)])[:, None]  # the second row is padded
    mask = {"causal": "causal", "bool": may, "float": mx.where(may, 0.0, -mx.inf)}[kind]
    got = attend(queries, keys, values, cache.KVCache(), 0.125, mask, most)
    n = 4 if most is None else most or T
    ends = [min(i + n, T) for i in range(0, T, n)]
    assert calls == [(j - i * n, N - T + j if kind == "causal" else N) for i, j in enumerate(ends)]
    want = attend(queries, keys, values, cache.KVCache(), 0.125, mask, 0)
    # Sums in another order: a few roundings of float32.
    assert mx.abs(got - want).max() < 1e-5 * mx.abs(want).max()


@pytest.mark.parametrize(("bits", "metal"), [(None, True), (8, True), (None, False)])
def test_windows_alone_are_grouped_on_metal(calls, monkeypatch, bits, metal):
    """By the layer's own heads. There is no fused kernel for quantized keys, nor a reason to group on the CPU."""
    monkeypatch.setattr(passes, "on_metal", lambda: metal)
    model = deep_model("qwen3_5", **GROUPED)
    rows = rows_of(model, bits)
    assert calls == [(11, 11)] * 2  # two layers
    for n, before, kept in ((9, 11, 1), (4, 12, 4)):
        calls.clear()
        rows.run(model, WINDOW[None, :n], n_confirmed=1)
        grouped = [(4, 15), (4, 19), (1, 20)] if metal and not bits and n == 9 else [(n, before + n)]
        assert calls == grouped * 2
        rows.commit([kept])
    calls.clear()
    plain(PROMPT, model, max_tokens=2)  # keeps its operations
    assert {rows for rows, _ in calls} == {PROMPT.size - 1, 1}


@pytest.mark.parametrize("rows", [pytest.param(2, marks=pytest.mark.slow), None])
def test_greedy_text(calls, monkeypatch, rows):
    """Also with copies, whose windows have up to 17 tokens: their drafts are what the text said before."""
    monkeypatch.setattr(passes, "on_metal", lambda: True)
    model = deep_model("qwen3_5", **GROUPED)
    model.drafting.attention_rows, cache = rows, make_prompt_cache(model)
    want = plain(PROMPT, model, max_tokens=12)
    assert mtp(PROMPT, model, max_tokens=12, num_draft_tokens=8, prompt_cache=cache) == want
    assert_cache_of(model, cache, PROMPT.size + 12)
    prompt = [*PROMPT.tolist(), *plain(PROMPT, model, max_tokens=40), *PROMPT.tolist()]
    want = plain(prompt, model, max_tokens=24)
    calls.clear()
    assert mtp(prompt, model, max_tokens=24, num_draft_tokens=0, copy_drafts=16) == want
    assert max(n for n, n_keys in calls if n_keys > len(prompt)) == (rows or 4)
