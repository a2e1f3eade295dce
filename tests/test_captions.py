"""A trained tower: what it says of held-out pictures is what transformers says, and mostly right."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp import load, stream_generate
from mlx_mtp.images.vision import PLACEHOLDER, Vision
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
    """In float32, as the values of transformers; its passes are not compiled, those of ``usual`` are."""
    model, (_, tokenizer) = load_reference(folder), load(str(folder))
    model.drafting.compiled = False
    model.vision = Vision(folder, json.loads((folder / "config.json").read_text()), ["model.safetensors"])
    model.vision.tower.set_dtype(mx.float32)
    return model, tokenizer


@pytest.fixture(scope="module")
def usual(folder):
    """In bfloat16, as it is loaded."""
    return load(str(folder))


def text_of(model, tokenizer, prompt, images, **options) -> str:
    return "".join(r.text for r in stream_generate(model, tokenizer, prompt, max_tokens=N, images=images, **options))


def test_a_second_picture_is_not_mistaken_for_the_first(exact):
    model, tokenizer = exact
    captions = {one["file"]: one["caption"] for one in ONE}
    for two in TWO[:: 3 if LONG else 6]:
        parts = [PROMPT, captions[two["files"][0]] + QUOTES, "\n\n", PROMPT]
        tokens = [token for part in parts for token in tokenizer.encode(part)]
        answer = text_of(model, tokenizer, tokens, [FOLDER / file for file in two["files"]])
        assert two["answer"].startswith(answer), two["files"]


def test_captions_are_right(usual):
    some = ONE if LONG else ONE[::3]
    answers = [text_of(*usual, PROMPT, [FOLDER / one["file"]], num_draft_tokens=4) for one in some]
    assert sum(a.partition(QUOTES)[0] == one["caption"] for a, one in zip(answers, some)) >= RIGHT * len(some)
