"""A sampler or a processor that raises ends its own text, and no other's."""

import functools

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.sample_utils import make_sampler as stock_sampler

from mlx_mtp import make_sampler
from mlx_mtp.batch.generator import BatchGenerator
from tests.support.batches import Fault, Faulty, run
from tests.support.decoding import assert_goes_on, plain
from tests.support.models import tiny_model
from tests.support.scripted import scripted

PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3, 5]]
N = 12
model_of = functools.cache(tiny_model)


CASES = [
    *(("call", has, k) for has in ((), ("copy",), ("rollback",)) for k in (0, 3)),
    *((hook, (hook,), k) for hook in ("copy", "rollback") for k in (1, 3)),
]


@pytest.mark.parametrize(("hook", "has", "k"), CASES)
@pytest.mark.parametrize(
    ("at", "failing"),
    [(4, 2), *(pytest.param(at, i, marks=pytest.mark.slow) for at in range(8) for i in (0, 2))],
)
def test_hook_that_raises_ends_its_own_text(hook, has, k, at, failing):
    """Beside greedy rows, one with a seed, and one whose processor keeps state: texts and caches of single runs."""
    model, processor = model_of("qwen3_5"), Faulty(hook, at, has)
    processors = [[], make_logits_processors(repetition_penalty=1.3), [], [Faulty("none", 0, ("rollback",))]]
    sampler = [None, make_sampler(1.0, seed=5), None, None]
    processors[failing] = [processor]
    single = processors[:failing] + [[Faulty("none", 0)]] + processors[failing + 1 :]
    want = [
        plain(p, model, max_tokens=N, logits_processors=ps, sampler=s) for p, ps, s in zip(PROMPTS, single, sampler)
    ]
    generator, uids = scripted(
        model, PROMPTS, [N] * 4, lambda uid, i: i % 3 > 0, k, logits_processors=processors, samplers=sampler
    )
    texts = run(generator)
    for i, (uid, prompt) in enumerate(zip(uids, PROMPTS)):
        text, last = texts[uid].tokens, texts[uid].last
        assert text == want[i][: len(text)]
        assert last.all_tokens == prompt + text
        assert_goes_on(model, last.prompt_cache, prompt + text)
        if i == failing:
            assert last.finish_reason == "error"
            assert isinstance(last.error, Fault)
            assert processor.left == [-1]  # not asked again
        else:
            assert (last.finish_reason, last.error, len(text)) == ("length", None, N)


@pytest.mark.parametrize("return_prompt_caches", [True, False])
@pytest.mark.parametrize("k", [0, 2])
def test_sampler_that_raises_leaves_the_random_state_to_the_others(k, return_prompt_caches):
    """mlx-lm's compiled samplers leave a random state behind that nothing can be drawn from."""
    mx.random.seed(3)
    samplers = [make_sampler(0.9), stock_sampler(0.9, top_k=32), make_sampler(0.9, top_k=32), stock_sampler(0.9), None]
    generator = BatchGenerator(model_of("qwen3_5"), num_draft_tokens=k, return_prompt_caches=return_prompt_caches)
    generator.insert([[i, 2] for i in range(5)], max_tokens=[N] * 5, samplers=samplers)
    texts = [*run(generator).values()]
    assert [text.finish_reason for text in texts] == ["length", "error", "error", "length", "length"]
    assert [len(text.tokens) for text in texts] == [N, 0, 0, N, N]
    assert all("top_k" in str(text.last.error) for text in texts[1:3])
    assert texts[4].tokens == plain([4, 2], model_of("qwen3_5"), max_tokens=N)
    mx.eval(mx.random.uniform())


def test_row_that_is_not_drafted_for_is_not_copied():
    """One of plain decoding, and one that has ended and waits for its prompt cache."""
    model = model_of("qwen3_5")
    processors = [[Faulty("copy", 0, ("copy",))], []]
    generator = BatchGenerator(model, num_draft_tokens=3)
    uids = generator.insert(PROMPTS[:2], max_tokens=[N, N], logits_processors=processors, num_draft_tokens=[0, 3])
    texts = run(generator)
    assert [texts[uid].finish_reason for uid in uids] == ["length", "length"]
