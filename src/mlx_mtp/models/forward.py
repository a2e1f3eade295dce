"""What every model with a head does beside mlx-lm's forward: it is built with one, records windows, and feeds the head."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import cache as caches
from .attention import Attention, rows_at_once
from .exact import one_by_one
from .mtp import MTPModule
from .positions import add_mrope, rope_at
from .prompt_cache import positions_of


def add_head(
    model: Any, args: Any, gated_delta_net: Callable[..., nn.Module], decoder_layer: Callable[..., nn.Module]
) -> None:
    """Replace a model's recurrent layers by those that can roll back, and its attention by one that can take a window in
    groups; give it its head if it has one.

    Args:
        args: The text arguments.
        gated_delta_net: Makes a recurrent layer of ``args``.
        decoder_layer: Makes a decoder layer of ``args`` and ``layer_idx``, which is recurrent or not by its index.
    """
    for layer in model.layers:
        if layer.is_linear:
            layer.linear_attn = gated_delta_net(args)
        else:
            layer.self_attn = Attention(args)
    if args.mtp_num_hidden_layers > 0:
        model.mtp = MTPModule(args, decoder_layer(args, layer_idx=args.full_attention_interval - 1))
    attention = [layer.self_attn for layer in model.layers if not layer.is_linear]
    for own in [*attention, *([model.mtp.layers[0].self_attn] if args.mtp_num_hidden_layers > 0 else [])]:
        add_mrope(own, getattr(args, "rope_parameters", None))


def forward(
    model: Any,
    inputs: mx.array,
    cache: list[Any] | None,
    *,
    return_hidden: bool = False,
    n_confirmed: int = 0,
    exact: bool = False,
    attention_rows: int | None = None,
    **kwargs: Any,
) -> mx.array | tuple[mx.array, mx.array]:
    """The call of ``mlx_mtp.models.qwen3_5.Model``, with the backbone as ``model.model`` and its options as ``kwargs``.

    Args:
        attention_rows (int, optional): As in ``Drafting``.
    """
    if n_confirmed > 0:
        caches.open_windows(cache, len(model.layers), n_confirmed, exact)
    with rows_at_once(attention_rows if n_confirmed > 0 else None), rope_at(positions_of(cache, len(model.layers))):
        if exact:
            logits, hidden = one_by_one(model, inputs, cache, **kwargs)
        else:
            # The layers' caches alone: in a pipeline mlx-lm's backbone writes to the last.
            hidden = model.model(inputs, None if cache is None else cache[: len(model.layers)], **kwargs)
            logits = model.logits(hidden)
    return (logits, hidden) if return_hidden else logits
