"""Seeds: the text is a function of the seed and the prompt alone, with exactly the distribution of plain decoding."""

import dataclasses
import itertools

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm import sample_utils
from mlx_lm.generate import BatchGenerator as StockBatchGenerator
from mlx_lm.generate import generate_step

import mlx_mtp
from mlx_mtp import make_sampler, mtp_generate_step
from mlx_mtp.layers.draft_lm_head import DraftLMHead
from mlx_mtp.sampling.noise import MAX_SEED, gumbel, uniform
from tests.support.chi_square import independence, p_value
from tests.support.decoding import PROMPT, mtp, plain
from tests.support.models import tiny_model
from tests.support.profiles import LONG
from tests.support.scripted import Scripted
from tests.support.ways import generate

LEVEL = 1e-4  # of each chi-square test
P = np.array([0.5, 0.25, 0.15, 0.08, 0.02])
OPTIONS = [
    pytest.param({"temp": 0.7, "top_p": 0.95, "top_k": 20}, marks=pytest.mark.slow),
    pytest.param({"temp": 1.0}, marks=pytest.mark.slow),
    {"temp": 1.5, "top_k": 20, "min_p": 0.1},
    {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.2},
]


def drawn(seed: int, position: int) -> int:
    """The token that the noise of a position draws from P."""
    return int(np.argmax(np.log(P) + np.array(gumbel(seed, position, len(P)))))


# Noise


def test_noise_draws_from_p():
    counts = np.bincount([drawn(11, i) for i in range(6000)], minlength=len(P))
    assert p_value(counts, P * counts.sum()) > LEVEL


@pytest.mark.parametrize("neighbour", ["position", "seed"])
def test_noise_of_neighbours_is_independent(neighbour):
    pairs = np.zeros((len(P), len(P)))
    for i in range(2500):
        other = {"position": (7, i + 1), "seed": (8, i)}[neighbour]
        pairs[drawn(7, i), drawn(*other)] += 1
    assert independence(pairs[:4, :4]) > LEVEL  # cells of the last are too rare


def test_uniform_number_is_independent_of_the_noise():
    uniforms = np.array([uniform(3, i) for i in range(4000)])
    tokens = np.array([drawn(3, i) for i in range(4000)])
    assert p_value(np.histogram(uniforms, 20, (0, 1))[0], [len(uniforms) / 20] * 20) > LEVEL
    table = [[((uniforms < 0.5) == half)[tokens == token].sum() for token in range(4)] for half in (True, False)]
    assert independence(table) > LEVEL


def test_each_seed_and_position_has_a_uniform_number_of_its_own():
    assert len({uniform(seed, position) for seed in range(20) for position in range(20)}) == 400


def test_noise_is_exact_in_its_tail(monkeypatch):
    """At the ends of MLX's uniform numbers too: small ones make the large noise that rare tokens need."""
    u = np.array([0.0, 2.0**-32, 2.0**-31, 1e-7, 1e-3, 0.5, 0.999, 0.9999], np.float32)
    monkeypatch.setattr(mx.random, "uniform", lambda shape, key: mx.array(u))
    exact = -np.log(-np.log1p(-(u.astype(np.float64) + 2.0**-33)))
    assert np.allclose(np.array(gumbel(0, 0, len(u))), exact, rtol=1e-5, atol=1e-5)


def test_uniform_numbers_are_fine_near_0():
    """``gumbel`` relies on steps of 2**-32, where a float32 in [0, 1) might have 2**-24."""
    u = np.array(mx.random.uniform(shape=(2**22,), key=mx.random.key(5)), np.float64)
    small = u[u < 2.0**-12] * 2.0**32
    assert len(small) > 800
    assert (small % 2**8 != 0).mean() > 0.9


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1, 1.5, "1", True])
def test_rejects_invalid_seeds(seed):
    with pytest.raises(ValueError, match=r"seed must be an integer from 0 to 2\*\*64 - 1"):
        make_sampler(temp=1.0, seed=seed)


def test_rejects_a_seed_without_coupling():
    for acceptance in ("match", "rejection"):
        with pytest.raises(ValueError, match=r"use mx\.random\.seed instead"):
            make_sampler(temp=1.0, seed=1, acceptance=acceptance)
    with pytest.raises(ValueError, match="must be one of rejection, coupled, match, not 'exact'"):
        make_sampler(temp=1.0, acceptance="exact")


def test_match_is_mlx_lms_sampler():
    sampler, stock = make_sampler(temp=0.8, top_p=0.9, acceptance="match"), sample_utils.make_sampler(0.8, 0.9)
    logprobs = mx.log(mx.array(P)[None])
    for seed in range(50):
        mx.random.seed(seed)
        want = stock(logprobs).item()
        mx.random.seed(seed)
        assert sampler(logprobs).item() == want


def test_coupled_without_a_seed_takes_a_random_one():
    assert make_sampler(temp=1.0, acceptance="coupled").seed != make_sampler(temp=1.0, acceptance="coupled").seed


# Through the loop


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3_5")


@pytest.fixture(scope="module")
def tokenizer(demo):
    return demo[1]


def variants(model, sampler, n):
    """The text with every kind of drafts, and without any, alone and beside others."""
    truth = PROMPT.tolist() + plain(PROMPT, model, max_tokens=n + 10, sampler=sampler)
    yield truth[len(PROMPT) :][:n]
    options = dict(text=truth, right=lambda i: i % 4 > 0, max_tokens=n, sampler=sampler)
    for way, depths in (("alone", (0, 1, 4, "auto")), ("batch of one", (2,)), ("batch of three", (0, 3, "auto"))):
        for depth in depths:
            yield generate(way, PROMPT, model, num_draft_tokens=depth, **options).tokens
    yield mtp(PROMPT, model, max_tokens=n, num_draft_tokens=3, sampler=sampler, draft_p_min=0.3)
    for lm_head in (DraftLMHead(model.output_layer, [*range(10)]), DraftLMHead(model.output_layer, None, 4)):
        model.drafting.lm_head = lm_head
        yield mtp(PROMPT, model, max_tokens=n, num_draft_tokens=2, sampler=sampler)
    model.drafting.lm_head = None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_text_for_each_seed(model, options):
    texts, seeds = set(), [0, MAX_SEED, *range(1, 200 if LONG else 1)]
    for seed in seeds:
        for text in variants(model, make_sampler(**options, seed=seed), 12):
            mx.random.uniform()  # another random state each time
            texts.add((seed, tuple(text)))
    assert len(texts) == len(seeds)
    assert LONG or len({text for _, text in texts}) == len(seeds)  # two of many may agree


def test_random_state_is_neither_read_nor_written(model):
    sampler = make_sampler(temp=1.0, top_p=0.9, min_p=0.05, top_k=10, xtc_probability=0.5, seed=4)
    texts = []
    for seed in (1, 2):
        mx.random.seed(seed)
        before = np.array(mx.random.state[0])
        texts.append(mtp(PROMPT, model, max_tokens=20, num_draft_tokens=3, sampler=sampler))
        assert np.array_equal(np.array(mx.random.state[0]), before)
    assert texts[0] == texts[1]


def test_goes_on_from_a_position(model):
    """A text in two parts, the second from the first's cache, is the text in one."""
    sampler, cache = make_sampler(temp=1.0, seed=9), mlx_mtp.make_prompt_cache(model)
    whole = mtp(PROMPT, model, max_tokens=20, num_draft_tokens=3, sampler=sampler)
    steps = mtp_generate_step(PROMPT, model, max_tokens=20, num_draft_tokens=3, sampler=sampler, prompt_cache=cache)
    first = [token for token, _, _ in itertools.islice(steps, 7)]
    steps.close()
    # The cache has all seven tokens: the next pass is over the eighth.
    rest = mtp([whole[7]], model, max_tokens=12, num_draft_tokens=2, sampler=sampler.at(8), prompt_cache=cache)
    assert first + [whole[7]] + rest == whole


def test_most_drafts_of_the_target_itself_are_accepted(model):
    """Where draft and target have one distribution, common noise makes them choose alike."""
    sampler = make_sampler(temp=0.7, seed=2)
    truth = PROMPT.tolist() + mtp(PROMPT, model, max_tokens=40, num_draft_tokens=0, sampler=sampler)
    counts = mlx_mtp.DraftCounts()
    scripted = Scripted(model, truth, lambda i: True)
    assert mtp(PROMPT, scripted, max_tokens=30, num_draft_tokens=3, sampler=sampler, counts=counts) == truth[11:41]
    assert sum(counts.accepted) > 0.8 * sum(counts.drafted)


# One sampler, any number of texts


def test_samplers_are_values():
    """They keep no state, and those of equal arguments are equal."""
    sampler = make_sampler(temp=1.0, seed=5, xtc_special_tokens=[1, 2])
    assert sampler == make_sampler(temp=1.0, seed=5, xtc_special_tokens=[1, 2])
    assert len({sampler, make_sampler(temp=1.0, seed=6), make_sampler(temp=1.0), make_sampler(temp=1.0)}) == 3
    for name in ("seed", "temp"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(sampler, name, 3)


def uses(model, tokenizer):
    """Every way to generate a text with a sampler: its name, and the tokens of 8."""
    prompt, options = PROMPT.tolist(), dict(max_tokens=8)

    def stream(sampler, **more):
        return [r.token for r in mlx_mtp.stream_generate(model, tokenizer, prompt, sampler=sampler, **options, **more)]

    def batch(sampler, prompts=(prompt, [5, 2]), **more):
        chosen = {"samplers": [sampler, make_sampler(0.5)]} if len(prompts) == 2 else {"sampler": sampler}
        more |= dict(return_token_ids=True, **options, **chosen)
        return mlx_mtp.batch_generate(model, tokenizer, [*prompts], **more).token_ids[0]

    def generator(sampler, k):
        generator = mlx_mtp.BatchGenerator(model, prefill_step_size=64)
        generator.insert([prompt], max_tokens=[8], samplers=[sampler], num_draft_tokens=[k])
        return [r.token for responses in iter(generator.next_generated, []) for r in responses]

    return {
        "plain": lambda sampler: stream(sampler, mtp=False),
        "MTP": stream,
        "copies": lambda sampler: stream(sampler, mtp=False, copy_drafts=4),
        "loop": lambda sampler: mtp(prompt, model, sampler=sampler, num_draft_tokens=2, **options),
        "batch": batch,
        "batch of one": lambda sampler: batch(sampler, [prompt]),
        "generator": lambda sampler: generator(sampler, 2),
        "generator without drafts": lambda sampler: generator(sampler, 0),
    }


def test_one_sampler_gives_one_text_at_every_use(model, tokenizer):
    """One after the other in any order, and twice in a row."""
    sampler, ways = make_sampler(1.0, seed=5), uses(model, tokenizer)
    names = ["plain", *ways, "batch", "plain", "MTP"]
    texts = [(name, ways[name](sampler)) for name in names]
    assert [name for name, text in texts if text != texts[0][1]] == []
    assert len(texts[0][1]) == 8
    assert ways["MTP"](make_sampler(1.0, seed=6)) != texts[0][1]


def mlx_lms(model, tokenizer):
    """mlx-lm's own functions: the tokens of 8."""
    prompt = PROMPT.tolist()

    def batch_generate(sampler):
        return mlx_lm.batch_generate(
            model, tokenizer, [prompt], sampler=sampler, max_tokens=8, return_token_ids=True
        ).token_ids[0]

    def stream_generate(sampler):
        return [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, 8, sampler=sampler)]

    def step(sampler):
        return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=8, sampler=sampler)]

    return [batch_generate, stream_generate, step]


def test_mlx_lms_functions_take_a_sampler_for_each_text(model, tokenizer):
    sampler = make_sampler(1.0, seed=5)
    want = uses(model, tokenizer)["MTP"](sampler)
    for use in mlx_lms(model, tokenizer):
        with pytest.raises(ValueError, match=r"give them sampler\.at\(0\), a new one for each text"):
            use(sampler)
        assert use(sampler.at(0)) == want


def test_rows_of_mlx_lms_batch_have_each_their_own(model, tokenizer):
    sampler, prompts = make_sampler(1.0, seed=5), [[5, 2], [7, 1, 3]]
    with pytest.raises(ValueError, match=r"sampler\.at\(0\) is for one text, not for 2: give each its own"):
        mlx_lm.batch_generate(model, tokenizer, prompts, sampler=sampler.at(0), max_tokens=4)
    generator = StockBatchGenerator(model)
    uids = generator.insert(prompts, max_tokens=[9, 9], samplers=[sampler.at(0), sampler.at(0)])
    tokens = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for r in responses:
            tokens[r.uid].append(r.token)
    assert [tokens[uid] for uid in uids] == [mtp(p, model, max_tokens=9, sampler=sampler) for p in prompts]


def test_a_sampler_of_a_text_that_has_begun_is_refused(model, tokenizer):
    at = make_sampler(1.0, seed=5).at(3)
    at(mx.zeros((1, 8)))
    for name, use in uses(model, tokenizer).items():
        if not name.startswith("server"):
            with pytest.raises(ValueError, match=r"sampler\.at\(3\) is for one text, and has drawn 1 of its tokens"):
                use(at)


def test_positions_are_not_negative():
    with pytest.raises(ValueError, match=r"The position of a token must be 0 or more, not -1\."):
        make_sampler(1.0, seed=5).at(-1)


def test_a_draft_model_has_no_seed(model, tokenizer):
    with pytest.raises(ValueError, match="A draft model samples by match"):
        mlx_mtp.generate(model, tokenizer, "a", mtp=False, draft_model=model, sampler=make_sampler(1.0, seed=5))


# Nothing that drafts draws from the random state


@pytest.mark.parametrize("depth", [0, 2])
def test_quantized_draft_rows_leave_the_random_state_alone(model, depth):
    """New tokens of the text join the draft vocabulary while it is generated."""
    model.drafting.lm_head = DraftLMHead(model.output_layer, [*range(6)], 4)
    try:
        texts = []
        for generate in (plain, lambda *args, **kwargs: mtp(*args, num_draft_tokens=depth, **kwargs)):
            mx.random.seed(1)
            texts.append(generate(PROMPT, model, max_tokens=30, sampler=sample_utils.make_sampler(0.7)))
    finally:
        model.drafting.lm_head = None
    assert texts[0] == texts[1]
