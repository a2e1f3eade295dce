"""A trained tower: what it says of held-out pictures, however it is decoded, is what transformers says, and mostly right."""

import base64
import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp import BatchGenerator, PromptStore, load, mtp_generate_step, stream_generate
from mlx_mtp.images.processor import PLACEHOLDER
from mlx_mtp.images.prompt import read_images
from mlx_mtp.images.vision import Vision
from tests.support.batches import run
from tests.support.engine import Engine
from tests.support.models import DATA, load_reference
from tests.support.profiles import LONG

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from captions import make_checkpoint

FOLDER = DATA / "captions"
CAPTIONS = json.loads((FOLDER / "captions.json").read_text())
ONE, TWO, QUOTES = CAPTIONS["one"], CAPTIONS["two"], CAPTIONS["prompt"]
PROMPT = PLACEHOLDER + QUOTES
N = 12  # tokens of a caption, and of what ends it
RIGHT = 0.9  # of the captions, at least


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("captions") / "model")


@pytest.fixture(scope="module")
def exact(folder):
    """In float32, as the values of transformers."""
    model, (_, tokenizer) = load_reference(folder), load(str(folder))
    model.vision = Vision(folder, json.loads((folder / "config.json").read_text()), ["model.safetensors"])
    model.vision.tower.set_dtype(mx.float32)
    return model, tokenizer


@pytest.fixture(scope="module")
def usual(folder):
    """In bfloat16, as it is loaded."""
    return load(str(folder))


def caption_of(text: str) -> str:
    return text.partition(QUOTES)[0]


def text_of(model, tokenizer, prompt, images, n: int = N, **options) -> str:
    return "".join(r.text for r in stream_generate(model, tokenizer, prompt, max_tokens=n, images=images, **options))


@pytest.mark.parametrize("k", range(0, len(ONE), 6))
@pytest.mark.parametrize("options", [dict(mtp=False), dict(num_draft_tokens=2)], ids=["plain", "2 drafts"])
def test_answers_are_those_of_transformers(k, options, exact):
    answer = text_of(*exact, PROMPT, [FOLDER / ONE[k]["file"]], **options)
    assert ONE[k]["answer"].startswith(answer)
    assert len(answer) > 0


@pytest.mark.parametrize("two", TWO[::3], ids=range(len(TWO[::3])))
def test_a_second_picture_is_not_mistaken_for_the_first(two, exact):
    model, tokenizer = exact
    captions = {one["file"]: one["caption"] for one in ONE}
    parts = [PROMPT, captions[two["files"][0]] + QUOTES, "\n\n", PROMPT]
    tokens = [token for part in parts for token in tokenizer.encode(part)]
    answer = text_of(model, tokenizer, tokens, [FOLDER / file for file in two["files"]])
    assert two["answer"].startswith(answer)


def test_captions_are_right(usual):
    some = ONE if LONG else ONE[::3]
    answers = [text_of(*usual, PROMPT, [FOLDER / one["file"]], num_draft_tokens=4) for one in some]
    assert sum(caption_of(a) == one["caption"] for a, one in zip(answers, some)) >= RIGHT * len(some)


def test_captions_are_the_same_however_they_are_decoded(usual):
    """With plain mlx-lm's loop, drafts, all at once, and behind a prompt store."""
    model, tokenizer = usual
    images = [FOLDER / one["file"] for one in ONE[::12]]
    want = [text_of(model, tokenizer, PROMPT, [image], mtp=False) for image in images]
    for options in (dict(num_draft_tokens=1), dict(num_draft_tokens=4), dict(prompt_store=PromptStore(model))):
        for _ in range(1 + ("prompt_store" in options)):
            assert [text_of(model, tokenizer, PROMPT, [image], **options) for image in images] == want

    tokens = tokenizer.encode(PROMPT)
    generator = BatchGenerator(model, max_tokens=N, stop_tokens=[[t] for t in tokenizer.eos_token_ids])
    uids = []
    for image in images:
        prompt = read_images(model.vision, tokens, [image])
        uids += generator.insert([prompt.tokens], input_embeddings=[prompt.embed(model)], images=[prompt.images])
    texts = run(generator)
    ends = tokenizer.eos_token_ids
    assert [tokenizer.decode([t for t in texts[uid].tokens if t not in ends]) for uid in uids] == want


def test_the_server_says_the_same(folder, usual):
    model, tokenizer = usual
    flags = ["--model", str(folder), "--mtp", "--chat-template", "{{ messages[0].content }}"]
    chats, want = [], []
    for one in ONE[::12]:
        url = "data:image/png;base64," + base64.b64encode((FOLDER / one["file"]).read_bytes()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUOTES}]
        chats.append(([{"role": "user", "content": content}], None))
        want.append(text_of(model, tokenizer, PROMPT, [FOLDER / one["file"]]))
    with Engine(*flags) as engine:
        for _ in range(2):
            answered = engine.ask_all(chats, max_tokens=N, temperature=0)
            ends = tokenizer.eos_token_ids
            assert [tokenizer.decode([t for t in a.tokens if t not in ends]) for a in answered] == want


def test_sampled_captions_keep_to_their_seed(usual):
    """Seeds give the same text with drafts as token by token."""
    from mlx_mtp import make_sampler

    model, tokenizer = usual
    prompt = read_images(model.vision, tokenizer.encode(PROMPT), [FOLDER / ONE[0]["file"]])
    given = {"input_embeddings": prompt.embed(model), "images": prompt.images, "max_tokens": N}

    def sampled(seed, depth):
        sampler = make_sampler(1.5, seed=seed, acceptance="coupled")
        steps = mtp_generate_step(mx.array(prompt.tokens), model, sampler=sampler, num_draft_tokens=depth, **given)
        return [token for token, *_ in steps]

    texts = [sampled(seed, 0) for seed in range(2)]
    assert len({*map(tuple, texts)}) > 1
    assert [sampled(seed, 3) for seed in range(2)] == texts
