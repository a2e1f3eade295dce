"""Each row of a batch equals its single run, whatever the others do."""

import copy
import gc
import itertools
import math
import random

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.sample_utils import make_sampler as stock_sampler

import mlx_mtp
from mlx_mtp import make_prompt_cache, make_sampler
from mlx_mtp.batch.generator import BatchGenerator
from mlx_mtp.caches.recurrent import ArraysCache
from mlx_mtp.caches.rows import KVOptions
from mlx_mtp.decoding.decoder import Decoder
from mlx_mtp.layers.drafting import DraftLMHead
from mlx_mtp.sampling.sampler import Sampler
from tests.support.batches import run
from tests.support.decoding import mtp, plain
from tests.support.distribution import LEVEL, PROMPT, VOCAB, Case, Counter, p_value
from tests.support.models import model_of, tiny_model
from tests.support.profiles import LONG
from tests.support.scripted import scripted

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]]
AT_ONCE = dict(max_token_gap=math.inf, min_decode_share=0.0)  # prompts are read whenever there are some


def test_rows_accept_by_themselves():
    """A head that is right for one row and wrong for another speeds up the one."""
    generator, uids = scripted(model_of("qwen3_5"), [[1, 2], [3, 4]], [40, 40], lambda uid, i: uid == 0, 3)
    texts = run(generator)
    fast, slow = (texts[uid].last.counts for uid in uids)
    assert fast.drafted[:1] < slow.drafted[:1]
    # Whether the last drafts of a text count depends on how many tokens are left.
    assert sum(fast.accepted) == sum(fast.drafted)
    assert sum(slow.accepted) == 0


def test_prompt_cache_in_and_out():
    """A turn of a chat in a batch, the next one alone, and one more in a batch; also on a cache that mlx-lm filled."""
    model = model_of("qwen3_5")
    stock, ours = stock_prompt_cache(model), make_prompt_cache(model)
    first = plain([1, 2, 3], model, max_tokens=5, prompt_cache=stock)
    second = mtp([4, 4], model, max_tokens=3, prompt_cache=ours)
    before = [copy.deepcopy(c.state) for c in ours if hasattr(c, "offset")]
    generator = BatchGenerator(model, num_draft_tokens=2)
    generator.insert([[9, 8], [7], [6, 5]], max_tokens=[9, 9, 9], caches=[stock, ours, None])
    for text, history in zip(run(generator).values(), [[1, 2, 3, *first, 9, 8], [4, 4, *second, 7], [6, 5]]):
        assert text.tokens == plain(history, model, max_tokens=9)
        more = mtp([2], model, max_tokens=5, prompt_cache=text.last.prompt_cache)
        assert more == plain(history + text.tokens + [2], model, max_tokens=5)
    after = [c.state for c in ours if hasattr(c, "offset")]
    assert all(mx.array_equal(x, y) for a, b in zip(before, after) for x, y in zip(a, b))


def test_a_prompt_of_one_token_joins_those_that_run():
    """Its recurrent layers have no state yet."""
    model, generator = model_of("qwen3_5"), BatchGenerator(model_of("qwen3_5"), num_draft_tokens=2)
    generator.insert([PROMPTS[0]], max_tokens=[20])
    texts = run(generator, n_steps=4)
    generator.insert([[9]], max_tokens=[6])
    assert run(generator, texts)[1].tokens == plain([9], model, max_tokens=6)


def test_segments():
    """``next`` stops at the end of a segment."""
    generator, shown = BatchGenerator(model_of("qwen3_5"), prefill_step_size=4), []
    generator.insert_segments([[[1, 2, 3, 4, 5, 6], [7, 8], [9]]], max_tokens=[5])
    while len(generator):
        shown += [(r.progress, r.end_of_segment, r.end_of_prompt) for r in generator.next()[0]]
    assert shown == [((4, 9), False, False), ((6, 9), True, False), ((8, 9), True, False), ((9, 9), True, True)]


# Chi-square at 1e-4, fixed seed


class RowCase(Case):
    """A case of which a row of each batch is one."""

    n_tokens = 2

    def sampled(self, runs):
        assert self.counts.total() == runs
        return self.counts


XTC = dict(temp=1.5, xtc_probability=0.5, xtc_threshold=0.1)


@pytest.mark.parametrize("runs", [pytest.param(50, id="few"), pytest.param(5000, marks=pytest.mark.slow, id="many")])
def test_distribution_of_each_row(runs):
    """Three kinds of rows, of which one of each is in the batch or soon joins it."""
    penalties = {"repetition_penalty": 1.5}
    cases = [RowCase(temp=0.7), RowCase(temp=1.5, top_k=4, penalties=penalties), RowCase(acceptance="match", temp=1.0)]
    mx.random.seed(0)
    generator = BatchGenerator(
        cases[0].model(), num_draft_tokens=2, completion_batch_size=3, return_prompt_caches=False
    )
    kind = {}
    for _ in range(runs):
        samplers = [make_sampler(**c.options, acceptance=c.acceptance) for c in cases]
        processors = [c.processors() for c in cases]
        uids = generator.insert([PROMPT] * 3, max_tokens=[5] * 3, samplers=samplers, logits_processors=processors)
        kind |= dict(zip(uids, cases))
    for case in cases:
        case.counts = Counter()
    for uid, text in run(generator).items():
        kind[uid].counts[tuple(text.tokens[:2])] += 1
    assert all(case.p_value(runs) > LEVEL for case in cases)


def test_distribution_where_a_second_sequence_arrives():
    """The second token is drawn where the first sequence is no longer alone."""
    case, runs = RowCase(temp=1.0), 2000 if LONG else 80
    case.counts, model = Counter(), case.model()
    mx.random.seed(0)
    for _ in range(runs):
        generator = BatchGenerator(model, num_draft_tokens=3, **AT_ONCE)
        (uid,) = generator.insert([PROMPT], max_tokens=[2], samplers=[make_sampler(1.0)])
        texts = run(generator, n_steps=2)
        generator.insert([[2]], max_tokens=[1], samplers=[make_sampler(1.0)])
        case.counts[tuple(run(generator, texts)[uid].tokens)] += 1
    assert case.p_value(runs) > LEVEL


def test_rows_of_equal_samplers_are_drawn_together(monkeypatch):
    """Without drafts, in one call as in mlx-lm, and yet with a coin of XTC each."""
    sizes, call, case = [], Sampler.__call__, RowCase(**XTC)
    noted = lambda self, logprobs: (sizes.append((self.temp, len(logprobs))), call(self, logprobs))[1]  # noqa: E731
    monkeypatch.setattr(Sampler, "__call__", noted)
    mx.random.seed(0)
    generator = BatchGenerator(case.model(), num_draft_tokens=0, completion_batch_size=4, return_prompt_caches=False)
    samplers = [make_sampler(0.7), *(make_sampler(**case.options) for _ in range(200))]
    generator.insert([PROMPT] * 201, max_tokens=[40, *[3] * 200], samplers=samplers)
    texts = run(generator)
    assert max(n for temp, n in sizes if temp == 1.5) == 4
    assert {n for temp, n in sizes if temp == 0.7} == {1}
    case.counts = Counter(tuple(texts[uid].tokens[:2]) for uid in range(1, 201))
    assert case.p_value(200) > LEVEL


def test_rows_drawn_together_are_independent():
    """XTC's coins, too: the pair's distribution is the product."""
    case, n = RowCase(**XTC), 4000
    model = case.model()
    p, logits = case.next_token(model, PROMPT), model(mx.array([PROMPT]))[:, -1]
    logprobs = mx.repeat(logits - mx.logsumexp(logits, keepdims=True), 2 * n, axis=0)  # [2 n, V]
    mx.random.seed(0)
    first, second = np.array(make_sampler(**case.options)(logprobs)).reshape(2, n)
    observed, expected = np.zeros((VOCAB, VOCAB)), n * np.outer(p, p)
    np.add.at(observed, (first, second), 1)
    assert observed[expected == 0].sum() == 0
    assert p_value(observed[expected > 0], expected[expected > 0]) > LEVEL


def test_draft_vocabulary_of_a_batch():
    model = tiny_model("qwen3_5")
    model.drafting.lm_head = DraftLMHead(model.output_layer, [0, 1, 2])
    generator = BatchGenerator(model, num_draft_tokens=2)
    generator.insert(PROMPTS, max_tokens=[20] * 3)
    texts = run(generator, n_steps=8)
    written = {token for text in texts.values() for token in text.tokens}
    assert set(generator.decoder.drafter.lm_head.ids.tolist()) == {0, 1, 2, *itertools.chain(*PROMPTS), *written}
    texts = run(generator, texts)
    assert [texts[uid].tokens for uid in range(3)] == [plain(p, model, max_tokens=20) for p in PROMPTS]


@pytest.mark.parametrize("n", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_memory_is_flat_over_joins_and_leaves(n):
    generator, coins, used = BatchGenerator(model_of("qwen3_5"), num_draft_tokens=2), random.Random(0), []
    for i in range(n):
        prompt = [coins.randrange(32) for _ in range(coins.choice([1, 5, 300]))]
        generator.insert([prompt], max_tokens=[coins.randint(1, 9)])
        run(generator, {}, coins.randint(1, 3))
        if i % 10 == 9:
            run(generator)
            gc.collect()
            mx.synchronize()
            used.append(mx.get_active_memory())
    assert max(used) - min(used) < 1000  # bytes: less than a layer of one row


def test_one_step_waits_once_at_most(monkeypatch):
    """Without drafts no step waits before the next pass is on its way: plain decoding."""
    order: list[str] = []
    for name, original in (("verify", Decoder.verify), ("wait", Decoder.wait)):
        noted = lambda *args, name=name, call=original: (order.append(name), call(*args))[1]  # noqa: E731
        monkeypatch.setattr(Decoder, name, noted)
    generator = BatchGenerator(model_of("qwen3_5"), num_draft_tokens=0)
    generator.insert(PROMPTS[:2], max_tokens=[8, 8])
    run(generator)
    assert order[:6] == ["verify", "wait"] * 3
    assert order.count("verify") == 10


# Those that raise


@pytest.mark.parametrize("return_prompt_caches", [True, False])
@pytest.mark.parametrize("k", [0, 2])
def test_sampler_that_raises_leaves_the_random_state_to_the_others(k, return_prompt_caches):
    """mlx-lm's compiled samplers leave a random state behind that nothing can be drawn from."""
    mx.random.seed(3)
    samplers = [make_sampler(0.7), stock_sampler(0.7, top_k=32), make_sampler(0.7, top_k=32), stock_sampler(0.7), None]
    generator = BatchGenerator(model_of("qwen3_5"), num_draft_tokens=k, return_prompt_caches=return_prompt_caches)
    generator.insert([[i, 2] for i in range(5)], max_tokens=[12] * 5, samplers=samplers)
    texts = [*run(generator).values()]
    assert [text.finish_reason for text in texts] == ["length", "error", "error", "length", "length"]
    assert [len(text.tokens) for text in texts] == [12, 0, 0, 12, 12]
    assert all("top_k" in str(text.last.error) for text in texts[1:3])
    assert texts[4].tokens == plain([4, 2], model_of("qwen3_5"), max_tokens=12)
    mx.eval(mx.random.uniform())


@pytest.mark.parametrize(("k", "start"), [(0, 0), (3, 0), (0, 20)])
def test_quantized_rows_have_the_texts_of_single_runs(k, start):
    """From the first pass on, or from a token on that all reach together."""
    model, kv = model_of("qwen3_5"), dict(kv_bits=8, kv_group_size=32, quantized_kv_start=start)
    prompts = [PROMPTS[0] * 2, PROMPTS[2][:10], PROMPTS[2][-10:], [7] * (10 if start else 300)]
    generator = BatchGenerator(model, num_draft_tokens=k, kv=KVOptions(**kv), **AT_ONCE)
    generator.insert(prompts, max_tokens=[24] * 4)
    for prompt, text in zip(prompts, run(generator).values()):
        assert text.tokens == plain(prompt, model, max_tokens=24, **kv)
        own = next(c for c in text.last.prompt_cache if not isinstance(c, ArraysCache))
        assert own.bits == 8
        assert mtp([7], model, max_tokens=4, prompt_cache=text.last.prompt_cache, **kv) == after(
            prompt, text, model, kv
        )


def after(prompt, text, model, kv):
    """What follows in mlx-lm's own cache of a text."""
    cache = stock_prompt_cache(model)
    plain(prompt, model, max_tokens=len(text.tokens), prompt_cache=cache, **kv)
    return plain([7], model, max_tokens=4, prompt_cache=cache, **kv)


def test_drafts_of_unsure_rows_are_dropped():
    model = model_of("qwen3_5")
    generator = BatchGenerator(model, num_draft_tokens=3, copy_drafts="off", draft_p_min=1.0)
    generator.insert(PROMPTS[:2], max_tokens=[24] * 2)
    for prompt, text in zip(PROMPTS, run(generator).values()):
        assert (text.tokens, text.last.counts.drafted) == (plain(prompt, model, max_tokens=24), [])


def test_quantized_prompt_cache_is_refused():
    model = model_of("qwen3_5")
    generator, cache = BatchGenerator(model), make_prompt_cache(model)
    mtp([1, 2, 3], model, max_tokens=4, prompt_cache=cache, kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    with pytest.raises(ValueError, match="prompt 0 is quantized to 8 bits in groups of 32: give kv=KVOptions"):
        generator.insert([[1]], caches=[cache])
    assert len(generator) == 0


# The public function


def test_batch_generate_is_mlx_lms(trained, capsys):
    model, tokenizer = trained
    prompts = [tokenizer.encode(p) for p in ("def read(path):\n", "import os\n", "class A:\n    def f(self):\n")]
    options = dict(max_tokens=[12, 20, 16], return_token_ids=True, return_logprobs=True, verbose=True)
    stock = mlx_lm.batch_generate(model, tokenizer, prompts, **options)
    stock_out = capsys.readouterr().out.splitlines()
    ours = mlx_mtp.batch_generate(model, tokenizer, prompts, **options, num_draft_tokens=2)
    out = [line for line in capsys.readouterr().out.splitlines() if "Drafts" not in line]
    assert (ours.texts, ours.token_ids) == (stock.texts, stock.token_ids)
    for a, b in zip(ours.logprobs, stock.logprobs):
        assert a == pytest.approx(b, abs=0.1)  # bfloat16
    assert ours.stats.generation_tokens == stock.stats.generation_tokens
    assert ours.errors == [None] * 3
    assert all(sum(c.accepted) > 0 for c in ours.counts)
    assert [line.split(":")[0] for line in out] == [line.split(":")[0] for line in stock_out]


def test_batch_generate_samples_processes_and_fails_by_prompt(trained):
    model, tokenizer = trained
    penalty, sampler = make_logits_processors(repetition_penalty=1.3), make_sampler(0.8, seed=5)

    def failing(tokens, logits):
        raise RuntimeError("no")

    prompts = [tokenizer.encode(p) for p in ("def read(path):\n", "import os\n", "import re\n")]
    options = dict(max_tokens=12, return_token_ids=True)
    samplers, processors = [sampler, None, None], [[], penalty, [failing]]
    ours = mlx_mtp.batch_generate(model, tokenizer, prompts, samplers=samplers, logits_processors=processors, **options)
    first = plain(prompts[0], model, max_tokens=12, sampler=sampler)
    penalized = [plain(p, model, max_tokens=12, logits_processors=penalty) for p in prompts]
    assert ours.token_ids == [first, penalized[1], []]
    assert [str(e) for e in ours.errors] == ["None", "None", "no"]
    assert ours.texts[2] == ""
    assert ours.texts[1] == tokenizer.decode(ours.token_ids[1])
    for_all = mlx_mtp.batch_generate(model, tokenizer, prompts, logits_processors=penalty, **options)
    assert for_all.token_ids == penalized
