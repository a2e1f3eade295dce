"""Rotary embeddings of a text with images, whose positions have three axes (``core/caches/positions.py``)."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..layers.passes import current_pass


class MRoPE(nn.Module):
    """Rotary embeddings at positions in three axes (time, height, width), each with a section of the frequencies.

    At plain positions it calls the wrapped rope.
    """

    def __init__(self, rope: nn.RoPE, sections: Sequence[int]):
        super().__init__()
        self.rope = rope
        axes = np.zeros(rope.dims // 2, np.int32)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
        self._axes = bytes(axes.tolist())  # the axis of each frequency; a list would be a parameter

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """x [B, H, T, D] -> the same, given the first token's index, or its position, [B]"""
        if isinstance(offset, mx.array):
            return self.rope(x, offset)  # type: ignore[arg-type]
        pass_ = current_pass()
        if (position := pass_.position(offset)) is not None:
            return self.rope(x, position)
        n = self.rope.dims // 2
        frequencies = self.rope.scale * mx.power(self.rope.base, -mx.arange(n) / n)  # [n]
        angles = pass_.ids(offset, x.shape[2])[mx.array([*self._axes])].T * frequencies  # [T, n]
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
