"""Each row of a batch equals its single run, whatever the others do; and what a batch and each of its prompts may ask for."""

import copy
import gc
import itertools
import random
import re
from contextlib import closing
from unittest.mock import Mock

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.sample_utils import make_sampler as stock_sampler

import mlx_mtp
from mlx_mtp import Depth, DraftCounts, TextOptions, batch_generate, make_prompt_cache, make_sampler
from mlx_mtp.core.batch import scheduler
from mlx_mtp.core.batch.generator import BatchGenerator
from mlx_mtp.core.caches import rows
from mlx_mtp.core.decoding import head
from mlx_mtp.core.decoding.decoder import Decoder
from mlx_mtp.core.drafts.settings import DraftLMHead, DraftSettings
from mlx_mtp.core.sampling.sampler import Sampler
from mlx_mtp.errors import FAILED_PASS
from tests.support.batches import AT_ONCE, Fault, faulty, run
from tests.support.decoding import mtp, plain
from tests.support.distribution import PROMPT
from tests.support.models import model_of, tiny_model
from tests.support.profiles import LONG
from tests.support.prompt_store import names

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]]


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


@pytest.mark.parametrize(("k", "company"), [(0, []), (3, [[5, 6, 7]])], ids=["alone", "beside another"])
@pytest.mark.parametrize("n", [1, 2, 5] if LONG else [1, 3])
def test_each_position_of_a_prompt_may_be_an_embedding(n, k, company):
    """The last one, too, which the first window of a batch begins with."""
    model, prompt = model_of("qwen3_5"), PROMPTS[2][:n]
    for given in range(n):
        scale = mx.where(mx.arange(n) == given, 3.0, 1.0)[:, None]
        embeddings = model.model.embed_tokens(mx.array(prompt)) * scale - 0.5 * (scale - 1)
        alone = make_prompt_cache(model)
        want = mtp(prompt, model, max_tokens=9, prompt_cache=alone, input_embeddings=embeddings)
        assert want == plain(prompt, model, max_tokens=9, input_embeddings=embeddings)
        generator = BatchGenerator(model, num_draft_tokens=k)
        generator.insert(company, max_tokens=[30] * len(company))
        texts = run(generator, n_steps=4 * len(company))
        (uid,) = generator.insert([prompt], max_tokens=[9], input_embeddings=[embeddings])
        text = run(generator, texts)[uid]
        assert text.tokens == want
        assert [text.tokens for text in texts.values()][:-1] == [plain(p, model, max_tokens=30) for p in company]
        for name in ("keys", "values"):  # of the head
            ours, theirs = (getattr(c[-2], name)[:, :, : n + 8] for c in (text.last.prompt_cache, alone))
            assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth", [0, 3])
def test_texts_of_equal_samplers_are_drawn_together(depth, monkeypatch):
    """In one call for all positions, and one for each draft; also those with seeds of their own."""
    calls, support = [], Sampler.support
    noted = lambda self, x, *args: (calls.append((self.temperature, len(x))), support(self, x, *args))[1]  # noqa: E731
    monkeypatch.setattr(Sampler, "support", noted)
    generator = BatchGenerator(model_of("qwen3_5"), num_draft_tokens=depth, copy_drafts="off", **AT_ONCE)
    samplers = [make_sampler(0.7), None, *(make_sampler(1.5, seed=seed) for seed in (None, None, None, 5, 6))]
    generator.insert([PROMPT] * 7, max_tokens=[40] * 7, samplers=samplers)
    run(generator, n_steps=4)
    calls.clear()
    run(generator, n_steps=1)
    targets = [(0.7, depth + 1), (1.5, 3 * (depth + 1)), (1.5, 2 * (depth + 1))]
    assert sorted(calls) == sorted(targets + [(0.7, 1), (1.5, 3), (1.5, 2)] * depth)


def test_draft_vocabulary_of_a_batch():
    model = tiny_model("qwen3_5")
    model.draft_settings = DraftSettings(lm_head=DraftLMHead(model.output_layer, [0, 1, 2]))
    generator = BatchGenerator(model, num_draft_tokens=2)
    generator.insert(PROMPTS, max_tokens=[20] * 3)
    texts = run(generator, n_steps=8)
    written = {token for text in texts.values() for token in text.tokens}
    assert set(generator.decoder.drafter.lm_head.ids.tolist()) == {0, 1, 2, *itertools.chain(*PROMPTS), *written}
    texts = run(generator, texts)
    assert [texts[uid].tokens for uid in range(3)] == [plain(p, model, max_tokens=20) for p in PROMPTS]
    # And of the text before, in a prompt cache
    cache, before = texts[0].last.prompt_cache, set(texts[0].last.all_tokens)
    generator.insert([[7], [8]], max_tokens=[20, 2], caches=[cache, None])
    texts = run(generator, n_steps=2)
    assert before | {7, 8} <= set(generator.decoder.drafter.lm_head.ids.tolist())
    texts = run(generator, texts, 4)  # one text has left, and its tokens with it
    assert [text.finish_reason for text in texts.values()] == [None, "length"]
    assert set(generator.decoder.drafter.lm_head.ids.tolist()) == {0, 1, 2, 7, *before, *texts[3].tokens}


def test_memory_is_flat_over_joins_and_leaves():
    generator, coins, used = BatchGenerator(model_of("qwen3_5"), num_draft_tokens=2), random.Random(0), []
    for i in range(500 if LONG else 20):
        prompt = [coins.randrange(32) for _ in range(coins.choice([1, 5, 300]))]
        generator.insert([prompt], max_tokens=[coins.randint(1, 9)])
        run(generator, {}, coins.randint(1, 3))
        if i % 10 == 9:
            run(generator)
            gc.collect()
            mx.synchronize(generator.stream)  # passes hold their arrays until they end
            used.append(mx.get_active_memory())
    assert max(used) - used[0] < 1000  # bytes: less than a layer of one row. What other tests held may be freed later
    generator.insert([[1, 2, 3]])
    run(generator, {}, 2)
    generator.close()
    assert (len(generator), generator.prompt_cache_nbytes) == (0, 0)


@pytest.mark.parametrize("return_prompt_caches", [True, False])
def test_waiting_prompts_hold_no_memory(return_prompt_caches):
    """A prompt is read once it can join. Those that take the place of texts that have just ended are held beside them."""
    model, held = model_of("qwen3_5"), {}
    options = dict(completion_batch_size=4, return_prompt_caches=return_prompt_caches, num_draft_tokens=0)
    for n in (4, 32, *([256] if LONG else [])):
        generator, nbytes, lengths = BatchGenerator(model, **options, **AT_ONCE), [], random.Random(n)
        generator.insert(
            [[i % 32] * lengths.randrange(1, 40) for i in range(n)], max_tokens=[2 + i % 7 for i in range(n)]
        )
        n_texts, n_rows = 0, []
        while len(generator) > 0:
            n_texts += sum(r.finish_reason is not None for r in generator.next()[1])
            nbytes.append(generator.prompt_cache_nbytes)
            n_rows.append(sum(s.n_prefilled > 0 for s in generator.prompts) + len(generator.decoder))
        held[n] = max(nbytes)
        assert n_texts == n
        assert max(n_rows) < 8
    assert max(held.values()) < 1.8 * held[4]


@pytest.mark.parametrize("k", [0, 2])
def test_prompts_that_are_read_late_cost_no_step(k):
    """A long batch takes as many steps as with prompts of one token, of which nothing is prefilled."""
    n_steps = []
    for n in (1, 5):
        generator = BatchGenerator(model_of("qwen3_5"), completion_batch_size=3, num_draft_tokens=k, **AT_ONCE)
        generator.insert([[i] * n for i in range(12)], max_tokens=[4, 7, 5] * 4)
        run(generator, n_steps=1)
        with generator.stats() as stats:
            run(generator)
        n_steps.append(stats.generation_steps)
    assert n_steps[1] <= n_steps[0] + 1


@pytest.mark.parametrize("return_prompt_caches", [True, False])
def test_one_step_waits_once_at_most(monkeypatch, return_prompt_caches):
    """Without drafts no step waits before the next pass is on its way: plain decoding. For prompt caches there is one more."""
    order: list[str] = []
    for name, original in (("verify", Decoder.verify), ("read", Decoder.read)):
        noted = lambda *args, name=name, call=original: (order.append(name), call(*args))[1]  # noqa: E731
        monkeypatch.setattr(Decoder, name, noted)
    generator = BatchGenerator(model_of("qwen3_5"), num_draft_tokens=0, return_prompt_caches=return_prompt_caches)
    generator.insert(PROMPTS[:2], max_tokens=[8, 8])
    run(generator)
    assert order[:5] == ["verify", *["verify", "read"] * 2]
    assert order.count("verify") == 9 + return_prompt_caches


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


@pytest.mark.parametrize("seed", range(20 if LONG else 2))
def test_quantized_texts_depend_on_nothing_beside_them(seed, monkeypatch):
    """Neither the chunks of their prompts, nor other rows that are quantized earlier or later, nor the step at which they join.

    Two bits show each token that is read before or after its keys and values are quantized.
    """
    monkeypatch.setattr(rows, "EVERY", 16)  # mlx-lm's places, if its chunks are as long
    model, coins = model_of("qwen3_5"), random.Random(seed)
    kv = dict(kv_bits=2, kv_group_size=32, quantized_kv_start=coins.choice([0, 0, 1, 20, 40]))
    options = dict(num_draft_tokens=coins.choice([0, 2, "auto"]), prefill_step_size=coins.choice([3, 16, 2048]))
    generator, texts = BatchGenerator(model, completion_batch_size=coins.choice([2, 4]), **options, **kv), {}
    prompts = [[coins.randrange(32) for _ in range(coins.choice([1, 1, 2, 9, 30, 50]))] for _ in range(10)]
    for prompt in prompts:
        generator.insert([prompt], max_tokens=[20])
        run(generator, texts, coins.choice([0, 1, 4, 12]))
    texts, caches = run(generator, texts), [stock_prompt_cache(model) for _ in prompts]
    for prompt, text, theirs in zip(prompts, texts.values(), caches):
        assert text.tokens == plain(prompt, model, max_tokens=20, prompt_cache=theirs, prefill_step_size=16, **kv)
        assert names(text.last.prompt_cache[: len(theirs)]) == names(theirs)
    generator.insert([[7]] * 10, max_tokens=[4] * 10, caches=[text.last.prompt_cache for text in texts.values()])
    for theirs, text in zip(caches, run(generator).values()):
        assert text.tokens == plain([7], model, max_tokens=4, prompt_cache=theirs, **kv)


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


def test_mlx_lms_batch_and_mtp_resume_each_others_caches(trained):
    model, tokenizer = trained
    prompts, more = [tokenizer.encode(p) for p in ("import os\nimport sys\n", "x = 1")], [[5, 9], [7]]
    options, want = dict(return_token_ids=True), [plain(p, model, max_tokens=n) for p, n in zip(prompts, (8, 5))]
    first = mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=[8, 5], return_prompt_caches=True, **options)
    assert (first.token_ids, first.texts) == (want, [tokenizer.decode(tokens) for tokens in want])
    second = mlx_lm.batch_generate(model, tokenizer, more, prompt_caches=first.caches, max_tokens=6, **options)
    for prompt, tokens, cache, question, answer in zip(prompts, want, first.caches, more, second.token_ids):
        history = (prompt + tokens)[: cache[3].offset]  # the last token of a batch is not in its caches
        assert len(history) >= len(prompt + tokens) - 1
        assert answer == plain(history + question, model, max_tokens=6)
        assert mtp(question, model, max_tokens=6, prompt_cache=cache) == answer


def test_batch_generate_samples_processes_and_fails_by_prompt(trained):
    model, tokenizer = trained
    penalty, sampler = make_logits_processors(repetition_penalty=1.3), make_sampler(0.8, seed=5)
    prompts = [tokenizer.encode(p) for p in ("def read(path):\n", "import os\n", "import re\n")]
    own = dict(samplers=[sampler, None, None], logits_processors=[[], penalty, [faulty(0)]])
    ours = mlx_mtp.batch_generate(model, tokenizer, prompts, max_tokens=12, return_token_ids=True, **own)
    first = plain(prompts[0], model, max_tokens=12, sampler=sampler)
    penalized = plain(prompts[1], model, max_tokens=12, logits_processors=penalty)
    assert ours.token_ids == [first, penalized, []]
    assert [type(e) for e in ours.errors] == [type(None), type(None), Fault]
    assert ours.texts[1:] == [tokenizer.decode(penalized), ""]
    for_all = mlx_mtp.batch_generate(model, tokenizer, prompts[1:], logits_processors=penalty, max_tokens=12)
    assert for_all.texts[0] == ours.texts[1]


TWO = [[3, 1, 4], [1, 5]]

DRAFTS = "num_draft_tokens must be auto or from 0 to 8, not"
COPIES = "copy_drafts must be auto, off or from 1 to 16, not"
POSITIVE = "must be an integer of 1 or more, not"
LIMIT, EACH = f"max_tokens of prompt 1 {POSITIVE}", "must have an entry for each prompt: 2, not"
OUT_OF_RANGE = [
    *(("num_draft_tokens", n, f"{DRAFTS} {n}.") for n in (-1, 9, 99, 2.0, 2.5, "3", "off", True)),
    *(("copy_drafts", n, f"{COPIES} {n}.") for n in (-1, 0, 17, 4.0, "4", "on", True)),
]


def test_refuses_options_out_of_range(demo):
    """Alone, in a batch, and of one prompt of a batch: all of a call, what runs goes on, and uids are those to come."""
    model = model_of("qwen3_5")
    generator = BatchGenerator(model)
    (first,) = generator.insert([[9]], max_tokens=[8])
    texts = run(generator, n_steps=2)
    numbers, quantized = ("max_tokens", "completion_batch_size", "prefill_step_size"), make_prompt_cache(model)
    mtp([1, 2, 3], model, max_tokens=4, prompt_cache=quantized, kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    cases = [
        *((use, {name: value}, message) for use in ("alone", "batch") for name, value, message in OUT_OF_RANGE),
        ("alone", dict(prompt=[]), "must be provided"),
        ("alone", dict(draft_p_min=1.1), "draft_p_min must be a probability"),
        *(("alone", dict(prefill_step_size=n), f"prefill_step_size {POSITIVE} {n}.") for n in (0, 16.0)),
        *(("batch", {name: n}, f"{name} {POSITIVE} {n}.") for name in numbers for n in (0, -1, 2.5, None)),
        *((use, dict(max_kv_size=64), "max_kv_size is not supported: the caches of") for use in ("alone", "batch")),
        ("batch", dict(num_draft_tokens=Depth(3)), DRAFTS),  # of one sequence
        *(("insert", {name: [2, value]}, message) for name, value, message in OUT_OF_RANGE),
        *(("insert", dict(max_tokens=[2, n]), f"{LIMIT} {n}.") for n in (0, 2.5, None, "3")),
        *(("insert", dict(options=[TextOptions(), TextOptions(n)]), f"{LIMIT} {n}.") for n in (0, 0.0, 2.5, -1.5, "3")),
        *(("alone", dict(max_tokens=n), f"max_tokens must be an integer, not {n}.") for n in (0.0, 2.5, "3")),
        ("insert", dict(num_draft_tokens=[Depth(3), None]), DRAFTS),
        ("insert", dict(num_draft_tokens=0), f"num_draft_tokens {EACH} 0."),
        *(("insert", dict(copy_drafts=value), f"copy_drafts {EACH} {value}.") for value in (0, "auto")),
        ("insert", dict(max_tokens=5), f"max_tokens {EACH} 5."),
        ("insert", dict(samplers=[None]), f"samplers {EACH} 1."),
        ("insert", dict(caches=[quantized, None]), "prompt 0 is quantized to 8 bits in groups of 32: give kv_bits=8"),
        ("batch_generate", dict(max_tokens=0), f"max_tokens of prompt 0 {POSITIVE} 0."),
        ("batch_generate", dict(prompts=[[1], []]), "Prompt 1 is empty."),
        ("batch_generate", dict(max_tokens=[3]), f"max_tokens {EACH} 1."),
        ("batch_generate", dict(num_draft_tokens=9), f"{DRAFTS} 9."),
        ("batch_generate", dict(prompt_caches=[None, [1]]), "cache has 1 entries, and this model needs 4"),
    ]
    uses = dict(
        alone=lambda prompt=(1,), **bad: mtp(prompt, model, **bad),
        batch=lambda **bad: BatchGenerator(model, **bad),
        insert=lambda **bad: generator.insert(TWO, **bad),
        batch_generate=lambda **bad: batch_generate(model, demo[1], **dict(prompts=TWO, max_tokens=[3, 3]) | bad),
    )
    for use, options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            uses[use](**options)
        assert len(generator) == 1
    assert generator.insert([[8]], max_tokens=[2]) == [first + 1]
    texts = run(generator, texts)
    assert [text.tokens for text in texts.values()] == [plain([t], model, max_tokens=n) for t, n in ((9, 8), (8, 2))]


def test_a_keyword_replaces_the_option_of_its_name():
    """Options may be given whole, by keywords, or both: alone, for a batch, and for each of its prompts."""
    model, whole, counts = model_of("qwen3_5"), TextOptions(9, num_draft_tokens=2), DraftCounts()
    truth = plain([1, 2], model, max_tokens=9)
    assert mtp([1, 2], model, options=whole, counts=counts) == truth
    assert len(counts.drafted) == 2
    assert mtp([1, 2], model, options=whole, max_tokens=3) == truth[:3]
    for options, most in (({}, 9), (dict(max_tokens=5), 5)):
        with closing(BatchGenerator(model, options=whole, **options)) as generator:
            generator.insert([[1, 2]] * 2, options=[TextOptions(4, num_draft_tokens=1)] * 2, max_tokens=[3, 2])
            generator.insert([[1, 2]], draft_p_min=[0.0])
            texts = run(generator)
        assert [text.tokens for text in texts.values()] == [truth[:n] for n in (3, 2, most)]
        assert [len(text.last.counts.drafted) for text in texts.values()] == [1, 1, 2]


def test_stops_that_are_given_replace_the_ends_of_text(trained):
    model, tokenizer = trained
    (want,) = batch_generate(model, tokenizer, [[1, 2]], max_tokens=6, return_token_ids=True).token_ids
    stop = [want[3:4]]
    for given in ({"stop_tokens": stop}, {"options": TextOptions(6, stop_sequences=StopSequences(stop))}):
        batch = batch_generate(model, tokenizer, [[1, 2]], max_tokens=6, return_token_ids=True, **given)
        assert batch.token_ids == [want[: want.index(want[3])]]


CACHES = [(0, True), (2, False), ("auto", True), *[(0, False), (2, True), ("auto", False)] * LONG]


@pytest.mark.parametrize(("k", "return_prompt_caches"), CACHES)
def test_texts_end_at_their_limit_or_without_one(k, return_prompt_caches):
    """A limit below 0 is none: such a text ends with its stop sequence alone."""
    model, stop = model_of("qwen3_5"), StopSequences([[0]])

    def process(tokens, logits):  # the stop token after 20 tokens
        is_end = mx.arange(logits.shape[-1]) == 0
        return mx.where(is_end if len(tokens) >= 22 else ~is_end, logits, -mx.inf)

    generator = BatchGenerator(model, num_draft_tokens=k, max_tokens=5, return_prompt_caches=return_prompt_caches)
    limits = [-1, 1, None, 2, -100, 7]
    options = [TextOptions(n, logits_processors=[process], stop_sequences=stop) for n in limits]
    generator.insert([[9, i + 1] for i in range(len(limits))], options=options)
    texts = [*run(generator).values()]
    n_tokens = [5 if n is None else n if n > 0 else 21 for n in limits]
    for i, (n, text) in enumerate(zip(n_tokens, texts)):
        want = plain([9, i + 1], model, max_tokens=n, logits_processors=[process])
        want = want[: want.index(0) + 1] if 0 in want else want
        assert (text.tokens, text.finish_reason) == (want, "stop" if want[-1] == 0 else "length")
    assert (len(texts[0].tokens), len(texts[4].tokens)) == (21, 21)


def test_a_prompt_without_processors_of_its_own_has_none():
    """As in mlx-lm, ``None`` is not the generator's."""
    model, even = model_of("qwen3_5"), lambda tokens, logits: mx.where(mx.arange(logits.shape[-1]) % 2, -mx.inf, logits)
    generator = BatchGenerator(model, logits_processors=[even])
    generator.insert(TWO, max_tokens=[8, 8], logits_processors=[None, [even]])
    want = [plain(p, model, max_tokens=8, logits_processors=own) for p, own in zip(TWO, (None, [even]))]
    assert [text.tokens for text in run(generator).values()] == want


def test_few_inputs_of_the_head_are_pending(monkeypatch):
    """Where no step drafts, they would otherwise hold the hidden states of the whole text."""
    monkeypatch.setattr(head, "MAX_PENDING", 8)
    generator = BatchGenerator(model_of("qwen3_5"), num_draft_tokens=0, **AT_ONCE)
    generator.insert(PROMPTS, max_tokens=[40] * 3)
    seen = [max(generator.decoder.drafter.state.counts, default=0) for _ in range(35) if generator.next()]
    assert max(seen) == 8


@pytest.mark.parametrize("n_before", [0, 3], ids=["in its prompt", "in a step"])
def test_an_error_of_the_device_ends_one_text_and_the_others_begin_again(monkeypatch, n_before):
    """That whose chunk has failed, or the newest of a step. With a stop sequence that began before."""
    model, prompts = model_of("qwen3_5"), [[3, 1, 4, 1], [5, 9, 2], [6, 5, 3]]
    want = [plain(p, model, max_tokens=12) for p in prompts]
    want[0], stop = want[0][:7], want[0][5:7]
    error = RuntimeError(f"[METAL] {FAILED_PASS}: Impacting Interactivity")
    options = dict(max_tokens=12, stop_tokens=[stop], num_draft_tokens=2, **AT_ONCE)
    with closing(BatchGenerator(model, **options)) as generator:
        generator.insert(prompts[:2])
        texts = run(generator, n_steps=4)
        generator.insert(prompts[2:])
        run(generator, texts, n_steps=n_before)
        with monkeypatch.context() as m:
            m.setattr(*((scheduler, "prefill_part") if n_before == 0 else (Decoder, "verify")), Mock(side_effect=error))
            run(generator, texts, n_steps=1)
        run(generator, texts)
    assert [text.tokens for text in texts.values()][:2] == want[:2]
    assert texts[2].finish_reason == "error"
    assert texts[2].last.error is error
    assert texts[2].tokens == want[2][: len(texts[2].tokens)]


def test_a_text_of_embeddings_does_not_begin_again_by_its_tokens(monkeypatch):
    model, error = model_of("qwen3_5"), RuntimeError(f"[METAL] {FAILED_PASS}")
    with closing(BatchGenerator(model, max_tokens=12, num_draft_tokens=2, **AT_ONCE)) as generator:
        generator.insert([[3, 1, 4], [5, 9]], input_embeddings=[model.model.embed_tokens(mx.array([7, 8, 7])), None])
        texts = run(generator, n_steps=4)
        with monkeypatch.context() as m:
            m.setattr(Decoder, "verify", Mock(side_effect=error))
            run(generator, texts, n_steps=1)
        run(generator, texts)
    assert [text.last.error for text in texts.values()] == [error, error]
    assert texts[0].tokens == plain([7, 8, 7], model, max_tokens=12)[: len(texts[0].tokens)] != []
