"""Quantized keys and values: a window over them is what one token at a time is.

MLX has had a ``quantized_matmul`` that was wrong for two rows with grouped-query attention, where each key-value head serves
several queries. A window is where two and more rows come from.
"""

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_causal_mask, quantized_scaled_dot_product_attention
from mlx_lm.models.cache import QuantizedKVCache

from mlx_mtp import make_prompt_cache
from mlx_mtp.caches.recurrent import rollback
from tests.support.decoding import PROMPT, WINDOW, filled, mtp, one_by_one, plain
from tests.support.models import tiny_model

B, KV_HEADS, HEAD_DIM = 1, 2, 64


def keys_and_values(n: int, bits: int, dtype=mx.float32):
    """A cache of n rows, and what is in it: keys and values [B, KV_HEADS, n, HEAD_DIM] as the bits hold them."""
    cache = QuantizedKVCache(group_size=32, bits=bits)
    keys, values = (mx.random.normal((B, KV_HEADS, n, HEAD_DIM), key=mx.random.key(i)).astype(dtype) for i in range(2))
    held = cache.update_and_fetch(keys, values)
    return held, [mx.dequantize(*x, group_size=32, bits=bits) for x in held]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n_repeats", [1, 2, 8])
def test_attention_of_a_window_matches_its_rows(bits, n_repeats, dtype):
    atol = 1e-4 if dtype == mx.float32 else 0.1  # a wrong product is off by about 1
    options = dict(scale=HEAD_DIM**-0.5, group_size=32, bits=bits)
    for n_cached, n_rows in ((3, 2), (3, 5), (70, 3), (300, 2), (300, 5)):
        (keys, values), exact_keys_and_values = keys_and_values(n_cached + n_rows, bits, dtype)
        # As attention has them: with the axes of heads and rows swapped
        queries = mx.random.normal((B, n_rows, KV_HEADS * n_repeats, HEAD_DIM), key=mx.random.key(2))
        queries = queries.astype(dtype).transpose(0, 2, 1, 3)  # [B, KV_HEADS * n_repeats, n_rows, HEAD_DIM]
        for mask in ("causal", create_causal_mask(n_rows, n_cached)):
            # An array of its own, since mlx-lm scales the queries in place.
            window = quantized_scaled_dot_product_attention(1 * queries, keys, values, mask=mask, **options)
            attend = mx.fast.scaled_dot_product_attention
            exact = attend(queries, *exact_keys_and_values, scale=HEAD_DIM**-0.5, mask=mask)
            assert mx.allclose(window, exact, atol=atol)
            for i in range(n_rows):
                seen = [[x[..., : n_cached + i + 1, :] for x in held] for held in (keys, values)]
                row = 1 * queries[:, :, i : i + 1]
                one = quantized_scaled_dot_product_attention(row, *seen, mask=None, **options)
                assert mx.allclose(window[:, :, i : i + 1], one, atol=atol)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_window_over_a_quantized_cache(family, bits):
    """Four queries to a key-value head; also after going back, when the cache has rows beyond its offset."""
    model = tiny_model(family, 3, num_attention_heads=8, num_key_value_heads=2)

    window = WINDOW[:9]
    want, close = one_by_one(model, filled(model, bits), window), dict(rtol=1e-3, atol=1e-3)
    for n_kept in (2, 7):
        ours = filled(model, bits)
        assert mx.allclose(model(window[None], cache=ours, n_confirmed=1), want, **close)
        rollback(ours, len(PROMPT), n_kept)
        assert mx.allclose(one_by_one(model, ours, window[n_kept:]), want[:, n_kept:], **close)
    if family == "qwen3_5":
        for start in (0, 17):
            options = dict(max_tokens=40, kv_bits=bits, kv_group_size=32, quantized_kv_start=start)
            text = plain(PROMPT, model, **options)
            for depth in (1, 4):
                cache = make_prompt_cache(model)
                assert mtp(PROMPT, model, num_draft_tokens=depth, prompt_cache=cache, **options) == text
                assert {type(c) for c in cache if hasattr(c, "bits")} == {QuantizedKVCache}
