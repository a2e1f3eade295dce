"""A trained tower: what it says of held-out pictures is mostly right."""

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
ONE, QUOTES = CAPTIONS["one"], CAPTIONS["prompt"]
PROMPT = PLACEHOLDER + QUOTES
N = 12  # tokens of a caption, and of what ends it
RIGHT = 0.9  # of the captions, at least


def test_captions_are_right(tmp_path):
    """In bfloat16, as the checkpoint is loaded."""
    model, tokenizer = load(str(make_checkpoint(tmp_path / "model")))

    def caption(file: str) -> str:
        options = dict(max_tokens=N, images=[FOLDER / file], num_draft_tokens=4)
        return "".join(r.text for r in stream_generate(model, tokenizer, PROMPT, **options)).partition(QUOTES)[0]

    some = ONE if LONG else ONE[::3]
    assert sum(caption(one["file"]) == one["caption"] for one in some) >= RIGHT * len(some)
