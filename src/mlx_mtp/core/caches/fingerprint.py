"""A model's fingerprint identifies its prompt caches: a digest of its config and of checksums of each weight."""

import json
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

SIZE = 16  # bytes of a digest


class Fingerprinted:
    """A model that computes its fingerprint once. List it before mlx-lm's model among the bases."""

    head_prefix = "mtp."  # the beginning of the names of the head's parameters
    _fingerprint: bytes | None = None

    def fingerprint(self) -> bytes:
        self._fingerprint = self._fingerprint or fingerprint(self)
        return self._fingerprint

    def other_weights(self) -> list[tuple[str, mx.array]]:
        """Named samples of the weights that are no parameters."""
        return []

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self._fingerprint = None  # new weights, such as those of an adapter
        return super().update(*args, **kwargs)  # type: ignore[misc]

    def update_modules(self, *args: Any, **kwargs: Any) -> Any:
        self._fingerprint = None
        return super().update_modules(*args, **kwargs)  # type: ignore[misc]


def fingerprint(model: Any) -> bytes:
    """The digest of the backbone, [16], and that of the head, [16]: a prompt cache stays valid if the head is another one.

    The model's own attributes are left out: they tell where its head is from and what it accepted.
    """
    parameters: Any = [*tree_flatten(model.parameters()), *model.other_weights()]
    args = {name: x for name, x in vars(model.text_args).items() if not name.startswith("mtp_")}
    # A module's numbers and names, such as an adapter's scale
    modules: Any = [
        (path, {name: x for name, x in vars(m).items() if name[0] != "_" and isinstance(x, int | float | str)})
        for path, m in model.named_modules()
        if path
    ]

    def part(is_head: bool) -> bytes:
        weights, settings = (
            [pair for pair in pairs if f"{pair[0]}.".startswith(model.head_prefix) is is_head]
            for pairs in (parameters, modules)
        )
        return digest(weights, [args, settings])

    return part(False) + part(True)


def digest(parameters: Iterable[tuple[str, mx.array]], settings: Any = None) -> bytes:
    """The digest of named tensors and of the settings of their modules, [16].

    Of each tensor's bits, the sums of the columns, and the sum of its rows in their order, modulo 2**32, at memory speed.
    """
    parameters = sorted(parameters)
    sums = list[mx.array]()
    names = json.dumps([[(name, p.shape, str(p.dtype)) for name, p in parameters], settings], sort_keys=True)
    for _, p in parameters:
        rows = p.reshape(1, -1) if p.ndim < 2 else p
        kind = {1: mx.uint8, 2: mx.uint16}.get(p.dtype.size, mx.uint32)
        bits = rows.view(mx.uint32 if rows.shape[-1] * p.dtype.size % 4 == 0 else kind).astype(mx.uint32)
        by_row = bits.sum(axis=-1).flatten()
        in_order = by_row * (2 * mx.arange(by_row.size, dtype=mx.uint32) + 1)
        sums += [bits.sum(axis=tuple(range(bits.ndim - 1))), in_order.sum(keepdims=True)]
    read = bytes(np.array(mx.concatenate(sums))) if sums else b""
    return blake2b(names.encode() + read, digest_size=SIZE).digest()
