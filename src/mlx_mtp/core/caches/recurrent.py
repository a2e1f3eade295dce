"""The caches of recurrent layers, which can roll back to any token of the last window."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import cache as stock
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops

from ..traces import compiled


def recur(inputs: Sequence[mx.array], state: mx.array, mask: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """The part of mlx-lm's ``gated_delta_update`` (0.32.2) after its gates -> the output [B, T, Hv, Dv], and the state.

    Args:
        inputs: Normalized q and k [B, T, Hk, Dk], v [B, T, Hv, Dv], the gates g and beta [B, T, Hv].
        mask: Whether each token changes the state, [B, T].
    """
    has_kernel = mx.default_device() == mx.gpu and mx.metal.is_available() and inputs[1].shape[-1] % 32 == 0
    return (gated_delta_kernel if has_kernel else gated_delta_ops)(*inputs, state, mask)


class State(NamedTuple):
    """An array of a recurrent layer's cache."""

    name: str
    shape: tuple[int, ...]  # of one sequence
    dtype: mx.Dtype | None = None  # None: that of activations


class Recorded(NamedTuple):
    """The record of a call of a recurrent layer over n tokens; over one token, of which none can be dropped, without arrays."""

    n_tokens: int
    last_inputs: tuple[mx.array, ...]  # those before the call and its own, each [B, w + n, C]
    state: mx.array  # before the call, [B, Hv, Dv, Dk]
    inputs: tuple[mx.array, ...]  # q, k, v, g, beta, each [B, n, ...]


def rewound(windows: Sequence[Recorded], kept: Sequence[int]) -> list[list[mx.array]]:
    """The arrays of each layer after the first ``kept[b]`` tokens of its window in row b, by a replay of the recurrence."""
    # The layers share lists of indices: a range of the device would be more operations.
    n_tokens, m = windows[0].n_tokens, max(kept)
    mask = None if len(set(kept)) == 1 else mx.array([[i < n for i in range(m)] for n in kept])  # [B, m]
    widths = {x.shape[1] - n_tokens for own in windows for x in own.last_inputs}
    ends = {w: mx.array([[[n + i] for i in range(w)] for n in kept]) for w in widths}  # of w last inputs, [B, w, 1]
    arrays = []
    for own in windows:
        own_ends = [ends[x.shape[1] - n_tokens] for x in own.last_inputs]
        arrays.append(_rewound(m, own.last_inputs, own.state, own.inputs, own_ends, mask))
    return arrays


def rewind(m: int, last_inputs: Any, state: mx.array, inputs: Any, ends: Any, mask: mx.array | None) -> list[mx.array]:
    """``rewound`` for one layer. It has a trace for each shape of the window and each number m of tokens to replay."""
    _, state = recur([x[:, :m] for x in inputs], state, mask)
    first, *others = (mx.take_along_axis(x, end, axis=1) for x, end in zip(last_inputs, ends))
    return [first, state, *others]


_rewound = compiled(rewind)  # the outputs of the recurrence are not computed


class RecurrentCache(stock.ArraysCache):
    """The last inputs of the convolution, the state of the recurrence, and the last inputs that mlx-lm's layers do not have."""

    cache: list[Any]
    window: Recorded | None = None  # of the last call, if it was recorded; ``cache`` is that after the window


# Prompt cache files name classes, which mlx-lm looks up among its own.
RecurrentCache.__name__ = stock.ArraysCache.__name__


def snapshot(caches: list[Any]) -> list[Any]:
    """The state of caches for ``restore``. It does not refer to keys and values: MLX would copy them at the next write."""
    return [c.offset if hasattr(c, "offset") else list(c.cache) for c in caches]


def restore(caches: list[Any], before: list[Any]) -> None:
    """Restore caches to a ``snapshot`` after a pass, which may have been interrupted."""
    for c, b in zip(caches, before):
        if hasattr(c, "offset"):
            c.trim(c.offset - b)
        else:
            c.cache, c.window = b, None
