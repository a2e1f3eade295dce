"""A model's fingerprint, which identifies its prompt caches: a digest of its config and of a few values of each weight."""

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
    """The digest of the backbone, [16], followed by the digest of the head, [16].

    They are separate since the text depends only on the backbone: a prompt cache stays valid if the head is quantized or
    fitted.
    """
    parameters: Any = tree_flatten(model.parameters())
    args = {name: x for name, x in vars(model.text_args).items() if not name.startswith("mtp_")}

    def part(is_head: bool) -> bytes:
        own = [(name, p) for name, p in parameters if name.startswith(model.head_prefix) is is_head]
        modules = [
            (name, m) for name, m in model.named_modules() if f"{name}.".startswith(model.head_prefix) is is_head
        ]
        return digest(own, [args, [(name, _numbers(m)) for name, m in modules]])

    return part(False) + part(True)


def digest(parameters: Iterable[tuple[str, mx.array]], settings: Any = None) -> bytes:
    """The digest of named tensors and of the settings of their modules, [16]."""
    parameters = sorted(parameters)
    names = json.dumps([[(name, p.shape, str(p.dtype)) for name, p in parameters], settings], sort_keys=True)
    values = [p[_spread(p.shape)].flatten().view(mx.uint8) for _, p in parameters]
    read = bytes(np.array(mx.concatenate(values))) if values else b""
    return blake2b(names.encode() + read, digest_size=SIZE).digest()


def _numbers(module: Any) -> dict[str, Any]:
    """A module's numbers and names, such as an adapter's scale."""
    is_setting = lambda name, x: not name.startswith("_") and isinstance(x, bool | int | float | str)  # noqa: E731
    return {name: x for name, x in sorted(vars(module).items()) if is_setting(name, x)}


def _spread(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of a few values, spread over a tensor of this shape."""
    return tuple(slice(None, None, max(n // N_VALUES, 1)) for n in shape)
