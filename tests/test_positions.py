"""Positions in three axes: transformers' values, and every way of decoding at them."""

import copy
import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mlx_mtp import make_prompt_cache, mtp_generate_step
from mlx_mtp.core.batch.generator import BatchGenerator
from mlx_mtp.core.caches.positions import ImageSpan, Positions
from mlx_mtp.core.caches.prompt_cache import PromptCache
from mlx_mtp.core.decoding.counts import DraftCounts
from mlx_mtp.core.decoding.head import HeadDrafter
from mlx_mtp.core.layers.mtp import run_head
from tests.support.batches import run
from tests.support.commands import refused
from tests.support.decoding import difference, interrupt_at, mtp, plain, prefill
from tests.support.image_prompts import FOLDER, IMAGE_TOKEN, PROMPTS, VALUES, image_model, image_prompt, spans
from tests.support.profiles import LONG

TOLERANCE = 5e-4  # of logits
SOME = PROMPTS if LONG else PROMPTS[::2]
ENDING_WITH_TEXT = [j for j in PROMPTS if image_prompt(j).images[-1].end < len(image_prompt(j).tokens)]
every_prompt, some_prompts = (pytest.mark.parametrize("j", js) for js in (PROMPTS, SOME))


def held_by(entries) -> PromptCache:
    return PromptCache(entries, len(image_model().layers))


def cache_for(j: int):
    entries = make_prompt_cache(image_model())
    held_by(entries).images = image_prompt(j).images
    return entries


def greedy_of(j: int) -> list[int]:
    return VALUES[f"greedy_{j}"].tolist()


def greedy(j: int, n: int = 24, **options) -> list[int]:
    p = image_prompt(j)
    return mtp(p.tokens, image_model(), max_tokens=n, **p.options, **options)


def stock_greedy(j: int, n: int = 24, **options) -> list[int]:
    p = image_prompt(j)
    options |= dict(prompt_cache=cache_for(j), input_embeddings=p.embeddings)
    return plain(p.tokens, image_model(), max_tokens=n, **options)


def rest_of(want: list[int], cache, n: int) -> list[int]:
    """The text goes on behind a prompt cache of its first n tokens, with the next one as a prompt."""
    if n + 1 >= len(want):
        return want[n:]
    options = dict(max_tokens=len(want) - n - 1, num_draft_tokens=2, prompt_cache=cache)
    return want[n : n + 1] + mtp(want[n : n + 1], image_model(), **options)


def test_ids_are_those_of_transformers():
    for conversation in json.loads((FOLDER / "positions.json").read_text()):
        tokens, want = conversation["input_ids"], np.array(conversation["position_ids"])
        positions, n = Positions(tuple(spans(tokens, conversation["grids"]))), len(tokens)
        assert np.array_equal(positions.ids(0, n), want)
        for begin in range(n):  # any part of them, and the text that follows
            assert np.array_equal(positions.ids(begin, n - begin), want[:, begin:])
            assert np.array_equal(Positions(positions.images, begin).ids(0, n - begin), want[:, begin:])
            if positions.are_plain(begin):
                assert (want[:, begin:] == begin + positions.shift + np.arange(n - begin)).all()
        assert positions.shift == conversation["delta"] or IMAGE_TOKEN not in tokens
        assert np.array_equal(positions.ids(n, 3), np.tile(n + conversation["delta"] + np.arange(3), (3, 1)))


@every_prompt
@pytest.mark.parametrize("chunk", [5, 1000, pytest.param(1, marks=pytest.mark.slow)])
def test_logits_and_hidden_states_are_those_of_transformers(j, chunk):
    p, model, cache = image_prompt(j), image_model(), cache_for(j)
    for i in range(0, len(p.tokens), chunk):
        part = slice(i, i + chunk)
        options = dict(input_embeddings=p.embeddings[None, part], return_hidden=True)
        logits, hidden = model(p.tokens[None, part], cache, **options)
        assert difference(logits[0], VALUES[f"logits_{j}"][part]) <= TOLERANCE
        assert difference(hidden[0], VALUES[f"hidden_{j}"][part]) <= TOLERANCE
    # What this would let pass if positions did not matter
    logits = model(p.tokens[None], input_embeddings=p.embeddings[None])
    assert difference(logits[0], VALUES[f"logits_{j}"]) > 20 * TOLERANCE


@every_prompt
def test_the_head_is_that_of_the_definition(j):
    p, model = image_prompt(j), image_model()
    _, hidden = model(p.tokens[None], cache_for(j), input_embeddings=p.embeddings[None], return_hidden=True)
    first = model.model.embed_tokens(mx.array(greedy_of(j)[:1]))
    rows = mx.concatenate([p.embeddings[1:], first])[None]
    positions, head = Positions(tuple(p.images)), make_prompt_cache(model)[len(model.layers)]
    for i in range(len(p.tokens)):
        out = run_head(model, hidden[:, i : i + 1], p.tokens[None, :1], head, rows[:, i : i + 1], positions)
        assert difference(model.logits(out)[0, 0], VALUES[f"mtp_logits_{j}"][i]) <= TOLERANCE
    for draft, want in zip(VALUES[f"draft_tokens_{j}"].tolist(), VALUES[f"draft_logits_{j}"]):
        assert difference(model.logits(out)[0, 0], want) <= TOLERANCE
        out = run_head(model, out, mx.array([[draft]]), head, positions=positions)


@every_prompt
def test_greedy_tokens_are_those_of_transformers(j):
    want = greedy_of(j)
    for options in (dict(num_draft_tokens=0), dict(num_draft_tokens=2), dict(num_draft_tokens="auto")):
        assert greedy(j, **options) == want, options
    if j not in SOME:
        return
    assert stock_greedy(j, 12) == want[:12]
    assert greedy(j, 12, copy_drafts="auto", num_draft_tokens=2) == want[:12]
    for chunk in (1, 3):  # which may split an image
        assert greedy(j, 5, prefill_step_size=chunk, num_draft_tokens=3) == want[:5]
    # Also where the prompt ends with an image, whose first token is chosen before the others.
    even = lambda tokens, logits: mx.where(mx.arange(logits.shape[-1]) % 2, -mx.inf, logits)  # noqa: E731
    for options in (dict(kv_bits=8, kv_group_size=32, quantized_kv_start=5), dict(logits_processors=[even])):
        want = stock_greedy(j, 10, **options)
        for depth in (0, 2) if LONG or "kv_bits" in options else (2,):
            assert greedy(j, 10, num_draft_tokens=depth, **options) == want


@pytest.mark.parametrize("n_copies", [4, 16, "auto"])
def test_copies_end_where_an_image_begins(n_copies):
    """Also where a step is to copy more tokens than there are before it."""
    p, model, passage, counts = image_prompt(0), image_model(), [5, 6, 7, 8, 9, 10], DraftCounts()
    tokens, n = mx.array([*passage, *p.tokens.tolist(), *passage], mx.uint32), len(passage)
    text = model.model.embed_tokens(tokens)
    options = {
        "input_embeddings": mx.concatenate([text[:n], p.embeddings, text[-n:]]),
        "images": [image._replace(start=image.start + n) for image in p.images],
        "max_tokens": 12,
        "num_draft_tokens": 0,
    }
    copied = mtp(tokens, model, copy_drafts=n_copies, counts=counts, **options)
    assert copied == mtp(tokens, model, **options)
    # Auto begins without drafts.
    assert n_copies == "auto" or 4 <= len(counts.of("copies").drafted) <= p.images[0].start


@pytest.mark.parametrize("j", ENDING_WITH_TEXT)
def test_the_drafts_are_those_of_the_definition(j, monkeypatch):
    """A head that saw other positions or embeddings would draft otherwise."""
    drafted, propose = [], HeadDrafter.propose  # the drafts of each proposal, and how many sequences they were for

    def recorded(self, *args):
        tokens, *others = propose(self, *args)
        drafted.append((tokens.tolist(), len(self.state.counts)))
        return tokens, *others

    monkeypatch.setattr(HeadDrafter, "propose", recorded)
    greedy(j, 6, num_draft_tokens=4)
    want = VALUES[f"draft_tokens_{j}"].tolist()
    p, generator = image_prompt(j), BatchGenerator(image_model(), num_draft_tokens=4)
    asked = dict(input_embeddings=[p.embeddings], images=[p.images])
    # Those before the text's first token are wrong, as the head is random.
    assert ([want], 1) in drafted[:2]
    drafted.clear()
    generator.insert([[5, 6, 7]])
    generator.insert([p.tokens.tolist()], **asked)
    while sum(n == 2 for _, n in drafted) < 2:
        generator.next()
    # Those beside the prompt's last token are wrong, as the head is random: the next follow the text's first token.
    (before, _), (after, _) = drafted[-2:]
    assert before[1][0] == VALUES[f"mtp_logits_{j}"][-2].argmax() != greedy_of(j)[0]
    assert after[1] == want


@some_prompts
@pytest.mark.parametrize("n_text", [0, 1, 2])
def test_the_heads_rows_are_those_of_a_prefill_of_the_text(j, n_text):
    """Alone and in a batch, also where little text follows an image: the row of its last token is at the image's position."""
    p, model, n = image_prompt(j), image_model(), image_prompt(j).images[-1].end + n_text
    tokens, embeddings = p.tokens.tolist()[:n], p.embeddings[:n]
    tokens += [5] * (n - len(tokens))
    embeddings = mx.concatenate([embeddings, model.model.embed_tokens(mx.array(tokens[len(embeddings) :], mx.uint32))])
    alone, generator = make_prompt_cache(model), BatchGenerator(model, num_draft_tokens=2)
    want = mtp(tokens, model, max_tokens=4, prompt_cache=alone, input_embeddings=embeddings, images=p.images)
    asked = dict(max_tokens=[9, 4], input_embeddings=[None, embeddings], images=[[], p.images])
    uids = generator.insert([[5, 6, 7], tokens], **asked)
    text = run(generator)[uids[1]]
    assert text.tokens == want
    prefilled, own = make_prompt_cache(model), mx.array(want, mx.uint32)
    whole = mx.concatenate([embeddings, model.model.embed_tokens(own)])
    prefill(mx.array(tokens + want), model, prompt_cache=prefilled, input_embeddings=whole, images=p.images)
    for name in ("keys", "values"):
        theirs, *ours = (getattr(c[-2], name)[:, :, : n + 3] for c in (prefilled, alone, text.last.prompt_cache))
        assert all(mx.allclose(own, theirs, rtol=1e-4, atol=1e-4) for own in ours)


@some_prompts
def test_several_turns(j, tmp_path):
    """A text in two parts, cut beside its images and inside, with the cache itself, a copy of it, or a file."""
    p, model, n = image_prompt(j), image_model(), len(image_prompt(j).tokens)
    cuts = [i for image in p.images for i in (image.start, image.start + 2, image.end)]
    for how, cut in enumerate(i for i in cuts if 0 < i < n):
        cache = make_prompt_cache(model)
        tokens, options = p.part(0, cut)
        prefill(tokens, model, prompt_cache=cache, **options)
        if how % 3 == 1:
            cache = copy.deepcopy(cache)
        elif how % 3 == 2:
            save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
            cache = load_prompt_cache(str(tmp_path / "cache.safetensors"))
        tokens, options = p.part(cut, n)
        options |= dict(prompt_cache=cache, max_tokens=4, num_draft_tokens=3)
        assert mtp(tokens, model, **options) == greedy_of(j)[:4]
        assert held_by(cache).images == p.images


@some_prompts
def test_stopped_anywhere_and_gone_on_with(j):
    p, model, want = image_prompt(j), image_model(), greedy_of(j)
    for stop in range(1, 24) if LONG else (1, 2, 5, 18):
        cache = make_prompt_cache(model)
        steps = mtp_generate_step(p.tokens, model, prompt_cache=cache, num_draft_tokens=3, **p.options)
        got = [next(steps)[0] for _ in range(stop)]
        steps.close()
        assert held_by(cache).n_tokens == len(p.tokens) + stop
        assert got + rest_of(want, cache, stop) == want


@pytest.mark.parametrize("n_read", [3, 6, 9])
def test_an_interrupted_prompt_keeps_the_images_that_were_read(n_read):
    p, model, cache = image_prompt(0), image_model(), make_prompt_cache(image_model())
    options = dict(prompt_cache=cache, prefill_step_size=1, prompt_progress_callback=interrupt_at(n_read), **p.options)
    with pytest.raises(KeyboardInterrupt):
        prefill(p.tokens, model, **options)
    held = held_by(cache)
    assert held.images == [i for i in p.images if i.start < held.n_tokens]
    tokens, options = p.part(held.n_tokens, len(p.tokens))
    assert mtp(tokens, model, prompt_cache=cache, max_tokens=24, num_draft_tokens=3, **options) == greedy_of(0)


@pytest.mark.parametrize(("together", "depth"), [(PROMPTS, 3), ([3, 3], 0)])
def test_a_batch(together, depth):
    model, generator = image_model(), BatchGenerator(image_model(), num_draft_tokens=depth)
    asked = [(j, 24 - 5 * i) for i, j in enumerate(together)]
    for j, n in asked:
        p = image_prompt(j)
        images = dict(input_embeddings=[p.embeddings], images=[p.images])
        generator.insert([p.tokens.tolist()], max_tokens=[n], **images)
    generator.insert([[5, 6, 7]], max_tokens=[30])
    *texts, text = run(generator).values()
    assert text.tokens == mtp([5, 6, 7], model, max_tokens=30)
    for text, (j, n) in zip(texts, asked, strict=True):
        cache = text.last.prompt_cache
        assert text.tokens == greedy_of(j)[:n]
        assert held_by(cache).images == image_prompt(j).images
        assert text.tokens + rest_of(greedy_of(j), cache, n) == greedy_of(j)


def test_what_no_text_has_is_refused():
    p, model = image_prompt(0), image_model()
    tokens = p.tokens.tolist()
    inside, damaged = make_prompt_cache(model), make_prompt_cache(model)
    part, options = p.part(0, p.images[0].start + 1)
    prefill(part, model, prompt_cache=inside, **options)
    prefill(p.tokens, model, prompt_cache=damaged, **p.options)
    damaged[-1][5] = mx.array([[3, 2, 2], [4, 1, 1]], mx.int32)
    for given, options, message in [
        (tokens, p.options | dict(images=[ImageSpan(2, 2, 2), ImageSpan(4, 1, 1)]), "before that at token 2 has ended"),
        (tokens, p.options | dict(images=[ImageSpan(2, 0, 2)]), "0 x 2 tokens"),
        (tokens, p.options | dict(images=[ImageSpan(-1, 1, 1)]), "from token -1"),
        (tokens, p.options | dict(images=[ImageSpan(0, 2**16, 2**15)]), "65536 x 32768 tokens"),
        (tokens, dict(images=p.images), "give input_embeddings"),
        (tokens, dict(images=p.images, input_embeddings=p.embeddings[:3]), "their sequence length"),
        ([], dict(input_embeddings=p.embeddings[:0]), "Either input_embeddings or prompt"),
        ([1, 2], dict(prompt_cache=inside), "is not prefilled yet"),  # text may not go on inside an image
        ([1], dict(prompt_cache=damaged), "Entry 5 of the prompt cache is damaged"),
    ]:
        refused(message, prefill, mx.array(given), model, **options)
        if given == tokens and "images" in options:
            of_batch = {name: [value] for name, value in options.items()}
            refused(message, BatchGenerator(model).insert, [tokens], **of_batch)
