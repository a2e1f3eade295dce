"""The settings of a model's drafts, which ``mlx_mtp.load`` sets, and the output layer of cheaper ones.

A cheaper draft has an output layer of fewer tokens or bits, or a head of fewer bits. The text does not change.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from ...errors import MTPError


@dataclass(frozen=True)
class Settings:
    """Tuned settings: arguments of ``mlx_mtp.load``, and the defaults of ``num_draft_tokens`` and ``draft_p_min``."""

    num_draft_tokens: int | Literal["auto"] = "auto"  # 0 is plain decoding
    mtp_bits: int | None = None
    draft_head_bits: int | None = None
    draft_vocab: int | None = None
    draft_p_min: float = 0.0
    # The times of steps by draft length, for "auto"
    seconds: Mapping[int, float] = field(default_factory=dict, hash=False)
    compiled: bool = True  # whether passes over a few tokens are

    def __str__(self) -> str:
        n = self.num_draft_tokens
        words = [n if n == "auto" else "off" if n == 0 else f"--num-draft-tokens {n}"]
        for name, value in vars(self).items():
            if name not in ("num_draft_tokens", "seconds") and value != getattr(Settings, name):
                is_flag = name.startswith(("mtp", "draft"))
                words.append(f"--{name.replace('_', '-')} {value}" if is_flag else f"{name}={value}")
        return " ".join(words)


class DraftLMHead:
    """The output layer of drafts, with copies of the model's weights, which are no parameters.

    Args:
        layer: The model's ``lm_head``, or its embedding if they are tied; quantized or not.
        ids: The tokens whose weights to copy, in ascending order, so that the first of equal logits is chosen; ``None``: all.
    """

    def __init__(self, layer: nn.Module, ids: list[int] | None, bits: int | None = None):
        self._whole = layer.fuse() if hasattr(layer, "fuse") else layer  # a LoRA layer, with its adapter
        self._bits = bits
        self.ids = None if ids is None else mx.array(ids, mx.uint32)  # [n]
        self.layers = [self._rows(self.ids)]
        self._tokens = [set(ids or ())]  # the tokens of each layer

    def __call__(self, hidden: mx.array, vocab_size: int) -> mx.array:
        """[B, T, H] -> logits [B, T, V], which are -inf for tokens that are not in ``ids``"""
        of_each = [(layer.as_linear if hasattr(layer, "as_linear") else layer)(hidden) for layer in self.layers]
        logits = of_each[0] if len(of_each) == 1 else mx.concatenate(of_each, axis=-1)
        if self.ids is None:
            return logits
        every = mx.full((*logits.shape[:-1], vocab_size), -mx.inf, logits.dtype)
        return mx.put_along_axis(every, mx.broadcast_to(self.ids, logits.shape), logits, axis=-1)

    def with_tokens(self, tokens: Iterable[int]) -> "DraftLMHead":
        """This layer if it has these tokens, otherwise a new one, with the new tokens last in ``ids``."""
        new = [i for i in dict.fromkeys(tokens) if not any(i in of_layer for of_layer in self._tokens)]
        if self.ids is None or not new:
            return self
        others, added = [*self._tokens], {*new}
        # A layer takes the rows of those behind it that are no larger, so there are few, and each row is copied a few times.
        while len(others) > 1 and len(others[-1]) <= len(added):
            added |= others.pop()
        lm_head = copy.copy(self)
        lm_head.ids = mx.concatenate([self.ids, mx.array(new, mx.uint32)])
        lm_head.layers = [*self.layers[: len(others)], self._rows(lm_head.ids[-len(added) :])]
        lm_head._tokens = [*others, added]
        return lm_head

    def _rows(self, ids: mx.array | None) -> nn.Module:
        layer = self._whole
        if ids is not None:
            layer = copy.copy(layer)
            for name in ("weight", "scales", "biases"):
                if layer.get(name) is not None:
                    layer[name] = layer[name][ids]
        if self._bits is None:
            return layer
        weight = layer.weight
        if "scales" in layer:
            if self._bits >= layer.bits:
                raise MTPError(
                    f"draft_head_bits must be less than the {layer.bits} bits of the model's lm_head, not {self._bits}."
                )
            how = layer.group_size, layer.bits
            weight = mx.dequantize(weight, layer.scales, layer.get("biases"), *how, mode=layer.mode)
        return QuantizedRows(weight, self._bits)


class QuantizedRows(nn.QuantizedLinear):
    """MLX's layer of a weight [n, H], without the random numbers that its own constructor draws."""

    def __init__(self, weight: mx.array, bits: int):
        nn.Module.__init__(self)
        self.group_size, self.bits, self.mode = quantized_group_size(weight), bits, "affine"
        self.weight, self.scales, self.biases = mx.quantize(weight, self.group_size, bits)


def quantized_group_size(weight: mx.array) -> int:
    """The group size to quantize a weight with."""
    return 64 if weight.shape[-1] % 64 == 0 else 32


@dataclass(frozen=True)
class DraftSettings:
    """``model.draft_settings``, by flags and ``--tune``."""

    tuned: Settings = Settings()  # those of ``--tune``
    lm_head: DraftLMHead | None = None  # the output layer of the drafts; ``None``: the model's own

    @property
    def are_tuned(self) -> bool:
        return self.tuned != Settings()
