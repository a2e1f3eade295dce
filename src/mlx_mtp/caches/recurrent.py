"""Caches that can roll back a few tokens. This module does not depend on layers, drafts or acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import cache as stock
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops

from ..errors import MTPError
from ..traces import compiled


def recur(inputs: Sequence[mx.array], state: mx.array, mask: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """The part of mlx-lm's ``gated_delta_update`` (0.32.2) after its gates.

    Args:
        inputs: Normalized q and k [B, T, Hk, Dk], v [B, T, Hv, Dv], the gates g and beta [B, T, Hv].
        state: [B, Hv, Dv, Dk]
        mask: Whether each token changes the state, [B, T].

    Returns:
        The output [B, T, Hv, Dv], and the state after the tokens.
    """
    has_kernel = mx.default_device() == mx.gpu and mx.metal.is_available() and inputs[1].shape[-1] % 32 == 0
    return (gated_delta_kernel if has_kernel else gated_delta_ops)(*inputs, state, mask)


class State(NamedTuple):
    """An array of a recurrent layer's cache."""

    name: str
    shape: tuple[int, ...]  # of one sequence
    dtype: mx.Dtype | None = None  # None: that of activations


@dataclass
class Recorded:
    """The record of one call of a recurrent layer, from which it can be rolled back in part."""

    n_confirmed: int
    n_tokens: int = 0
    last_inputs: tuple[mx.array, ...] = ()  # those before the call and its own, each [B, w + n_tokens, C]
    state: mx.array | None = None  # [B, Hv, Dv, Dk], after n_confirmed tokens
    inputs: tuple[mx.array, ...] = ()  # q, k, v, g, beta of the other tokens, each [B, n_tokens - n_confirmed, ...]


def in_order(last_inputs: Sequence[mx.array], state: Any) -> list[Any]:
    """The arrays of a recurrent layer's cache: mlx-lm's order, then the last inputs that its layers do not have."""
    first, *others = last_inputs
    return [first, state, *others]


def rewound(windows: Sequence[Recorded], kept: Sequence[int]) -> list[list[mx.array]]:
    """The arrays of each layer after the first ``kept[b]`` tokens of its window in row b, by a replay of the recurrence.

    Args:
        windows: The window of each recurrent layer.
        kept: From the number of confirmed tokens to the number of all tokens, [B].
    """
    # Lists, which the host makes once for all layers: a range of the device would be more operations.
    n_tokens, n_confirmed = windows[0].n_tokens, windows[0].n_confirmed
    n_drafts = [n - n_confirmed for n in kept]
    m = max(n_drafts)
    mask = None if len(set(kept)) == 1 else mx.array([[i < n for i in range(m)] for n in n_drafts])  # [B, m]
    ends: dict[int, mx.array] = {}  # the indices of w last inputs, [B, w, 1], by w: made once for all layers

    def ends_of(x: mx.array) -> mx.array:
        w = x.shape[1] - n_tokens
        if w not in ends:
            ends[w] = mx.array([[[n + i] for i in range(w)] for n in kept])
        return ends[w]

    arrays = []
    for own in windows:
        inputs = own.inputs if m > 0 else ()
        rewound = _rewound(m, own.last_inputs, own.state, inputs, [ends_of(x) for x in own.last_inputs], mask)
        arrays.append(in_order(*rewound))
    return arrays


def rewind(
    m: int, last_inputs: Any, state: mx.array, inputs: Any, ends: Any, mask: mx.array | None
) -> tuple[list[mx.array], mx.array]:
    """``rewound`` for one layer. It has a trace for each shape of the window and each number m of tokens to replay."""
    if m > 0:
        state = recur([x[:, :m] for x in inputs], state, mask)[1]
    return [mx.take_along_axis(x, end, axis=1) for x, end in zip(last_inputs, ends)], state


_rewound = compiled(rewind)  # the outputs of the recurrence are not computed


class ArraysCache(stock.ArraysCache):
    """mlx-lm's ``ArraysCache`` of a recurrent layer. Its last call can be rolled back in part.

    Its arrays are the last inputs of the convolution, the state of the recurrence, and any further last inputs (``in_order``).
    After ``open_window`` the layer's next call is recorded, and ``rollback`` closes the window. In between, ``state`` is the
    state after the whole window. The class has its parent's name because a prompt cache file has the names of its classes.
    """

    cache: list[Any]
    window: Recorded | None = None

    def open_window(self, n_confirmed: int) -> None:
        """Record the layer's next call.

        Args:
            n_confirmed: The number of its leading tokens that are final.

        Raises:
            MTPError: The last window is still open, or the cache is for padded prompts.
        """
        if self.window is not None:
            raise MTPError("The last verify pass on this cache was not finished: call rollback first.")
        if self.lengths is not None or self.left_padding is not None:
            raise MTPError("A cache of padded prompts cannot roll back.")
        self.window = Recorded(n_confirmed)

    def rollback(self, n: int) -> None:
        """Close the window: keep its first ``n`` tokens, and free its record.

        The recurrence is replayed from the recorded inputs, without products of weight matrices.

        Args:
            n: From the number of confirmed tokens to the number of all tokens.

        Raises:
            MTPError: No window is open, or the state after ``n`` tokens was not recorded.
        """
        window = self.window
        if window is None:
            raise MTPError("There is nothing to roll back: call the model with n_confirmed to record a window.")
        if not window.n_confirmed <= n <= window.n_tokens:
            raise MTPError(
                f"Cannot keep {n} tokens of a window of {window.n_tokens} of which {window.n_confirmed} are final."
            )
        if n < window.n_tokens:
            (self.cache,) = rewound([window], [n])
        self.window = None


def open_windows(caches: list[Any] | None, n_layers: int, n_confirmed: int) -> None:
    """Open a window in each recurrent layer's cache. Key-value caches need none, since they can be trimmed."""
    if caches is None:
        raise MTPError("With n_confirmed, the model needs a cache to record in.")
    for c in caches[:n_layers]:
        if isinstance(c, stock.ArraysCache):
            if not isinstance(c, ArraysCache):
                raise MTPError("This cache cannot roll back: make it with model.make_cache().")
            c.open_window(n_confirmed)


def rollback(caches: list[Any], offset: int, n: int) -> None:
    """Keep the first ``n`` tokens of the window that began at ``offset`` in each of a model's caches."""
    for c in caches:
        if isinstance(c, ArraysCache):
            c.rollback(n)
        else:
            c.trim(c.offset - offset - n)
    mx.async_eval(recurrent_states(caches))


def recurrent_states(caches: list[Any]) -> list[list[Any]]:
    """The arrays of the recurrent layers' caches."""
    return [c.cache for c in caches if isinstance(c, ArraysCache)]


def snapshot(caches: list[Any]) -> list[Any]:
    """The state of caches for ``restore``: the number of tokens of key-value caches, and the arrays of recurrent layers.

    It has no reference to keys and values, since MLX copies referenced arrays at the next write.
    """
    return [c.offset if hasattr(c, "offset") else list(c.cache) for c in caches]


def restore(caches: list[Any], before: list[Any]) -> None:
    """Restore caches to a ``snapshot`` after a pass, which may have been interrupted."""
    for c, b in zip(caches, before):
        if hasattr(c, "offset"):
            c.trim(c.offset - b)
        else:
            c.cache, c.window = b, None


def after_first(c: ArraysCache) -> list[mx.array | None]:
    """The arrays of a recurrent layer; with an open window, after its confirmed token."""
    window = c.window
    if window is None:
        return c.cache
    return in_order([x[:, 1 : x.shape[1] - window.n_tokens + 1] for x in window.last_inputs], window.state)
