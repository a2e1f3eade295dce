"""Plain mlx-lm on our model classes: what it documents of generation and batches holds as on its own.

``scripts/upstream.py`` runs mlx-lm's own tests in full.
"""

import mlx.core as mx
import pytest
from mlx_lm.generate import batch_generate
from mlx_lm.models.cache import make_prompt_cache as stock_make_prompt_cache
from mlx_lm.utils import load_model

import mlx_mtp
from mlx_mtp.caches.recurrent import ArraysCache
from tests.support.decoding import plain
from tests.support.models import DATA, tiny_model

PROMPTS = (
    "class File(unittest.TestCase):\n    def setUp(self):\n",
    "import os\nimport sys\n\n\nclass Queue:\n    def ",
    "x = 1",
)


@pytest.fixture(scope="module")
def prompts(trained):
    return [trained[1].encode(p) for p in PROMPTS]


def batch(trained, prompts, **kwargs):
    return batch_generate(*trained, prompts, return_token_ids=True, return_prompt_caches=True, **kwargs)


def test_logits_match_mlx_lms_class(trained, prompts):
    model, _ = trained
    stock, _ = load_model(DATA / "dense")
    for prompt in prompts:
        ours, theirs = stock_make_prompt_cache(model), stock_make_prompt_cache(stock)
        for chunk in (prompt[:2], prompt[2:], [7]):
            tokens = mx.array([chunk])
            assert mx.array_equal(model(tokens, cache=ours), stock(tokens, cache=theirs))
    assert [type(c).__name__ for c in ours] == [type(c).__name__ for c in theirs]
    assert [c.is_trimmable() for c in ours] == [c.is_trimmable() for c in theirs]


def test_batch_matches_its_prompts_one_by_one(trained, prompts):
    model, _ = trained
    want = [plain(p, model, max_tokens=n) for p, n in zip(prompts, (12, 5, 9))]
    response = batch(trained, prompts, max_tokens=[12, 5, 9])
    assert response.token_ids == want
    assert response.texts == [trained[1].decode(tokens) for tokens in want]


def test_batch_and_mtp_resume_each_others_caches(trained, prompts):
    model, _ = trained
    first = batch(trained, prompts, max_tokens=6)
    more = [[5, 9], [7], [3, 2, 8]]
    second = batch(trained, more, prompt_caches=first.caches, max_tokens=6)
    for i, prompt in enumerate(prompts):
        # The last token of a batch is not in its caches.
        history = prompt + first.token_ids[i]
        assert first.caches[i][3].offset in (len(history), len(history) - 1)
        text = history[: first.caches[i][3].offset] + more[i]
        want = plain(text, model, max_tokens=6)
        assert second.token_ids[i] == want
        steps = mlx_mtp.mtp_generate_step(mx.array(more[i]), model, max_tokens=6, prompt_cache=first.caches[i])
        assert [token for token, _, _ in steps] == want


def test_rejects_a_recorded_window_in_a_batch():
    """A batch is made of what the caches hold, and its own cache has no window to go back in."""
    model = tiny_model("qwen3_5")
    caches = [model.make_cache() for _ in range(2)]
    for cache, tokens in zip(caches, ([3, 1, 4], [1, 5])):
        model(mx.array([tokens]), cache=cache)
    merged = ArraysCache.merge([c[0] for c in caches])
    assert (merged.batch_size, merged.window) == (2, None)
    for i, cache in enumerate(caches):
        assert all(mx.array_equal(a, b) for a, b in zip(merged.extract(i).cache, cache[0].cache))
    merged.filter([1])
    assert all(mx.array_equal(a, b) for a, b in zip(merged.cache, caches[1][0].cache))
