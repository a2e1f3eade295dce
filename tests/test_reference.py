"""Backbone, head and draft chain agree with an independent implementation."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp import make_prompt_cache
from tests.support.decoding import difference, mtp
from tests.support.models import DATA, arrays_equal, load_reference
from tests.support.profiles import LONG

CHECKPOINTS = ["dense", "moe35", "next"]
TOLERANCE = 2e-4  # of logits; the closest top two of the greedy continuations are further apart


@pytest.fixture(scope="module", params=CHECKPOINTS)
def case(request):
    folder = DATA / request.param
    values = np.load(folder / "reference.npz")
    return load_reference(folder), values, [k for k in range(4) if f"prompt_{k}" in values]


def test_moe36_is_moe35_in_another_layout():
    assert arrays_equal(*(load_reference(DATA / name).parameters() for name in ("moe35", "moe36")))


def hidden_and_next_tokens(model, values, j):
    """Of a prompt, and that backbone and hidden states are the reference's."""
    prompt = mx.array(values[f"prompt_{j}"])[None]
    logits, hidden = model(prompt, return_hidden=True)
    assert difference(logits[0], values[f"logits_{j}"]) <= TOLERANCE
    assert difference(hidden[0], values[f"hidden_{j}"]) <= TOLERANCE
    return hidden, mx.concatenate([prompt[:, 1:], mx.array(values[f"greedy_{j}"][:1])[None]], axis=1)


def test_backbone_head_and_draft_chain(case):
    model, values, prompts = case
    for j in prompts:
        hidden, next_tokens = hidden_and_next_tokens(model, values, j)
        head_cache = make_prompt_cache(model)[len(model.layers)]
        out = model.mtp(model.model.embed_tokens(next_tokens), hidden, head_cache)
        assert difference(model.logits(out)[0], values[f"mtp_logits_{j}"]) <= TOLERANCE
        out = out[:, -1:]
        for i, draft in enumerate(values[f"draft_tokens_{j}"].tolist()):
            logits = model.logits(out)[0, 0]
            assert difference(logits, values[f"draft_logits_{j}"][i]) <= TOLERANCE
            assert mx.argmax(logits).item() == draft
            out = model.mtp(model.model.embed_tokens(mx.array([[draft]])), out, head_cache)


@pytest.mark.parametrize(("quantized", "chunk"), [(False, 2), (True, 5)])
def test_the_last_row_alone(case, chunk, quantized):
    """It is what it would be if the rows before it had been computed to the end."""
    model, values, prompts = case
    for j in prompts if LONG else prompts[:2]:
        (hidden, next_tokens), n = hidden_and_next_tokens(model, values, j), len(values[f"prompt_{j}"])
        caches = [make_prompt_cache(model)[len(model.layers)] for _ in range(2)]
        if quantized:
            caches = [c.to_quantized(group_size=32, bits=8) for c in caches]
        for i in range(0, n, chunk):
            rows = slice(i, i + chunk)
            given = model.model.embed_tokens(next_tokens[:, rows]), hidden[:, rows]
            out, whole = model.mtp.last(*given, caches[0]), model.mtp(*given, caches[1])
            assert out.shape == (1, 1, hidden.shape[2])
            assert float(mx.abs(out - whole[:, -1:]).max()) <= TOLERANCE
        assert caches[0].offset == n


def test_greedy_tokens(case):
    model, values, prompts = case
    for j in prompts if LONG else prompts[:2]:
        want = values[f"greedy_{j}"].tolist()
        options = dict(max_tokens=len(want), num_draft_tokens=3, prefill_step_size=7)
        assert mtp(values[f"prompt_{j}"], model, **options) == want
