"""Qwen3.8-Flash-Next: values of transformers, sparse attention, and tables of n-gram embeddings.

What it has in common with other families is tested with theirs: ``FAMILIES`` in ``support/models.py`` has it.
"""

import mlx.core as mx
import numpy as np
import pytest

from tests.support.decoding import mtp
from tests.support.models import DATA, load_reference
from tests.support.profiles import LONG

FOLDER = DATA / "flash_next"
VALUES = np.load(FOLDER / "reference.npz")
PROMPTS = [0, 3, 5, 7]
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def model():
    return load_reference(FOLDER)


def difference(ours: mx.array, name: str) -> float:
    """From the last values of a prompt."""
    theirs = VALUES[name]
    return float(np.abs(np.array(ours)[-len(theirs) :] - theirs).max())


@pytest.mark.parametrize("j", PROMPTS)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_values_of_transformers(model, j, chunk):
    """In chunks, token by token and in one piece; prompts from 36 tokens on select blocks."""
    ids, cache, head = mx.array(VALUES[f"ids{j}"]), model.make_cache(), model.head_layer.make_cache()
    pieces = [model(ids[None, i : i + chunk], cache=cache, return_hidden=True) for i in range(0, ids.size, chunk)]
    logits, hidden = (mx.concatenate(each, axis=1) for each in zip(*pieces))
    assert difference(logits[0], f"logits{j}") <= TOLERANCE
    assert difference(hidden[0], f"hidden{j}") <= TOLERANCE
    after = mx.concatenate([ids[1:], mx.argmax(logits[0, -1:], axis=-1)])[None]
    embeddings = model.model.embed_tokens(after)
    outs = [model.mtp(embeddings[:, i : i + chunk], hidden[:, i : i + chunk], head) for i in range(0, ids.size, chunk)]
    drafts = model.draft_logits(mx.concatenate(outs, axis=1))
    assert difference(drafts[0], f"draft{j}") <= TOLERANCE
    draft = mx.argmax(drafts[:, -1:], axis=-1)
    second = model.draft_logits(model.mtp(model.model.embed_tokens(draft), outs[-1][:, -1:], head))
    assert difference(second[0, 0], f"second{j}") <= TOLERANCE


@pytest.mark.parametrize("j", PROMPTS)
def test_greedy_tokens(model, j):
    want = VALUES[f"greedy{j}"].tolist()
    for k in range(9) if LONG else (0, 3):
        options = dict(max_tokens=len(want), num_draft_tokens=k, prefill_step_size=11)
        assert mtp(mx.array(VALUES[f"ids{j}"]), model, **options) == want
