"""Exact mode: a window sees the shapes of plain decoding, so it rounds as plain decoding does on any device."""

from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gated_delta, switch_layers

from mlx_mtp import mtp_generate_step
from mlx_mtp.caches.recurrent import ArraysCache, rollback
from tests.support.decoding import plain
from tests.support.models import FAMILIES, arrays_equal, model_of, round_otherwise, tiny_model

PROMPT = mx.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
WINDOW = mx.array([8, 9, 7, 9, 3])


def quantized(family):
    model = tiny_model(family, 1)
    nn.quantize(model, 32, 4)
    return model


def filled(model):
    prompt_cache = model.make_cache()
    model(PROMPT[None], cache=prompt_cache)
    mx.eval([c.state for c in prompt_cache])
    return prompt_cache


def one_token_passes(model, prompt_cache):
    passes = [model(token[None, None], cache=prompt_cache) for token in WINDOW]
    return mx.concatenate(passes, axis=1)


# Where MLX may choose a kernel by the number of rows: (owner, name).
ROW_DEPENDENT = [
    (nn.Linear, "__call__"),
    (nn.QuantizedLinear, "__call__"),
    (nn.Embedding, "__call__"),
    (nn.QuantizedEmbedding, "__call__"),
    (nn.Embedding, "as_linear"),
    (nn.QuantizedEmbedding, "as_linear"),
    (nn.Conv1d, "__call__"),
    (nn.RMSNorm, "__call__"),
    (switch_layers.SwitchLinear, "__call__"),
    (switch_layers.QuantizedSwitchLinear, "__call__"),
    (switch_layers.SwitchGLU, "__call__"),
    (gated_delta, "gated_delta_ops"),
    (mx.fast, "scaled_dot_product_attention"),
    (mx.fast, "rms_norm"),
    (mx.fast, "rope"),
    (mx, "softmax"),
    (mx, "argpartition"),
    (mx, "quantized_matmul"),
]  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """Every such call's module and shapes, counted."""
    seen = Counter()

    def shape(x):
        return x.shape if isinstance(x, mx.array) else None if isinstance(x, nn.Module) else x

    def record(owner, name):
        original = getattr(owner, name)

        def recorded(*args, **kwargs):
            module = id(args[0]) if isinstance(args[0], nn.Module) else None
            arguments = (*args, *(kwargs[k] for k in ("offset", "mask", "sorted_indices") if k in kwargs))
            seen[owner.__name__, name, module, *(str(shape(x)) for x in arguments)] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, recorded)

    for owner, name in ROW_DEPENDENT:
        record(owner, name)
    return seen


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("make", [model_of, quantized])
@pytest.mark.parametrize("family", FAMILIES)
def test_products_have_the_shapes_of_plain_decoding(monkeypatch, family, make, tied, calls):
    model = make(family) if not tied else tiny_model(family, tie_word_embeddings=True)
    monkeypatch.setattr(model.drafting, "compiled", False)  # a trace calls nothing
    prompt_cache = filled(model)
    calls.clear()
    one_token_passes(model, prompt_cache)
    want = dict(calls)
    rows = {key[3:] for key in want if key[0] in ("Linear", "QuantizedLinear")}
    assert rows
    assert all("(1, 1, " in "".join(shapes) for shapes in rows)

    prompt_cache = filled(model)
    calls.clear()
    model(WINDOW[None], cache=prompt_cache, n_confirmed=1, exact=True)
    assert dict(calls) == want

    prompt_cache = filled(model)
    calls.clear()
    model(WINDOW[None], cache=prompt_cache, n_confirmed=1)
    assert dict(calls) != want  # or this test would see nothing


@pytest.fixture
def other_kernels(monkeypatch):
    round_otherwise(monkeypatch, 0.03)


def test_exact_bits_where_kernels_round_differently(other_kernels):
    for family in FAMILIES:
        model = model_of(family)
        theirs = filled(model)
        want = one_token_passes(model, theirs)
        ours = filled(model)
        assert mx.array_equal(model(WINDOW[None], cache=ours, n_confirmed=1, exact=True), want)
        assert not mx.array_equal(model(WINDOW[None], cache=filled(model)), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_rollback_gives_the_state_of_plain_decoding(family, other_kernels):
    model = model_of(family)
    for n_confirmed in (1, 2, 5):
        for n in range(n_confirmed, 6):
            ours, theirs = filled(model), filled(model)
            model(WINDOW[None], cache=ours, n_confirmed=n_confirmed, exact=True)
            rollback(ours, len(PROMPT), n)
            for token in WINDOW[:n]:
                model(token[None, None], cache=theirs)
            for a, b in zip(ours, theirs):
                if isinstance(a, ArraysCache):
                    assert a.window is None
                    assert arrays_equal(a.cache, b.cache)
                else:
                    assert a.offset == b.offset
                    assert arrays_equal([x[..., : a.offset, :] for x in a.state[:2]],
                                        [x[..., : b.offset, :] for x in b.state[:2]])  # fmt: skip
            with pytest.raises(ValueError, match="nothing to roll back"):
                ours[0].rollback(n)


def test_exact_rollback_keeps_confirmed_tokens():
    model = model_of("qwen3_5")
    prompt_cache = filled(model)
    model(WINDOW[None], cache=prompt_cache, n_confirmed=3, exact=True)
    for n in (0, 2, 6):
        with pytest.raises(ValueError, match="Cannot keep"):
            prompt_cache[0].rollback(n)


@pytest.mark.parametrize("options", [{}, {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 20}], ids=str)
@pytest.mark.parametrize("family", [pytest.param("qwen3_5", marks=pytest.mark.slow), "qwen3_next"])
def test_exact_tokens_where_kernels_round_differently(family, options, other_kernels):
    model = model_of(family)
    want = plain(PROMPT, model, max_tokens=30, **options)

    def tokens(depth, exact):
        steps = mtp_generate_step(PROMPT, model, max_tokens=30, num_draft_tokens=depth, exact=exact, **options)
        return [token for token, _, _ in steps]

    assert tokens(1, True) == tokens(4, True) == want
    assert tokens(4, False) != want  # or nothing was at stake


def test_exact_mode_copies_no_keys_and_values():
    model = model_of("qwen3_5")
    n_cached, size = 50_000, 0
    prompt_cache = filled(model)
    for c in prompt_cache:
        if not isinstance(c, ArraysCache):
            c.keys, c.values, c.offset = mx.zeros((1, 1, 60_000, 32)), mx.zeros((1, 1, 60_000, 32)), n_cached
            size = c.keys.nbytes
    mx.eval([c.state for c in prompt_cache])
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(model(WINDOW[None], cache=prompt_cache, n_confirmed=1, exact=True))
    assert mx.get_peak_memory() - before < size / 2


def test_rejects_what_exact_mode_cannot_do():
    model = tiny_model("qwen3_5")
    with pytest.raises(ValueError, match="needs a cache"):
        model(WINDOW[None], exact=True)
    model.model.pipeline_size = 2
    with pytest.raises(ValueError, match="pipeline"):
        model(WINDOW[None], cache=model.make_cache(), exact=True)
