"""The common part of the family's models: construction, the loading of their weights, and the head as a draft model."""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import MTPError
from ..layers.mtp import MTPModule, has_head
from .draft_model import DraftModel
from .head_weights import is_raw, sanitize_head, split_head
from .mixin import MTPModel
from .rope import MRoPE, add_mrope


class FamilyModel(MTPModel):
    """A model with its MTP head. List it before mlx-lm's model among the bases."""

    @property
    def no_images(self) -> str | None:  # type: ignore[override]
        """Why it takes no images, if so: their positions have three axes."""
        if self.text_only is not None:
            return self.text_only
        if all(isinstance(layer.self_attn.rope, MRoPE) for layer in self.layers if not layer.is_linear):
            return None
        return "The model takes no images: its positions have one axis, or are scaled (YaRN)."

    def make_draft_model(self) -> DraftModel:
        """The head as a draft model for mlx-lm's own speculative loop, see ``draft_model.py``; an MTPError without a head."""
        if not has_head(self):
            raise MTPError("The model has no MTP head: load it with mlx_mtp.load, or generate without MTP.")
        return DraftModel(self)

    def sanitize(
        self, weights: dict[str, mx.array], head: Mapping[str, mx.array] | None = None, raw: bool = False
    ) -> dict[str, mx.array]:
        """mlx-lm's ``sanitize``, which drops the head, and then that of ``head``, by default the one in ``weights``."""
        weights, inside = split_head(weights)
        if head is None:
            head, raw = inside, is_raw(weights)
        weights = super().sanitize(weights)  # type: ignore[misc]
        if has_head(self):
            own = sanitize_head(self.mtp, head, raw and self.shifts_norms)
            weights.update({self.head_prefix + name: w for name, w in own.items()})
        return weights


def without_layers(args: Any) -> Any:
    """Arguments for mlx-lm's constructors, whose layers would only be replaced."""
    args = copy(args)
    args.num_hidden_layers = 0
    return args


def add_head(model: Any, args: Any, decoder_layer: Callable[..., nn.Module]) -> None:
    """Give a model layers that can roll back, and the head if its text arguments have one."""
    model.model.layers = [decoder_layer(args, layer_idx=i) for i in range(args.num_hidden_layers)]
    attention = [layer.self_attn for layer in model.model.layers if not layer.is_linear]
    if args.mtp_num_hidden_layers > 0:
        model.mtp = MTPModule(args, decoder_layer(args, layer_idx=args.full_attention_interval - 1))
        attention.append(model.mtp.layers[0].self_attn)
    for own in attention:
        add_mrope(own, getattr(args, "rope_parameters", None))
