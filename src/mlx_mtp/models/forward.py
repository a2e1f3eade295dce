"""The construction and the forward pass of every model with a head, which records windows and returns hidden states."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..caches import recurrent as caches
from ..caches.positions import add_mrope, rope_at
from ..caches.prompt_cache import positions_of
from ..layers.drafting import DraftConfig
from ..layers.exact import one_by_one
from ..layers.mtp import MTPModule
from ..layers.passes import in_pass, pass_over


def add_head(model: Any, args: Any, decoder_layer: Callable[..., nn.Module]) -> None:
    """Replace a model's layers by layers that can roll back, and add the head if its arguments have one.

    Args:
        args: The text arguments.
        decoder_layer: Makes a decoder layer of ``args`` and ``layer_idx``, which is recurrent or not by its index.
    """
    model.model.layers = [decoder_layer(args, layer_idx=i) for i in range(args.num_hidden_layers)]
    attention = [layer.self_attn for layer in model.model.layers if not layer.is_linear]
    if args.mtp_num_hidden_layers > 0:
        model.mtp = MTPModule(args, decoder_layer(args, layer_idx=args.full_attention_interval - 1))
        attention.append(model.mtp.layers[0].self_attn)
    for own in attention:
        add_mrope(own, getattr(args, "rope_parameters", None))


def forward(
    model: Any,
    inputs: mx.array,
    cache: list[Any] | None,
    *,
    drafting: DraftConfig,
    return_hidden: bool = False,
    n_confirmed: int = 0,
    exact: bool = False,
    **kwargs: Any,
) -> mx.array | tuple[mx.array, mx.array]:
    """The call of ``mlx_mtp.models.qwen3_5.Model``, with the backbone as ``model.model`` and its options as ``kwargs``.

    Args:
        drafting (DraftConfig): How to run passes.
    """
    if n_confirmed > 0:
        caches.open_windows(cache, len(model.layers), n_confirmed, exact)
    with (
        in_pass(pass_over(inputs.shape[1], drafting, n_confirmed, exact)),
        rope_at(positions_of(cache, len(model.layers))),
    ):
        if exact:
            logits, hidden = one_by_one(model, inputs, cache, **kwargs)
        else:
            # The layers' caches alone: in a pipeline mlx-lm's backbone writes to the last.
            hidden = model.model(inputs, None if cache is None else cache[: len(model.layers)], **kwargs)
            logits = model.logits(hidden)
    return (logits, hidden) if return_hidden else logits
