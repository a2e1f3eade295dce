"""A model's fingerprint, which identifies its prompt caches: a digest of a few values of each weight."""

import json
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

SIZE = 16  # bytes of a digest
N_VALUES = 4  # the least number of values read along each axis of a tensor, if the axis has as many


def fingerprint(model: Any) -> bytes:
    """The digest of the backbone's tensors, [16], followed by the digest of the head's, [16].

    They are separate since the text depends only on the backbone: a prompt cache stays valid if the head is quantized or
    fitted.
    """
    parameters: Any = tree_flatten(model.parameters())
    head = [name.startswith(model.head_prefix) for name, _ in parameters]
    return b"".join(digest(p for p, is_head in zip(parameters, head) if is_head is part) for part in (False, True))


def digest(parameters: Iterable[tuple[str, mx.array]]) -> bytes:
    """The digest of named tensors, [16]."""
    parameters = sorted(parameters)
    names = json.dumps([(name, p.shape, str(p.dtype)) for name, p in parameters])
    values = [p[_spread(p.shape)].flatten().view(mx.uint8) for _, p in parameters]
    read = bytes(np.array(mx.concatenate(values))) if values else b""
    return blake2b(names.encode() + read, digest_size=SIZE).digest()


def _spread(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of a few values, spread over a tensor of this shape."""
    return tuple(slice(None, None, max(n // N_VALUES, 1)) for n in shape)
