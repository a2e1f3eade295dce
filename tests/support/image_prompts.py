"""Prompts with images, of tests/data/images."""

import json
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from mlx_mtp.core.caches.positions import ImageSpan

from .models import DATA, load_reference

FOLDER = DATA / "images"
VALUES = np.load(FOLDER / "reference.npz")
PROMPTS = [j for j in range(9) if f"prompt_{j}" in VALUES]
IMAGE_TOKEN = json.loads((FOLDER / "config.json").read_text())["image_token_id"]


@cache
def image_model():
    return load_reference(FOLDER)


def spans(tokens: list[int], grids: list[tuple[int, int]]) -> list[ImageSpan]:
    """Where the images are, by the tokens of their placeholders."""
    found, at = [], 0
    for rows, columns in grids:
        at = tokens.index(IMAGE_TOKEN, at)
        found.append(ImageSpan(at, rows, columns))
        at = found[-1].end
    return found


@dataclass
class ImagePrompt:
    tokens: mx.array  # [T]
    images: list[ImageSpan]
    embeddings: mx.array  # [T, H]

    @property
    def options(self):
        return {"input_embeddings": self.embeddings, "images": self.images}

    def part(self, begin: int, end: int):
        """The tokens from one on, and the options that go with them."""
        own = [i for i in self.images if i.end > begin and i.start < end]
        return self.tokens[begin:end], {"input_embeddings": self.embeddings[begin:end], "images": own}


@cache
def image_prompt(j: int) -> ImagePrompt:
    tokens = mx.array(VALUES[f"prompt_{j}"])
    grids = [(int(h) // 2, int(w) // 2) for _, h, w in VALUES[f"grids_{j}"]]
    embeddings = np.array(image_model().model.embed_tokens(tokens))
    embeddings[np.array(tokens) == IMAGE_TOKEN] = VALUES[f"tower_{j}"]
    return ImagePrompt(tokens, spans(tokens.tolist(), grids), mx.array(embeddings))
