"""Exact mode: a window sees the shapes of plain decoding, so it rounds as plain decoding does on any device."""

from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gated_delta, switch_layers

from mlx_mtp.caches.recurrent import ArraysCache, rollback
from tests.support.decoding import PROMPT, filled, mtp, one_by_one, plain
from tests.support.models import FAMILIES, arrays_equal, model_of, round_otherwise, tiny_model

WINDOW = mx.array([8, 9, 7, 9, 3])


def quantized(family):
    model = tiny_model(family, 1)
    nn.quantize(model, 32, 4)
    return model


# Where MLX may choose a kernel by the number of rows
ROW_DEPENDENT = [
    (gated_delta, "gated_delta_ops"), (mx.fast, "scaled_dot_product_attention"), (mx.fast, "rms_norm"),
    (mx.fast, "rope"), (mx, "softmax"), (mx, "argpartition"), (mx, "quantized_matmul"),
    (nn.Embedding, "as_linear"), (nn.QuantizedEmbedding, "as_linear"),
    *((module, "__call__") for module in (
        nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding, nn.Conv1d, nn.RMSNorm,
        switch_layers.SwitchLinear, switch_layers.QuantizedSwitchLinear, switch_layers.SwitchGLU,
    )),
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


@pytest.mark.parametrize("make", [model_of, quantized, lambda family: tiny_model(family, tie_word_embeddings=True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_products_have_the_shapes_of_plain_decoding(monkeypatch, family, make, calls):
    model, seen = make(family), []
    monkeypatch.setattr(model.drafting, "compiled", False)  # a trace calls nothing
    for run in (
        lambda cache: one_by_one(model, cache, WINDOW),
        lambda cache: model(WINDOW[None], cache=cache, n_confirmed=1, exact=True),
        lambda cache: model(WINDOW[None], cache=cache, n_confirmed=1),
    ):
        prompt_cache = filled(model)
        calls.clear()
        run(prompt_cache)
        seen.append(dict(calls))
    want, exact, usual = seen
    rows = {key[3:] for key in want if key[0] in ("Linear", "QuantizedLinear")}
    assert rows
    assert all("(1, 1, " in "".join(shapes) for shapes in rows)
    assert exact == want
    assert usual != want  # or this test would see nothing


@pytest.fixture
def other_kernels(monkeypatch):
    round_otherwise(monkeypatch, 0.03)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_bits_where_kernels_round_differently(family, other_kernels):
    """And after rolling back, the state of plain decoding."""
    model = model_of(family)
    want = one_by_one(model, filled(model), WINDOW)
    assert not mx.array_equal(model(WINDOW[None], cache=filled(model)), want)
    for n_confirmed in (1, 2, 5):
        for n in range(n_confirmed, 6):
            ours, theirs = filled(model), filled(model)
            assert mx.array_equal(model(WINDOW[None], cache=ours, n_confirmed=n_confirmed, exact=True), want)
            rollback(ours, len(PROMPT), n)
            one_by_one(model, theirs, WINDOW[:n])
            for a, b in zip(ours, theirs):
                if isinstance(a, ArraysCache):
                    assert a.window is None
                    assert arrays_equal(a.cache, b.cache)
                else:
                    assert a.offset == b.offset
                    assert arrays_equal(*([x[..., : a.offset, :] for x in c.state[:2]] for c in (a, b)))
            with pytest.raises(ValueError, match="nothing to roll back"):
                ours[0].rollback(n)


@pytest.mark.parametrize("options", [{}, {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 20}], ids=str)
@pytest.mark.parametrize("family", [pytest.param("qwen3_5", marks=pytest.mark.slow), "qwen3_next"])
def test_exact_tokens_where_kernels_round_differently(family, options, other_kernels):
    model, options = model_of(family), dict(max_tokens=30, **options)
    want = plain(PROMPT, model, **options)
    for depth in (1, 4):
        assert mtp(PROMPT, model, num_draft_tokens=depth, exact=True, **options) == want
    assert mtp(PROMPT, model, num_draft_tokens=4, **options) != want  # or nothing was at stake


def test_exact_mode_copies_no_keys_and_values():
    model, size = model_of("qwen3_5"), 0
    prompt_cache = filled(model)
    for c in prompt_cache:
        if not isinstance(c, ArraysCache):
            c.keys, c.values, c.offset = mx.zeros((1, 1, 60_000, 32)), mx.zeros((1, 1, 60_000, 32)), 50_000
            size = c.keys.nbytes
    mx.eval([c.state for c in prompt_cache])
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(model(WINDOW[None], cache=prompt_cache, n_confirmed=1, exact=True))
    assert mx.get_peak_memory() - before < size / 2


def test_rejects_what_exact_mode_cannot_do():
    model = tiny_model("qwen3_5")
    prompt_cache = filled(model)
    model(WINDOW[None], cache=prompt_cache, n_confirmed=3, exact=True)
    for n in (0, 2, 6):  # confirmed tokens are kept
        with pytest.raises(ValueError, match="Cannot keep"):
            prompt_cache[0].rollback(n)
    with pytest.raises(ValueError, match="needs a cache"):
        model(WINDOW[None], exact=True)
    model.model.pipeline_size = 2
    with pytest.raises(ValueError, match="pipeline"):
        model(WINDOW[None], cache=model.make_cache(), exact=True)
