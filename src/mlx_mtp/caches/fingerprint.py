"""Tell one model's prompt caches from another's: a digest of a model's weights, of which it reads a few values only."""

import json
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

SIZE = 16  # bytes of a digest
N_VALUES = 4  # of a tensor, at least, along each axis that has as many


def fingerprint(model: Any) -> bytes:
    """The digest of the backbone's tensors, [16], and that of the head's, [16].

    Two, since the backbone decides the text, and a head that is quantized or fitted later drafts for the same one.
    """
    parameters: Any = tree_flatten(model.parameters())
    head = [name.startswith(model.head_prefix) for name, _ in parameters]
    return b"".join(digest(p for p, is_head in zip(parameters, head) if is_head is part) for part in (False, True))


def digest(parameters: Iterable[tuple[str, mx.array]]) -> bytes:
    """Of named tensors, [16]."""
    parameters = sorted(parameters)
    names = json.dumps([(name, p.shape, str(p.dtype)) for name, p in parameters])
    values = [p[_spread(p.shape)].flatten().view(mx.uint8) for _, p in parameters]
    read = bytes(np.array(mx.concatenate(values))) if values else b""
    return blake2b(names.encode() + read, digest_size=SIZE).digest()


def _spread(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of a few values, spread over a tensor of this shape."""
    return tuple(slice(None, None, max(n // N_VALUES, 1)) for n in shape)
