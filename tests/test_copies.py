"""Copy drafts: the index against a search, and the loop with copies that are right or wrong at will."""

import itertools
import random
from functools import partial
from unittest.mock import Mock

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mlx_mtp import BatchGenerator, TextOptions, make_prompt_cache
from mlx_mtp.core.caches.positions import ImageSpan
from mlx_mtp.core.decoding.counts import DraftCounts
from mlx_mtp.core.decoding.sequence import without_images
from mlx_mtp.core.drafts.settings import Settings
from mlx_mtp.core.drafts.sources import N_GRAM, N_REJOIN, NEAR, PromptLookup
from mlx_mtp.core.pacing import MAX_COPY_TOKENS
from mlx_mtp.core.pacing.depth import Depth, Rates
from mlx_mtp.core.pacing.step_times import FREE, PLAIN_PLAN, Plan
from mlx_mtp.core.sampling.acceptance import n_leading
from tests.support.batches import run
from tests.support.decoding import mtp, plain
from tests.support.models import FAMILIES, FLASH, model_of
from tests.support.profiles import LONG
from tests.support.scripted import script_copies
from tests.support.ways import company_of, every_way, generate

REPEATS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 3, 1, 4, 1, 5]  # after the last five came 9, 2, 6, ...


def last_match(text: list[int]) -> int | None:
    """By search: the position after the last earlier occurrence of the text's last tokens."""
    ends = range(len(text) - 1, N_GRAM - 1, -1)
    return next((end for end in ends if text[end - N_GRAM : end] == text[-N_GRAM:]), None)


def rejoined(text: list[int], left: int | None) -> int | None:
    """By search: the position after the first two tokens like the text's last, up to 32 tokens behind where a match ended."""
    ends = range(left + N_REJOIN, left + NEAR + N_REJOIN) if left is not None else ()
    return next((end for end in ends if end < len(text) and text[end - N_REJOIN : end] == text[-N_REJOIN:]), None)


texts = st.lists(st.integers(0, 2), max_size=60)  # of few tokens, so that they repeat themselves

repeated = texts | st.lists(st.integers(-2, 9), min_size=5, max_size=12).map(lambda text: text * 3)


@given(texts, texts)
def test_finds_the_last_match_and_follows_it_while_it_is_right(prompt, answer):
    copies, text, left = PromptLookup(prompt), [*prompt], None
    assert copies.at == last_match(text)
    for token in answer:
        at = copies.at
        is_right = at is not None and text[at] == token
        left = at if at is not None and not is_right else left
        copies.observe([token])
        text.append(token)
        found = last_match(text)
        assert copies.at == (at + 1 if is_right else rejoined(text, left) if found is None else found)
        if copies.at is not None:
            n = min(copies.length, 64)
            assert n >= N_REJOIN
            assert text[copies.at - n : copies.at] == text[-n:]


@given(repeated, st.integers(0, 2))
def test_drafts_what_followed_up_to_an_image_and_goes_on_in_itself(text, n_unobserved):
    """Numbers below 0 stand for the tokens of images."""
    copies = PromptLookup(text)
    if copies.at is None:
        assert copies.acceptance_rates(n_unobserved) == []
        return
    followed = itertools.takewhile(lambda token: token >= 0, text[copies.at :] * 20)
    want = [*itertools.islice(followed, n_unobserved + MAX_COPY_TOKENS)][n_unobserved:]
    assert len(copies.acceptance_rates(n_unobserved)) == len(want)
    for k in range(1, len(want) + 1):
        assert copies.propose(k, n_unobserved).tolist() == want[:k]


def test_learns_how_often_copies_are_right_without_drafting():
    rng = random.Random(0)
    page = [rng.randrange(1000) for _ in range(300)]
    copies = PromptLookup(page)
    copies.observe(page[100:250])
    assert min(copies.acceptance_rates(0)) > 0.9
    for i in range(0, 288, 16):  # sixteen tokens of a match, and then another
        copies.observe([*page[i : i + 16], 2000])
    copies.observe(page[40:56])
    assert copies.acceptance_rates(0)[0] < 0.5  # after sixteen
    copies.observe(page[120:126])
    assert copies.acceptance_rates(0)[0] > 0.9  # after six
    assert copies.acceptance_rates(1)[0] < copies.acceptance_rates(0)[0]  # an unread token must be a copy, too
    assert len(copies.acceptance_rates(0)) == len(copies.acceptance_rates(1)) == MAX_COPY_TOKENS


def test_a_sequence_has_numbers_below_0_for_its_images():
    images, text = [ImageSpan(2, 1, 2), ImageSpan(5, 2, 2)], [7, 7, -3, -4, 7, -6, -7, -8, -9, 7, 7]
    for first, end in ((0, 7), (3, 7), (9, 11)):
        assert without_images([7] * (end - first), first, images) == text[first:end]


def test_a_saved_cache_keeps_the_text(tmp_path):
    model, file = model_of("qwen3_next"), str(tmp_path / "cache.safetensors")
    prompt_cache = make_prompt_cache(model)
    tokens = mtp(REPEATS, model, max_tokens=9, prompt_cache=prompt_cache)
    save_prompt_cache(file, prompt_cache)
    loaded, more, counts = load_prompt_cache(file), REPEATS[:5], DraftCounts()
    assert loaded[-1][2].tolist() == REPEATS + tokens
    options = dict(num_draft_tokens=0, copy_drafts=4, prompt_cache=loaded, counts=counts)
    assert mtp(more, model, max_tokens=12, **options) == plain(REPEATS + tokens + more, model, max_tokens=12)
    assert sum(counts.of("copies").drafted) > 0


def test_opens_a_cache_without_a_text():
    """Of a version that did not keep it, of mlx-lm, or of embeddings, behind which only the answer is known."""
    model = model_of("qwen3_5")
    older = make_prompt_cache(model)
    tokens = mtp(REPEATS, model, max_tokens=9, num_draft_tokens=2, prompt_cache=older)
    older[-1][2] = None
    older[-1].cache.pop()
    theirs = model.make_cache()
    text = REPEATS + plain(REPEATS, model, max_tokens=10, prompt_cache=theirs)
    assert text[:-1] == REPEATS + tokens
    for prompt_cache in (older, theirs):
        truth = plain([*text[: prompt_cache[1].offset], 7], model, max_tokens=9)
        assert mtp([7], model, max_tokens=9, copy_drafts=4, prompt_cache=prompt_cache) == truth
        assert prompt_cache[-1][2].tolist() == [7, *truth]  # what is known of it
    embeddings, prompt_cache = model.model.embed_tokens(mx.array(REPEATS)), make_prompt_cache(model)
    options = dict(input_embeddings=embeddings, max_tokens=9, copy_drafts=4, prompt_cache=prompt_cache)
    assert mtp([], model, **options) == tokens
    assert prompt_cache[-1][2].tolist() == tokens


@pytest.mark.parametrize("family", FAMILIES if LONG else ["qwen3_5", FLASH])
def test_a_model_without_a_head(family):
    model = model_of(family, mtp_num_hidden_layers=0)
    truth, counts, prompt_cache = plain(REPEATS, model, max_tokens=30), DraftCounts(), make_prompt_cache(model)
    assert truth == mtp(REPEATS, model, max_tokens=30, copy_drafts=8, counts=counts, prompt_cache=prompt_cache)
    assert sum(counts.of("copies").drafted) > 0
    rest = plain([*REPEATS, *truth, 7], model, max_tokens=9)
    assert mtp([7], model, max_tokens=9, copy_drafts="auto", prompt_cache=prompt_cache) == rest
    generator = BatchGenerator(model, num_draft_tokens=0, copy_drafts="auto")
    generator.insert([REPEATS, [7, 8]], max_tokens=[30, 6])  # the second one leaves the first alone
    assert [text.tokens for text in run(generator).values()] == [truth, plain([7, 8], model, max_tokens=6)]
    for options, message in [
        ({}, "no MTP head"),
        (dict(copy_drafts="off"), "no MTP head"),
        (dict(copy_drafts="auto", num_draft_tokens=2), "num_draft_tokens must be 0 for a model without .* head, not 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            mtp(REPEATS, model, **options)


def test_copies_are_off_where_the_number_of_drafts_is_given():
    for asked, copies in (({"num_draft_tokens": 2}, "off"), ({"num_draft_tokens": "auto"}, "auto"), ({}, "auto")):
        assert TextOptions(20, **asked).resolve(Settings(), has_head=True).copy_drafts == copies


@every_way
@pytest.mark.parametrize(("k", "n"), [(0, 16), (1, 8), (8, 8), ("auto", 16)])
def test_a_number_of_copies_is_not_limited_by_the_drafts(way, k, n, monkeypatch):
    """Nor by those of the texts beside it."""
    model, prompt = model_of("qwen3_5"), REPEATS[:5]
    truth = prompt + plain(prompt, model, max_tokens=24)
    script_copies(monkeypatch, [truth + [0] * 20, *company_of(model)], lambda i: True)
    text = generate(way, prompt, model, num_draft_tokens=k, copy_drafts=n, max_tokens=24)
    drafted, accepted = text.last.counts.of("copies")
    assert (text.tokens, len(drafted), accepted) == (truth[5:], n, drafted)
    assert drafted[0] <= 4  # a window of 8 copies yields 9 tokens; the first may have none


# The choice between them: on machines where a draft of the head, and a copy, take so many plain steps

MACHINES = [(0.1, 0.04), (0.25, 0.2), (0.8, 0.7)]
SHARES = [1.0, 0.8, 0.3, 0.0]  # the part of the answer's lines that are the prompt's


def decode(choose, machine, share, head_rate, seed):
    """Seconds for an answer; ``choose.next(rates)`` says what to draft, and ``choose.observe`` learns, as in the loop.

    The prompt has 60 lines of 12 tokens, and the answer repeats some of them.
    """
    rng, noise = random.Random(seed), random.Random(seed + 1)
    lines = [[rng.randrange(10_000) for _ in range(12)] for _ in range(60)]
    answer = [line if rng.random() < share else [rng.randrange(10_000) for _ in range(12)] for line in lines]
    prompt, answer = ([*itertools.chain(*of_lines)] for of_lines in (lines, answer))
    right = [rng.random() < head_rate for _ in range(len(answer) + 10)]
    copies, total, n, before, head = PromptLookup(prompt), 0.0, 0, PLAIN_PLAN, Rates(8)
    while n < len(answer):
        rates = copies.acceptance_rates(0)
        plan = choose.next([{"head": head.estimate} | ({"copies": rates} if rates else {})])
        if plan.skips_head:
            hits = [a == b for a, b in zip(copies.propose(plan.k, 0).tolist(), answer[n:])]
        else:
            hits = right[n : n + plan.k]
        n_accepted = min(n_leading(hits), plan.k, len(answer) - n - 1)
        seconds = 1 + plan.k * machine[plan.skips_head]
        is_clear = before.k > 0 and plan.k > 0 and before.skips_head <= plan.skips_head
        is_clear |= before == plan == PLAIN_PLAN
        if plan.k > 0 and not plan.skips_head:
            head.count_window(plan.k, n_accepted)
        choose.observe(plan, n_accepted, seconds * noise.lognormvariate(0, 0.05) if is_clear else None)
        copies.observe(answer[n : n + n_accepted + 1])
        total, n, before = total + seconds, n + n_accepted + 1, plan
    return total


def fixed(k, n_copies):
    """Always so many of the head's drafts, or of copies where there are any."""
    return Mock(next=lambda offers: Plan(n_copies, FREE) if "copies" in offers[0] and n_copies else Plan(k))


# By default each machine, text and head once or more.
CASES = itertools.product(MACHINES, SHARES, [0.0, 0.6, 0.9])
CASES = [case for i, case in enumerate(CASES) if LONG or i in (0, 4, 9, 14, 19, 23, 29, 30)]


@pytest.mark.parametrize(("machine", "share", "head_rate"), CASES)
def test_auto_takes_the_better_source(machine, share, head_rate):
    """Never slower than plain decoding, and near the best of all fixed choices."""

    def seconds(make):
        return sum(decode(make(), machine, share, head_rate, seed) for seed in range(3 if LONG else 2))

    auto = seconds(partial(Depth, 8))
    times = {(k, n): seconds(partial(fixed, k, n)) for k in (0, 2, 4) for n in (0, 4, 16)}
    assert times[0, 0] / auto >= 0.98
    assert min(times.values()) / auto >= 0.9


def test_copies_begin_short_and_lengthen_and_a_given_number_of_drafts_is_kept_beside_them():
    depth, asked, head, copies = Depth(8), [], {"head": Rates(8).estimate}, {"copies": [0.97] * MAX_COPY_TOKENS}
    for _ in range(60):
        asked.append(plan := depth.next([head | copies]))
        depth.observe(plan, plan.k, 1 + 0.05 * plan.k)
    lengths = [plan.k for plan in asked if plan.skips_head]
    assert lengths[:3] == [4, 8, 16]
    assert set(lengths[3:]) == {16}
    depth, head = Depth(8), {"head": [0.7] * 3}
    for i in range(60):
        plan = depth.next([head | (copies if i % 3 == 0 else {})], 3)
        assert plan == Plan(3) or (plan.skips_head and i % 3 == 0)
        depth.observe(plan, plan.k, 1 + 0.2 * plan.k)
    assert depth.next([head | copies], 3).skips_head
