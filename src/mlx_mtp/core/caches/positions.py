"""The positions of a text with images, in three axes: time, height and width.

A text token has the same position in all axes. The tokens of an image form a grid: they share the time, and height and width
count from it. The text resumes after the longer side of the grid, so positions may be smaller than the number of tokens:

    tokens     a   b   i00  i01  i02  i10  i11  i12  c
    time       0   1   2    2    2    2    2    2    5
    height     0   1   2    2    2    3    3    3    5
    width      0   1   2    3    4    2    3    4    5

These are the positions of Qwen2-VL (arXiv:2409.12191, section 2.1) in Qwen3.5's interleaved layout, as in ``get_rope_index``
and ``Qwen3_5TextRotaryEmbedding`` of transformers (5.23).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...errors import MTPError

MAX_TOKENS = 2**31 - 1  # of a text with images, whose spans are kept in int32


class ImageSpan(NamedTuple):
    """An image in a text, whose tokens are a grid."""

    start: int  # the index of its first token in the text
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def shift(self) -> int:
        """The number of its positions minus the number of its tokens."""
        return max(self.rows, self.columns) - self.rows * self.columns


def check_images(images: Sequence[ImageSpan]) -> None:
    """Raise an MTPError if images are empty, overlap, or are not in order, or their ends are beyond ``MAX_TOKENS``."""
    for image in images:
        if image.start < 0 or image.rows < 1 or image.columns < 1 or image.end > MAX_TOKENS:
            raise MTPError(f"An image cannot have {image.rows} x {image.columns} tokens from token {image.start} on.")
    for a, b in pairwise(images):
        if a.end > b.start:
            raise MTPError(f"The image at token {b.start} begins before that at token {a.start} has ended.")


@dataclass(frozen=True)
class Positions:
    images: tuple[ImageSpan, ...]  # those of the text, in order
    start: int = 0  # the index in the text of the first token in the cache

    @property
    def shift(self) -> int:
        """The difference of position and index after all images."""
        return self.start + sum(image.shift for image in self.images)

    def are_plain(self, begin: int) -> bool:
        """Whether all images end before an index."""
        return not self.images or self.start + begin >= self.images[-1].end

    def ids(self, begin: int, n: int) -> np.ndarray:
        """The positions of n tokens from an index on, [3, n]."""
        tokens = np.arange(n) + self.start + begin
        shift = 0
        ids = np.tile(tokens, (3, 1))
        for image in self.images:
            inside = (tokens >= image.start) & (tokens < image.end)
            cells = tokens[inside] - image.start
            ids[:, inside] = image.start + shift + np.stack([0 * cells, cells // image.columns, cells % image.columns])
            shift += image.shift
            ids[:, tokens >= image.end] = tokens[tokens >= image.end] + shift
        return ids
