"""A trained tower: what it says of held-out pictures is mostly right, and of a second one what transformers says."""

import json
import sys
from pathlib import Path

from mlx_mtp import load, stream_generate
from mlx_mtp.images.vision import PLACEHOLDER
from tests.support.models import DATA
from tests.support.profiles import LONG

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from captions import make_checkpoint

FOLDER = DATA / "captions"
CAPTIONS = json.loads((FOLDER / "captions.json").read_text())
ONE, TWO, QUOTES = CAPTIONS["one"], CAPTIONS["two"], CAPTIONS["prompt"]
PROMPT = PLACEHOLDER + QUOTES
N = 12  # tokens of a caption, and of what ends it
RIGHT = 0.9  # of the captions, at least


def test_captions_are_right(tmp_path):
    """In bfloat16, as the checkpoint is loaded: of a picture, and of a second one behind the first and its caption."""
    model, tokenizer = load(str(make_checkpoint(tmp_path / "model")))

    def caption(files: list[str], *parts: str) -> str:
        tokens = [token for part in parts for token in tokenizer.encode(part)]
        options = dict(max_tokens=N, images=[FOLDER / file for file in files], num_draft_tokens=4)
        return "".join(r.text for r in stream_generate(model, tokenizer, tokens, **options)).partition(QUOTES)[0]

    step, captions = 1 if LONG else 6, {one["file"]: one["caption"] for one in ONE}
    are_right = [caption([one["file"]], PROMPT) == one["caption"] for one in ONE[::step]]
    for two in TWO[::step]:
        first, second = two["files"]
        text = caption([first, second], PROMPT, captions[first] + QUOTES, "\n\n", PROMPT)
        are_right.append(text == two["answer"].partition(QUOTES)[0])  # transformers' answer
    assert sum(are_right) >= RIGHT * len(are_right)
