"""Seeds: the text is a function of the seed and the prompt alone, with exactly the distribution of plain decoding."""

import dataclasses
import itertools
from functools import partial

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator as StockBatchGenerator
from mlx_lm.generate import generate_step

import mlx_mtp
from mlx_mtp import make_sampler, mtp_generate_step
from mlx_mtp.core.drafts.settings import DraftLMHead, DraftSettings
from mlx_mtp.core.sampling.sampler import MAX_SEED, noise, noise_words, sample
from tests.support.decoding import PROMPT, mtp, plain
from tests.support.distribution import LEVEL, independence, p_value
from tests.support.models import FLASH, model_of
from tests.support.profiles import LONG
from tests.support.scripted import Scripted
from tests.support.ways import generate

P = np.array([0.5, 0.25, 0.15, 0.08, 0.02])
OPTIONS = [{"temp": 1.5, "top_k": 20, "min_p": 0.1}, {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1}]
OPTIONS += [{"temp": 0.7, "top_p": 0.95, "top_k": 20}, {"temp": 1.0}] * LONG


def words(seed: int, n: int) -> mx.array:
    """Of the first n positions."""
    return mx.array([noise_words(seed, i) for i in range(n)], mx.uint32)


def test_noise_draws_from_p_and_is_independent():
    """Of that of neighbours, and of the position's uniform number."""
    n, ids = 4000, mx.arange(len(P), dtype=mx.uint32)
    tokens, other = (np.array(sample(mx.array(P), noise(words(s, m)[:, :2], ids))) for s, m in ((7, n + 1), (8, 2500)))
    assert p_value(np.bincount(tokens, minlength=len(P)), P * (n + 1)) > LEVEL
    uniforms = np.array(words(7, n)[:, 2]) / 2.0**32
    assert p_value(np.histogram(uniforms, 20, (0, 1))[0], [n / 20] * 20) > LEVEL
    halves = (uniforms < 0.5).astype(int)
    for a, b in ((tokens[:-1], tokens[1:]), (tokens[:2500], other), (tokens[:-1], halves)):
        is_frequent = (a < 4) & (b < 4)  # cells of the last token are too rare
        assert independence(a[is_frequent], b[is_frequent]) > LEVEL
    assert len({noise_words(seed, position) for seed in range(20) for position in range(20)}) == 400


def test_noise_of_a_token_is_its_own():
    """The same among any other tokens, and independent of that of the tokens and positions beside it, in all of its bits."""
    n, size, key = 64, 4096, words(3, 64)[:, :2]
    u = np.array(noise(key, mx.arange(size, dtype=mx.uint32)))  # [n, size]
    ids = np.random.default_rng(1).permutation(size)[:100]
    assert np.array_equal(np.array(noise(key, mx.array(ids, mx.uint32))), u[:, ids])
    assert np.array_equal(np.array(noise(key[5:6], mx.array(ids[None, :7], mx.uint32)))[0], u[5, ids[:7]])
    for digits in (u, u * 64 % 1, u * 4096 % 1):  # the first bits, and later ones
        cells = (digits * 16).astype(int)
        assert p_value(np.bincount(cells.ravel(), minlength=16), [n * size / 16] * 16) > LEVEL
        for apart in (1, 2, 32):
            for a, b in ((cells[:, :-apart], cells[:, apart:]), (cells[:-apart], cells[apart:])):
                assert independence(a.ravel(), b.ravel()) > LEVEL


def test_noise_is_exact_in_its_tail():
    """Small numbers decide between rare tokens: MLX's, and those of seeds."""
    # ``draw`` relies on steps of 2**-32, where a float32 in [0, 1) might have 2**-24.
    ids = mx.arange(2**22, dtype=mx.uint32)
    for u in (mx.random.uniform(shape=ids.shape, key=mx.random.key(5)), noise(words(5, 1)[:, :2], ids)):
        small = np.array(u, np.float64).ravel()
        small = small[small < 2.0**-12] * 2.0**32
        assert len(small) > 800
        assert (small % 2**8 != 0).mean() > 0.9
    # Of two tokens, the one with the smaller exponential number relative to its probability, at both ends of the numbers.
    numbers = np.array([0.0, 2.0**-32, 2.0**-31, 1e-7, 1e-3, 0.5, 0.999, 0.9999, 1 - 2.0**-24])
    e = -np.log1p(-np.minimum(numbers + 2.0**-33, 1 - 2.0**-24))
    for i, other in enumerate(numbers):
        for factor, want in ((0.999, 0), (1.001, 1)):
            p = mx.array(np.stack([np.full(len(e), 1.0), e / e[i] * factor], axis=-1), mx.float32)
            u = mx.array(np.stack([np.full(len(e), other), numbers], axis=-1), mx.float32)
            assert sample(p, u).tolist() == [want] * len(e)
    # Whatever the numbers, a token of probability 0 loses.
    assert sample(mx.array([[0.0, 1e-30]] * 2), mx.array([[0.0, 1.0], [1.0, 0.0]])).tolist() == [1, 1]


def test_samplers_are_values():
    """They keep no state, those of equal arguments are equal, and coupled ones without a seed take a random one."""
    sampler = make_sampler(temp=1.0, seed=5, xtc_special_tokens=[1, 2])
    assert sampler == make_sampler(temp=1.0, seed=5, xtc_special_tokens=[1, 2])
    assert len({sampler, make_sampler(temp=1.0, seed=6), make_sampler(temp=1.0), make_sampler(temp=1.0)}) == 3
    assert len({make_sampler(temp=1.0, acceptance="coupled").seed for _ in range(2)}) == 2
    for name in ("seed", "temp"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(sampler, name, 3)
    # Of valid arguments
    for options, message in [
        *((dict(seed=s), r"seed must be an integer from 0 to 2\*\*64 - 1") for s in (-1, MAX_SEED + 1, 1.5, "1", True)),
        *((dict(seed=1, acceptance=a), r"use mx\.random\.seed instead") for a in ("match", "rejection")),
        (dict(acceptance="exact"), "must be one of rejection, coupled, match, not 'exact'"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_sampler(temp=1.0, **options)
    with pytest.raises(ValueError, match=r"The position of a token must be 0 or more, not -1\."):
        make_sampler(1.0, seed=5).at(-1)


@pytest.fixture(scope="module")
def model():
    return model_of("qwen3_5")


def variants(model, sampler, n):
    """The text with every kind of drafts, and without any, alone and beside others."""
    truth = PROMPT.tolist() + plain(PROMPT, model, max_tokens=n + 10, sampler=sampler)
    yield truth[len(PROMPT) :][:n]
    options = dict(text=truth, right=lambda i: i % 4 > 0, max_tokens=n, sampler=sampler)
    depths = {"alone": (0, 1, 4, "auto"), "batch of three": (0, 2, 3, "auto")}
    for way in depths:
        for depth in depths[way] if LONG else depths[way][1::2]:
            yield generate(way, PROMPT, model, num_draft_tokens=depth, **options).tokens
    yield mtp(PROMPT, model, max_tokens=n, num_draft_tokens=3, sampler=sampler, draft_p_min=0.3)
    for lm_head in (DraftLMHead(model.output_layer, [*range(10)]), DraftLMHead(model.output_layer, None, 4)):
        model.draft_settings = DraftSettings(lm_head=lm_head)
        yield mtp(PROMPT, model, max_tokens=n, num_draft_tokens=2, sampler=sampler)
    model.draft_settings = DraftSettings()


@pytest.mark.parametrize(
    ("family", "options"), [*(("qwen3_5", each) for each in OPTIONS), (FLASH, OPTIONS[-1])], ids=str
)
def test_one_text_for_each_seed(family, options):
    model = model_of(family)
    texts, seeds = set(), [0, MAX_SEED, *range(1, 200 if LONG else 1)]
    for seed in seeds:
        for text in variants(model, make_sampler(**options, seed=seed), 12 if LONG else 9):
            mx.random.uniform()  # another random state each time
            texts.add((seed, tuple(text)))
    assert len(texts) == len(seeds)
    assert LONG or len({text for _, text in texts}) == len(seeds)  # two of many may agree


@pytest.mark.parametrize("draft_bits", [None, 4])
def test_random_state_is_neither_read_nor_written(model, draft_bits, monkeypatch):
    """Nor where new tokens of the text join a quantized draft vocabulary."""
    if draft_bits is not None:
        lm_head = DraftLMHead(model.output_layer, [*range(6)], draft_bits)
        monkeypatch.setattr(model, "draft_settings", DraftSettings(lm_head=lm_head))
    sampler = make_sampler(temp=1.0, top_p=0.9, min_p=0.1, top_k=10, xtc_probability=0.5, seed=4)
    texts = []
    for seed in (1, 2):
        mx.random.seed(seed)
        before = np.array(mx.random.state[0])
        texts.append(mtp(PROMPT, model, max_tokens=20, num_draft_tokens=3, sampler=sampler))
        assert np.array_equal(np.array(mx.random.state[0]), before)
    assert texts[0] == texts[1]


def test_goes_on_from_a_position(model):
    """A text in two parts, the second from the first's cache, is the text in one."""
    options, cache = dict(max_tokens=20, num_draft_tokens=3), mlx_mtp.make_prompt_cache(model)
    sampler = make_sampler(temp=1.0, xtc_probability=0.5, seed=9)
    whole = mtp(PROMPT, model, sampler=sampler, **options)
    steps = mtp_generate_step(PROMPT, model, sampler=sampler, prompt_cache=cache, **options)
    first = [token for token, _, _ in itertools.islice(steps, 7)]
    steps.close()
    # The cache has all seven tokens: the next pass is over the eighth.
    rest = mtp([whole[7]], model, max_tokens=12, num_draft_tokens=2, sampler=sampler.at(8), prompt_cache=cache)
    assert first + [whole[7]] + rest == whole


def test_most_drafts_of_the_target_itself_are_accepted(model):
    """Where draft and target have one distribution, common noise makes them choose alike."""
    sampler, counts = make_sampler(temp=0.7, seed=2), mlx_mtp.DraftCounts()
    truth = PROMPT.tolist() + mtp(PROMPT, model, max_tokens=40, num_draft_tokens=0, sampler=sampler)
    options = dict(max_tokens=30, num_draft_tokens=3, sampler=sampler, counts=counts)
    assert mtp(PROMPT, Scripted(model, truth, lambda i: True), **options) == truth[11:41]
    assert sum(counts.accepted) > 0.8 * sum(counts.drafted)


# One sampler, any number of texts


def test_one_sampler_gives_one_text_at_every_use(model, demo):
    """One after the other in any order, and twice in a row; but not where one text of it has begun."""
    prompt, options = PROMPT.tolist(), dict(max_tokens=8)

    def stream(sampler, **more):
        return [r.token for r in mlx_mtp.stream_generate(model, demo[1], prompt, sampler=sampler, **options, **more)]

    def batch(prompts, **chosen):
        chosen |= dict(return_token_ids=True, **options)
        return mlx_mtp.batch_generate(model, demo[1], prompts, **chosen).token_ids[0]

    ways = {
        "plain": partial(stream, mtp=False),
        "MTP": stream,
        "copies": partial(stream, mtp=False, copy_drafts=4),
        "loop": lambda sampler: mtp(prompt, model, sampler=sampler, num_draft_tokens=2, **options),
        "batch": lambda sampler: batch([prompt, [5, 2]], samplers=[sampler, make_sampler(0.5)]),
        "batch of one": lambda sampler: batch([prompt], sampler=sampler),
    }
    sampler = make_sampler(1.0, seed=5)
    texts = [(name, ways[name](sampler)) for name in ["plain", *ways, "batch", "plain", "MTP"]]
    assert [name for name, text in texts if text != texts[0][1]] == []
    assert len(texts[0][1]) == 8
    assert ways["MTP"](make_sampler(1.0, seed=6)) != texts[0][1]
    begun = sampler.at(3)
    begun(mx.zeros((1, 8)))
    for use in ways.values():
        with pytest.raises(ValueError, match=r"sampler\.at\(3\) is for one text, and has sampled 1 of its tokens"):
            use(begun)


def test_mlx_lms_functions_take_a_sampler_for_each_text(model, demo):
    sampler, prompt, tokenizer = make_sampler(1.0, seed=5), PROMPT.tolist(), demo[1]
    want, batch = mtp(prompt, model, max_tokens=8, sampler=sampler), dict(max_tokens=8, return_token_ids=True)
    for use in (
        lambda s: mlx_lm.batch_generate(model, tokenizer, [prompt], sampler=s, **batch).token_ids[0],
        lambda s: [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, 8, sampler=s)],
        lambda s: [token for token, _ in generate_step(PROMPT, model, max_tokens=8, sampler=s)],
    ):
        with pytest.raises(ValueError, match=r"give them sampler\.at\(0\), a new one for each text"):
            use(sampler)
        assert use(sampler.at(0)) == want
    # Rows of its batch have each their own.
    prompts = [[5, 2], [7, 1, 3]]
    with pytest.raises(ValueError, match=r"sampler\.at\(0\) is for one text, not for 2: give each its own"):
        mlx_lm.batch_generate(model, tokenizer, prompts, sampler=sampler.at(0), max_tokens=4)
    generator = StockBatchGenerator(model)
    uids = generator.insert(prompts, max_tokens=[9, 9], samplers=[sampler.at(0), sampler.at(0)])
    tokens = [(r.uid, r.token) for responses in iter(generator.next_generated, []) for r in responses]
    for uid, p in zip(uids, prompts):
        assert [token for u, token in tokens if u == uid] == mtp(p, model, max_tokens=9, sampler=sampler)
