"""The positions of a text with images, in three axes: time, height and width.

A text token has the same position in all axes. The tokens of an image form a grid: they share the time, and height and width
count from it. The text resumes after the longer side of the grid, so positions may be smaller than the number of tokens:

    tokens     a   b   i00  i01  i02  i10  i11  i12  c
    time       0   1   2    2    2    2    2    2    5
    height     0   1   2    2    2    3    3    3    5
    width      0   1   2    3    4    2    3    4    5

A prompt cache has the spans of its images, which determine the position of each token.

These are the positions of Qwen2-VL (arXiv:2409.12191, section 2.1) in Qwen3.5's interleaved layout, as in ``get_rope_index``
and ``Qwen3_5TextRotaryEmbedding`` of transformers (5.23).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np


class ImageSpan(NamedTuple):
    """An image in a text.

    Args:
        start (int): The index of its first token in the text.
        rows, columns (int): The grid of its tokens.
    """

    start: int
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
    """Raise a ValueError if images are empty, overlap, or are not in order."""
    for image in images:
        if image.start < 0 or image.rows < 1 or image.columns < 1:
            raise ValueError(f"An image cannot have {image.rows} x {image.columns} tokens from token {image.start} on.")
    for a, b in pairwise(images):
        if a.end > b.start:
            raise ValueError(f"The image at token {b.start} begins before that at token {a.start} has ended.")


@dataclass(frozen=True)
class Positions:
    """
    Args:
        images (Tuple[ImageSpan]): The images of the text, in order.
        start (int): The index in the text of the first token in the cache.
    """

    images: tuple[ImageSpan, ...]
    start: int = 0

    @property
    def shift(self) -> int:
        """The difference of position and index after all images."""
        return self.start + sum(image.shift for image in self.images)

    def are_plain(self, begin: int) -> bool:
        """Whether all images end before an index."""
        return not self.images or self.start + begin >= self.images[-1].end

    def ids(self, begin: int, n: int) -> np.ndarray:
        """The positions of n tokens from an index on, [3, n]."""
        begin, shift = self.start + begin, 0
        tokens = np.arange(begin, begin + n)
        ids = np.tile(tokens, (3, 1))
        for image in self.images:
            inside = (tokens >= image.start) & (tokens < image.end)
            cells = tokens[inside] - image.start
            ids[:, inside] = image.start + shift + np.stack([0 * cells, cells // image.columns, cells % image.columns])
            shift += image.shift
            ids[:, tokens >= image.end] = tokens[tokens >= image.end] + shift
        return ids


class _Pass:
    """The positions of one pass, computed once for all its layers."""

    def __init__(self, positions: Positions):
        self.positions = positions
        self.ids: dict[tuple[int, int], mx.array] = {}

    def __call__(self, begin: int, n: int) -> mx.array:
        if (begin, n) not in self.ids:
            self.ids[begin, n] = mx.array(self.positions.ids(begin, n))
        return self.ids[begin, n]


_pass: ContextVar[_Pass | None] = ContextVar("positions", default=None)


@contextmanager
def rope_at(positions: Positions | None) -> Iterator[None]:
    """A context in which the offset of ``MRoPE`` is an index into a text with images.

    Args:
        positions (Positions, optional): The positions of the text. ``None`` if indices are positions.
    """
    token = _pass.set(None if positions is None else _Pass(positions))
    try:
        yield
    finally:
        _pass.reset(token)


def plain_position(index: int) -> int | None:
    """The position of the token at an index; ``None`` unless this token and all later tokens have plain positions."""
    text = _pass.get()
    if text is None:
        return index
    return index + text.positions.shift if text.positions.are_plain(index) else None


class MRoPE(nn.Module):
    """Rotary embeddings at positions in three axes. At plain positions it calls the wrapped rope.

    Args:
        rope (nn.RoPE): The rope of the attention layer.
        sections (Sequence[int]): The number of frequencies of each axis: time, height, width.
    """

    def __init__(self, rope: nn.RoPE, sections: Sequence[int]):
        super().__init__()
        self.rope = rope
        axes = np.zeros(rope.dims // 2, np.int32)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
        self._axes = bytes(axes.tolist())  # the axis of each frequency; a list would be a parameter

    def __call__(self, x: mx.array, offset: int | mx.array = 0, position_ids: mx.array | None = None) -> mx.array:
        """
        Args:
            x (mx.array): [B, H, T, D]
            offset (Union[int, mx.array]): The first token's index, or its position, [B].
            position_ids (mx.array, optional): The positions to use in place of the offset, [3, T].
        """
        if position_ids is None and isinstance(offset, int):
            position = plain_position(offset)
            if position is None:
                position_ids = cast(_Pass, _pass.get())(offset, x.shape[2])
            else:
                offset = position
        return self.rope(x, offset) if position_ids is None else self._rotate(x, position_ids)  # type: ignore[arg-type]

    def _rotate(self, x: mx.array, position_ids: mx.array) -> mx.array:
        n = self.rope.dims // 2
        frequencies = self.rope.scale * mx.power(self.rope.base, -mx.arange(n) / n)  # [n]
        angles = position_ids[mx.array([*self._axes])].T * frequencies  # [T, n]
        rotated = rotate(x[..., : 2 * n], mx.cos(angles), mx.sin(angles))
        return mx.concatenate([rotated, x[..., 2 * n :]], axis=-1)


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """The halves of x [..., T, d] as pairs, by angles [T, d / 2]; in float32, rounded once."""
    a, b = mx.split(x.astype(mx.float32), 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def add_mrope(attention: Any, rope_parameters: dict[str, Any] | None) -> None:
    """Replace the rope of an attention layer by ``MRoPE``, if its model takes positions in three axes."""
    sections = (rope_parameters or {}).get("mrope_section")
    if sections is not None and isinstance(attention.rope, nn.RoPE):
        attention.rope = MRoPE(attention.rope, sections)
