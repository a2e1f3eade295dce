"""The caches of recurrent layers, which can roll back to any token of the last window."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import cache as stock
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops

from ...errors import MTPError
from ..traces import compiled


def has_metal_kernel(head_dim: int) -> bool:
    """Whether mlx-lm's recurrence has a kernel of Metal for keys of this dimension."""
    return mx.default_device() == mx.gpu and mx.metal.is_available() and head_dim % 32 == 0


def is_native(chosen: bool | None, head_dim: int) -> bool:
    """Whether a recurrence is MLX's own: as chosen, or where mlx-lm has no kernel of Metal."""
    return not has_metal_kernel(head_dim) if chosen is None else chosen


def inputs_of_recurrence(native: bool, *inputs: mx.array) -> tuple[mx.array, ...]:
    """The inputs as ``recur`` takes them: MLX's own recurrence would round the gates to the type of q."""
    return tuple(x.astype(mx.float32) for x in inputs) if native else inputs


def recur(
    native: bool, inputs: Sequence[mx.array], state: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The part of mlx-lm's ``gated_delta_update`` (0.32.2) after its gates -> the output [B, T, Hv, Dv], and the state.

    Args:
        native: Whether to use MLX's own recurrence in place of mlx-lm's.
        inputs: From ``inputs_of_recurrence``: normalized q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], the gates g, beta [B, T, Hv].
        mask: Whether each token changes the state, [B, T].
    """
    q, k, v, g, beta = inputs
    of_mlx_lm = gated_delta_kernel if has_metal_kernel(q.shape[-1]) else gated_delta_ops
    update: Any = mx.fast.gated_delta_update if native else of_mlx_lm
    out, state = update(q, k, v, g, beta, state, mask)
    return out, state


class State(NamedTuple):
    """An array of a recurrent layer's cache."""

    shape: tuple[int, ...]  # that of one sequence
    dtype: mx.Dtype | None = None  # None: that of activations


class Split(NamedTuple):
    """A pass of a recurrent layer over T tokens, split after the n confirmed ones: the others are drafts."""

    n_tokens: int
    n_confirmed: int
    snapshot: list[mx.array]  # the arrays of the cache after the confirmed tokens
    last_inputs: tuple[mx.array, ...]  # the inputs before the pass and its own, each [B, w + T, C]
    drafts: tuple[mx.array, ...]  # the inputs of the recurrence for the drafts: q, k, v, g, beta, each [B, T - n, ...]
    native: bool | None  # the choice for the pass


def rewound(splits: Sequence[Split], kept: Sequence[int]) -> list[list[mx.array]]:
    """The arrays of each layer after the first ``kept[b]`` tokens of its window in row b, the confirmed ones at least.

    If these are all, the snapshot; otherwise a replay of the recurrence from there, over the drafts that are kept.
    """
    _, n, *_ = splits[0]
    if min(kept) < n:
        raise MTPError(f"{n} tokens of the window are confirmed: they cannot be rolled back to {min(kept)}.")
    if (m := max(kept) - n) == 0:
        return [split.snapshot for split in splits]
    # The layers share lists of indices: a range of the device would be more operations.
    mask = None if len(set(kept)) == 1 else mx.array([[n + i < end for i in range(m)] for end in kept])  # [B, m]
    widths = {x.shape[1] - split.n_tokens for split in splits for x in split.last_inputs}
    # The indices of w last inputs, [B, w, 1]
    ends = {w: mx.array([[[end + i] for i in range(w)] for end in kept]) for w in widths}
    arrays = []
    for split in splits:
        state = split.snapshot[1]
        ends_of_inputs = [ends[x.shape[1] - split.n_tokens] for x in split.last_inputs]
        arrays.append(_rewound(m, split.native, split.last_inputs, state, split.drafts, ends_of_inputs, mask))
    return arrays


def rewind(
    m: int, native: bool | None, last_inputs: Any, state: mx.array, drafts: Any, ends: Any, mask: mx.array | None
) -> list[mx.array]:
    """``rewound`` for one layer. It has a trace for each shape of the window and each number m of drafts to replay."""
    _, state = recur(is_native(native, state.shape[-1]), [x[:, :m] for x in drafts], state, mask)
    first, *others = (mx.take_along_axis(x, end, axis=1) for x, end in zip(last_inputs, ends))
    return [first, state, *others]


_rewound = compiled(rewind)  # the outputs of the recurrence are not computed


class RecurrentCache(stock.ArraysCache):
    """The last inputs of the convolution, the state of the recurrence, and the last inputs that mlx-lm's layers do not have."""

    cache: list[Any]
    split: Split | None = None  # the last pass, if it had drafts; ``cache`` is that after all of them


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
            c.cache, c.split = b, None
