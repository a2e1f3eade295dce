"""Positions in three axes: transformers' values, and every way of decoding at them."""

import copy
import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mlx_mtp import make_prompt_cache, mtp_generate_step
from mlx_mtp.batch.generator import BatchGenerator
from mlx_mtp.caches.positions import ImageSpan, Positions
from mlx_mtp.caches.prompt_cache import PromptCache
from mlx_mtp.decoding.counts import DraftCounts
from mlx_mtp.decoding.drafter import HeadDrafter
from mlx_mtp.decoding.loop import prefill
from mlx_mtp.layers.mtp import run_head
from tests.support.batches import run
from tests.support.decoding import STOPS
from tests.support.image_prompts import FOLDER, IMAGE_TOKEN, PROMPTS, VALUES, image_model, image_prompt, spans
from tests.support.profiles import LONG

TOLERANCE = 5e-4  # of logits
CONVERSATIONS = json.loads((FOLDER / "positions.json").read_text())
SOME = PROMPTS if LONG else PROMPTS[::2]
ENDING_WITH_TEXT = [j for j in PROMPTS if image_prompt(j).images[-1].end < len(image_prompt(j).tokens)]


def difference(ours: mx.array, theirs: np.ndarray) -> float:
    return float(np.abs(np.array(ours) - theirs).max())


def cache_for(j: int):
    """An empty prompt cache that knows where the prompt's images will be."""
    entries = make_prompt_cache(image_model())
    PromptCache(entries, len(image_model().layers)).images = image_prompt(j).images
    return entries


def greedy(j: int, n: int = 24, **options) -> list[int]:
    p = image_prompt(j)
    return [t for t, *_ in mtp_generate_step(p.tokens, image_model(), max_tokens=n, **p.options, **options)]


def rest_of(want: list[int], cache, n: int) -> list[int]:
    """The text goes on behind a prompt cache of its first n tokens, with the next one as a prompt."""
    options = dict(max_tokens=len(want) - n - 1, num_draft_tokens=2)
    steps = mtp_generate_step(mx.array(want[n : n + 1]), image_model(), prompt_cache=cache, **options)
    return want[n : n + 1] + [t for t, *_ in steps] if n + 1 < len(want) else want[n:]


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_ids_are_those_of_transformers(conversation):
    tokens, want = conversation["input_ids"], np.array(conversation["position_ids"])
    positions = Positions(tuple(spans(tokens, conversation["grids"])))
    n = len(tokens)
    assert np.array_equal(positions.ids(0, n), want)
    for begin in range(n):  # any part of them, and the text that follows
        assert np.array_equal(positions.ids(begin, n - begin), want[:, begin:])
        assert np.array_equal(Positions(positions.images, begin).ids(0, n - begin), want[:, begin:])
        if positions.are_plain(begin):
            assert (want[:, begin:] == begin + positions.shift + np.arange(n - begin)).all()
    assert positions.shift == conversation["delta"] or IMAGE_TOKEN not in tokens
    assert np.array_equal(positions.ids(n, 3), np.tile(n + conversation["delta"] + np.arange(3), (3, 1)))


@pytest.mark.parametrize("j", PROMPTS)
@pytest.mark.parametrize("chunk", [5, 1000, pytest.param(1, marks=pytest.mark.slow)])
def test_logits_and_hidden_states_are_those_of_transformers(j, chunk):
    p, cache = image_prompt(j), cache_for(j)
    for i in range(0, len(p.tokens), chunk):
        part = slice(i, i + chunk)
        logits, hidden = image_model()(
            p.tokens[None, part], cache, input_embeddings=p.embeddings[None, part], return_hidden=True
        )
        assert difference(logits[0], VALUES[f"logits_{j}"][part]) <= TOLERANCE
        assert difference(hidden[0], VALUES[f"hidden_{j}"][part]) <= TOLERANCE


@pytest.mark.parametrize("j", PROMPTS)
def test_plain_text_would_give_other_logits(j):
    """What the test above would let pass if positions did not matter."""
    p = image_prompt(j)
    logits = image_model()(p.tokens[None], input_embeddings=p.embeddings[None])
    assert difference(logits[0], VALUES[f"logits_{j}"]) > 20 * TOLERANCE


@pytest.mark.parametrize("j", PROMPTS)
def test_the_head_is_that_of_the_definition(j):
    p, model = image_prompt(j), image_model()
    _, hidden = model(p.tokens[None], cache_for(j), input_embeddings=p.embeddings[None], return_hidden=True)
    first = model.model.embed_tokens(mx.array(VALUES[f"greedy_{j}"][:1]))
    rows = mx.concatenate([p.embeddings[1:], first])[None]
    positions, head = Positions(tuple(p.images)), make_prompt_cache(model)[len(model.layers)]
    for i in range(len(p.tokens)):
        out = run_head(model, hidden[:, i : i + 1], p.tokens[None, :1], head, rows[:, i : i + 1], positions)
        assert difference(model.logits(out)[0, 0], VALUES[f"mtp_logits_{j}"][i]) <= TOLERANCE
    for draft, want in zip(VALUES[f"draft_tokens_{j}"].tolist(), VALUES[f"draft_logits_{j}"]):
        assert difference(model.logits(out)[0, 0], want) <= TOLERANCE
        out = run_head(model, out, mx.array([[draft]]), head, positions=positions)


@pytest.mark.parametrize("j", PROMPTS)
@pytest.mark.parametrize("depth", [0, 2, "auto"])
def test_greedy_tokens_are_those_of_transformers(j, depth):
    assert greedy(j, num_draft_tokens=depth) == VALUES[f"greedy_{j}"].tolist()


@pytest.mark.parametrize("j", SOME)
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_chunk_may_split_an_image(j, chunk):
    assert greedy(j, 5, prefill_step_size=chunk, num_draft_tokens=3) == VALUES[f"greedy_{j}"][:5].tolist()


@pytest.mark.parametrize("options", [dict(exact=True), dict(copy_drafts="auto", num_draft_tokens=2)], ids=str)
@pytest.mark.parametrize("j", SOME)
def test_exact_and_copies(j, options):
    assert greedy(j, **options) == VALUES[f"greedy_{j}"].tolist()


@pytest.mark.parametrize("n_copies", [4, 16, "auto"])
def test_copies_end_where_an_image_begins(n_copies):
    """Also where a step is to copy more tokens than there are before it."""
    p, model, passage = image_prompt(0), image_model(), [5, 6, 7, 8, 9, 10]
    tokens = mx.array([*passage, *p.tokens.tolist(), *passage], mx.uint32)
    n, text = len(passage), model.model.embed_tokens(tokens)
    options = {
        "input_embeddings": mx.concatenate([text[:n], p.embeddings, text[-n:]]),
        "images": [image._replace(start=image.start + n) for image in p.images],
        "max_tokens": 12,
    }
    counts = DraftCounts()
    copying = mtp_generate_step(tokens, model, num_draft_tokens=0, copy_drafts=n_copies, counts=counts, **options)
    want = [t for t, *_ in mtp_generate_step(tokens, model, num_draft_tokens=0, **options)]
    assert [t for t, *_ in copying] == want
    assert n_copies == "auto" or 4 <= len(counts.copied) <= p.images[0].start  # auto begins without drafts


@pytest.mark.parametrize("j", SOME)
def test_mlx_lm_itself_decodes_at_them(j):
    p = image_prompt(j)
    steps = generate_step(
        p.tokens, image_model(), prompt_cache=cache_for(j), input_embeddings=p.embeddings, max_tokens=24
    )
    assert [t for t, _ in steps] == VALUES[f"greedy_{j}"].tolist()


@pytest.fixture
def drafted(monkeypatch):
    """The drafts of each proposal, and how many sequences they were for."""
    proposals, propose = [], HeadDrafter.propose

    def recorded(self, *args):
        tokens, records = propose(self, *args)
        proposals.append((tokens.tolist(), len(self.head.counts)))
        return tokens, records

    monkeypatch.setattr(HeadDrafter, "propose", recorded)
    return proposals


@pytest.mark.parametrize("j", PROMPTS)
def test_the_drafts_are_those_of_the_definition(j, drafted):
    """A head that saw other positions or embeddings would draft otherwise."""
    greedy(j, num_draft_tokens=4)
    assert drafted[0] == ([VALUES[f"draft_tokens_{j}"].tolist()], 1)


@pytest.mark.parametrize("j", ENDING_WITH_TEXT)
def test_the_drafts_of_a_batch_are_those_of_the_definition(j, drafted):
    p, generator = image_prompt(j), BatchGenerator(image_model(), num_draft_tokens=4)
    generator.insert([[5, 6, 7]])
    generator.insert([p.tokens.tolist()], input_embeddings=[p.embeddings], images=[p.images])
    while sum(n == 2 for _, n in drafted) < 2:
        generator.next()
    # Those beside the prompt's last token are wrong, as the head is random: the next follow the text's first token.
    (before, _), (after, _) = drafted[-2:]
    assert before[1][0] == VALUES[f"mtp_logits_{j}"][-2].argmax() != VALUES[f"greedy_{j}"][0]
    assert after[1] == VALUES[f"draft_tokens_{j}"].tolist()


@pytest.mark.parametrize("j", SOME)
@pytest.mark.parametrize("n_text", [1, 2])
def test_the_heads_rows_of_a_batch_are_those_of_a_single_run(j, n_text):
    """Also where little text follows an image: the row of its last token is at the image's position."""
    p, model, n = image_prompt(j), image_model(), image_prompt(j).images[-1].end + n_text
    tokens, embeddings = p.tokens.tolist()[:n], p.embeddings[:n]
    tokens += [5] * (n - len(tokens))
    embeddings = mx.concatenate([embeddings, model.model.embed_tokens(mx.array(tokens[len(embeddings) :], mx.uint32))])
    options = {"input_embeddings": embeddings, "images": p.images}
    alone, generator = make_prompt_cache(model), BatchGenerator(model, num_draft_tokens=2)
    want = [t for t, *_ in mtp_generate_step(mx.array(tokens), model, max_tokens=4, prompt_cache=alone, **options)]
    uids = generator.insert(
        [[5, 6, 7], tokens], max_tokens=[9, 4], input_embeddings=[None, embeddings], images=[[], p.images]
    )
    text = run(generator)[uids[1]]
    assert text.tokens == want
    for name in ("keys", "values"):
        ours, theirs = (getattr(c[-2], name)[:, :, : n + 3] for c in (text.last.prompt_cache, alone))
        assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("j", SOME)
def test_several_turns(j, tmp_path):
    """A text in two parts, cut beside its images and inside, with the cache itself, a copy of it, or a file."""
    p, model, want = image_prompt(j), image_model(), VALUES[f"greedy_{j}"].tolist()
    n = len(p.tokens)
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
        steps = mtp_generate_step(tokens, model, prompt_cache=cache, max_tokens=4, num_draft_tokens=3, **options)
        assert [t for t, *_ in steps] == want[:4]
        assert PromptCache(cache, len(model.layers)).images == p.images


@pytest.mark.parametrize("j", SOME)
@pytest.mark.parametrize("stops", STOPS)
def test_stopped_anywhere_and_gone_on_with(j, stops):
    p, model, want = image_prompt(j), image_model(), VALUES[f"greedy_{j}"].tolist()
    for stop in (stop for stop in stops if stop < 24):
        cache = make_prompt_cache(model)
        steps = mtp_generate_step(p.tokens, model, prompt_cache=cache, num_draft_tokens=3, **p.options)
        got = [next(steps)[0] for _ in range(stop)]
        steps.close()
        assert PromptCache(cache, len(model.layers)).n_tokens == len(p.tokens) + stop
        assert got + rest_of(want, cache, stop) == want


@pytest.mark.parametrize("n_read", [3, 6, 9])
def test_an_interrupted_prompt_keeps_the_images_that_were_read(n_read):
    p, model, cache = image_prompt(0), image_model(), make_prompt_cache(image_model())

    def interrupt(n, _):
        if n >= n_read:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefill(
            p.tokens, model, prompt_cache=cache, prefill_step_size=1, prompt_progress_callback=interrupt, **p.options
        )
    held = PromptCache(cache, len(model.layers))
    assert held.images == [i for i in p.images if i.start < held.n_tokens]
    tokens, options = p.part(held.n_tokens, len(p.tokens))
    steps = mtp_generate_step(tokens, model, prompt_cache=cache, max_tokens=24, num_draft_tokens=3, **options)
    assert [t for t, *_ in steps] == VALUES["greedy_0"].tolist()


def test_text_may_not_go_on_inside_an_image():
    p, model, cache = image_prompt(0), image_model(), make_prompt_cache(image_model())
    tokens, options = p.part(0, p.images[0].start + 1)
    prefill(tokens, model, prompt_cache=cache, **options)
    with pytest.raises(ValueError, match="is not prefilled yet"):
        prefill(mx.array([1, 2]), model, prompt_cache=cache)


@pytest.mark.parametrize(("together", "depth"), [(ENDING_WITH_TEXT, 3), ([3, 3], 0)])
def test_a_batch(together, depth):
    """Of prompts with images and without, which join and leave one after the other."""
    model, generator = image_model(), BatchGenerator(image_model(), num_draft_tokens=depth)
    lengths = [24 - 5 * i for i in range(len(together))]
    uids = []
    for j, n in zip(together, lengths):
        p = image_prompt(j)
        uids += generator.insert(
            [p.tokens.tolist()], max_tokens=[n], input_embeddings=[p.embeddings], images=[p.images]
        )
    (plain,) = generator.insert([[5, 6, 7]], max_tokens=[30])
    texts = run(generator)
    assert texts[plain].tokens == [t for t, *_ in mtp_generate_step(mx.array([5, 6, 7]), model, max_tokens=30)]
    for uid, j, n in zip(uids, together, lengths):
        want = VALUES[f"greedy_{j}"].tolist()
        tokens, cache = texts[uid].tokens, texts[uid].last.prompt_cache
        assert tokens == want[:n]
        assert PromptCache(cache, len(model.layers)).images == image_prompt(j).images
        assert tokens + rest_of(want, cache, n) == want


@pytest.mark.parametrize("j", SOME)
def test_quantized_keys_and_values(j):
    p, model = image_prompt(j), image_model()
    quantized = dict(kv_bits=8, kv_group_size=32, quantized_kv_start=5)
    steps = generate_step(
        p.tokens, model, prompt_cache=cache_for(j), input_embeddings=p.embeddings, max_tokens=10, **quantized
    )
    want = [t for t, _ in steps]
    for depth in (0, 2):
        assert greedy(j, 10, num_draft_tokens=depth, **quantized) == want


@pytest.mark.parametrize(
    ("images", "what"),
    [
        ([ImageSpan(2, 2, 2), ImageSpan(4, 1, 1)], "before that at token 2 has ended"),
        ([ImageSpan(2, 0, 2)], "0 x 2 tokens"),
        ([ImageSpan(-1, 1, 1)], "from token -1"),
    ],
)
def test_images_that_no_text_has(images, what):
    p = image_prompt(0)
    with pytest.raises(ValueError, match=what):
        prefill(p.tokens, image_model(), input_embeddings=p.embeddings, images=images)


def test_a_damaged_file_is_refused(tmp_path):
    p, model, cache = image_prompt(0), image_model(), make_prompt_cache(image_model())
    prefill(p.tokens, model, prompt_cache=cache, **p.options)
    cache[-1][5] = mx.array([[3, 2, 2], [4, 1, 1]], mx.int32)
    with pytest.raises(ValueError, match="images that no text has"):
        prefill(mx.array([1]), model, prompt_cache=cache)


def test_a_batch_reads_no_prompt_that_ends_with_an_image():
    (j,) = {*PROMPTS} - {*ENDING_WITH_TEXT}
    p, generator = image_prompt(j), BatchGenerator(image_model())
    with pytest.raises(ValueError, match="text must follow"):
        generator.insert([p.tokens.tolist()], input_embeddings=[p.embeddings], images=[p.images])


@pytest.mark.parametrize("batch", [False, True], ids=["alone", "batch"])
def test_images_without_their_embeddings(batch):
    p, model = image_prompt(0), image_model()
    wrong = {"give input_embeddings": None, "their sequence length": p.embeddings[:3]}
    for what, embeddings in wrong.items():
        with pytest.raises(ValueError, match=what):
            if batch:
                BatchGenerator(model).insert([p.tokens.tolist()], images=[p.images], input_embeddings=[embeddings])
            else:
                prefill(p.tokens, model, images=p.images, input_embeddings=embeddings)
