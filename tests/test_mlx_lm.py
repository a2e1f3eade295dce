"""Plain mlx-lm on our model classes: what it documents of generation and batches holds as on its own.

``scripts/upstream.py`` runs mlx-lm's own tests in full.
"""

import mlx.core as mx
import pytest
from mlx_lm.generate import batch_generate
from mlx_lm.models.cache import make_prompt_cache as stock_make_prompt_cache
from mlx_lm.utils import load_model

from mlx_mtp.caches.recurrent import ArraysCache
from tests.support.decoding import mtp, plain
from tests.support.models import DATA, tiny_model

PROMPTS = (
    "class File(unittest.TestCase):\n    def setUp(self):\n",
    "import os\nimport sys\n\n\nclass Queue:\n    def ",
    "x = 1",
)


@pytest.fixture(scope="module")
def prompts(trained):
    return [trained[1].encode(p) for p in PROMPTS]


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


def test_batch_and_mtp_resume_each_others_caches(trained, prompts):
    """And a batch's texts are those of its prompts one by one."""
    model, tokenizer = trained
    options = dict(return_token_ids=True, return_prompt_caches=True)
    want = [plain(p, model, max_tokens=n) for p, n in zip(prompts, (8, 5, 6))]
    first = batch_generate(model, tokenizer, prompts, max_tokens=[8, 5, 6], **options)
    assert first.token_ids == want
    assert first.texts == [tokenizer.decode(tokens) for tokens in want]
    more = [[5, 9], [7], [3, 2, 8]]
    second = batch_generate(model, tokenizer, more, prompt_caches=first.caches, max_tokens=6, **options)
    for prompt, tokens, cache, question, answer in zip(prompts, want, first.caches, more, second.token_ids):
        # The last token of a batch is not in its caches.
        history = prompt + tokens
        assert cache[3].offset in (len(history), len(history) - 1)
        assert answer == plain(history[: cache[3].offset] + question, model, max_tokens=6)
        assert mtp(question, model, max_tokens=6, prompt_cache=cache) == answer


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
