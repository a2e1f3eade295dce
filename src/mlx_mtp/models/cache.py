"""Caches that can go back a few tokens, and the one list that holds a model's and its head's.

A prompt cache is mlx-lm's list with two entries more: one cache for each layer of the backbone, the head's ``KVCache``, and
an ``ArraysCache`` with the hidden state of the last token, which the head needs once the next token is known, and the number
of tokens that the backbone's caches held then. By name and state all of them are mlx-lm's own classes: its
``save_prompt_cache`` writes the list, its ``load_prompt_cache`` reads it.

This module knows nothing of layers, drafts or acceptance.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock
from mlx_lm.models.gated_delta import gated_delta_update


@mx.compile
def _replay(*inputs: mx.array) -> mx.array:
    """The state after a few tokens. Compiled, since only then the outputs, which nobody wants, are not computed."""
    return gated_delta_update(*inputs)[1]


@dataclass
class _Window:
    """What is needed to go back inside one call of a recurrent layer."""

    n_confirmed: int
    n_tokens: int = 0
    conv_input: mx.array | None = None  # [B, K - 1 + n_tokens, C]
    state: mx.array | None = None  # [B, Hv, Dv, Dk], after n_confirmed tokens
    inputs: tuple[mx.array, ...] = ()  # q, k, v, a, b of the other tokens, each [B, n_tokens - n_confirmed, ...]
    gates: tuple[mx.array, ...] = ()  # A_log [Hv], dt_bias [Hv]
    # In exact mode, in place of these: the cache's arrays after the last confirmed token and after each that follows.
    states: list[list[mx.array]] | None = None


class ArraysCache(stock.ArraysCache):
    """mlx-lm's ``ArraysCache`` of a GatedDeltaNet layer, of which the last call can be undone in part.

    ``begin`` opens a window, the layer's call records in it, ``rollback`` closes it. In between, ``state`` is that after the
    whole window. The class bears its parent's name because a prompt cache file names the classes it is made of.
    """

    cache: list[Any]
    window: _Window | None = None
    draft: Any = None  # the draft model's cache, in mlx-lm's own speculative loop: see draft_model.py

    def is_trimmable(self) -> bool:
        if self.draft is None:
            return False
        return self.empty() or (self.window is not None and self.window.n_tokens > 0)

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens of the open window, and close it.

        Raises:
            ValueError: They are not in the window, or there is none.
        """
        if self.draft is None:
            raise ValueError("A recurrent layer's cache cannot be trimmed.")
        if self.empty():
            return 0
        kept = 0 if self.window is None else self.window.n_tokens - n
        self.rollback(kept)
        self.draft.keep(kept)
        return n

    def begin(self, n_confirmed: int, exact: bool = False) -> None:
        """Have the next call recorded.

        Args:
            n_confirmed (int): The number of its leading tokens that are final.
            exact (bool): The tokens come one by one, with ``keep_state`` after each, and the layer records nothing.

        Raises:
            ValueError: The last window is still open, or the cache is that of padded prompts.
        """
        if self.window is not None:
            raise ValueError("The last window of this cache is still open: close it with rollback.")
        if self.lengths is not None or self.left_padding is not None:
            raise ValueError("A cache of padded prompts cannot go back.")
        self.window = _Window(n_confirmed, states=[] if exact else None)

    @property
    def records_inputs(self) -> bool:
        """Whether the layer's next call has to record what the recurrence is replayed from."""
        return self.window is not None and self.window.states is None

    def keep_state(self) -> None:
        """In an exact window, after the layer's call on one token: make the state one to go back to."""
        if self.window is not None and self.window.states is not None:
            self.window.n_tokens += 1
            if self.window.n_tokens >= self.window.n_confirmed:
                self.window.states.append(list(self.cache))

    def rollback(self, n: int) -> None:
        """Close the window: keep its first ``n`` tokens and release what was recorded.

        The recurrence is replayed from the recorded inputs, so no weight matrix is multiplied with. In exact mode each
        state was kept, because a replay is not bound to round as the layer's own call did.

        Args:
            n (int): From the number of confirmed tokens to that of all.

        Raises:
            ValueError: No window is open, or the state after ``n`` tokens was not recorded.
        """
        window = self.window
        if window is None:
            raise ValueError("There is nothing to go back to: call the model with n_confirmed to record a window.")
        if not window.n_confirmed <= n <= window.n_tokens:
            raise ValueError(
                f"Cannot keep {n} tokens of a window of {window.n_tokens} of which {window.n_confirmed} are final."
            )
        cache = self.cache
        if window.states is not None:
            cache = window.states[n - window.n_confirmed]
        elif n < window.n_tokens:
            assert window.conv_input is not None
            assert window.state is not None
            n_keep = window.conv_input.shape[1] - window.n_tokens  # K - 1
            # A copy, since a slice pins the array that it is cut from.
            cache = [mx.contiguous(window.conv_input[:, n : n + n_keep]), window.state]
            if n > window.n_confirmed:
                inputs = [x[:, : n - window.n_confirmed] for x in window.inputs]
                cache[1] = _replay(*inputs, *window.gates, window.state)
        self.cache = cache
        self.window = None  # last: until here it can be done again


def begin(caches: list[Any] | None, n_layers: int, n_confirmed: int, exact: bool = False) -> None:
    """Open a window in each recurrent layer's cache. A key-value cache needs none: it can be trimmed."""
    if caches is None:
        raise ValueError("With n_confirmed, the model needs a cache to record in.")
    for c in caches[:n_layers]:
        if isinstance(c, stock.ArraysCache):
            if not isinstance(c, ArraysCache):
                raise ValueError("This cache cannot go back: make it with model.make_cache().")
            c.begin(n_confirmed, exact)


def rollback(caches: list[Any], offset: int, n: int, again: bool = False) -> None:
    """Keep the first ``n`` tokens of the window that began at ``offset`` in each of a model's caches.

    With ``again``, after a call that was interrupted: those where the window is closed already stay as they are.
    """
    for c in caches:
        if not isinstance(c, ArraysCache):
            c.trim(c.offset - (offset + n))
        elif not (again and c.window is None):
            c.rollback(n)
    # The device would else wait while the next pass is being built.
    mx.async_eval([c.cache for c in caches if isinstance(c, ArraysCache)])


def positions(caches: list[Any]) -> list[Any]:
    """Where caches are, for ``go_back``: the number of tokens, or the arrays where tokens cannot be taken back one by one."""
    return [c.offset if hasattr(c, "offset") else list(c.cache) for c in caches]


def go_back(caches: list[Any], before: list[Any]) -> None:
    """Take back what caches were given since they were at these ``positions``, be it to half of the layers."""
    for c, b in zip(caches, before):
        if hasattr(c, "offset"):
            c.trim(c.offset - b)
        else:
            c.cache, c.window = b, None


def make_prompt_cache(model: nn.Module) -> list[Any]:
    """An empty prompt cache for a model and its MTP head.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``.

    Returns:
        List[Any]: A cache for each layer, then the head's keys and values, then the last token's hidden state.
    """
    return model.make_cache() + _make_head_cache()


def _make_head_cache() -> list[Any]:
    return [stock.KVCache(), stock.ArraysCache(size=2)]


def adopt_prompt_cache(model: nn.Module, prompt_cache: list[Any]) -> None:
    """Make a prompt cache that came from a file, or from mlx-lm, one of ``make_prompt_cache``, in place.

    What mlx-lm has filled without the head lacks the head's rows. Only relative positions count in the head: it then begins
    with the tokens that follow, and guesses less well until it has seen some of them.

    Raises:
        ValueError: The cache is not one of this model's.
    """
    n_layers = len(model.layers)
    if len(prompt_cache) not in (n_layers, n_layers + 2):
        raise ValueError(
            f"The prompt cache has {len(prompt_cache)} entries and this model's {n_layers + 2}: "
            "make it with mlx_mtp.make_prompt_cache(model)."
        )
    kinds = [stock.ArraysCache if isinstance(c, stock.ArraysCache) else stock.KVCache for c in model.make_cache()]
    for i, (c, kind) in enumerate(zip(prompt_cache, kinds)):
        if not isinstance(c, (kind, stock.QuantizedKVCache) if kind is stock.KVCache else kind):
            raise ValueError(
                f"Entry {i} of the prompt cache is a {type(c).__name__}, where this model's is a {kind.__name__}: "
                "make it with mlx_mtp.make_prompt_cache(model)."
            )
        if type(c) is stock.ArraysCache:
            prompt_cache[i] = ArraysCache.from_state(c.state)
        elif isinstance(c, ArraysCache):
            c.draft = None  # it may come from mlx-lm's own speculative loop
    if len(prompt_cache) == n_layers or _n_seen(prompt_cache) != n_tokens(prompt_cache[:n_layers]):
        prompt_cache[n_layers:] = _make_head_cache()


def n_tokens(caches: list[Any]) -> int:
    """The number of tokens in the caches of a backbone."""
    return max(getattr(c, "offset", 0) for c in caches)


def _n_seen(prompt_cache: list[Any]) -> int:
    """The number of tokens in the backbone's caches when the head was last in step with them."""
    _, count = prompt_cache[-1].cache
    return 0 if count is None else count.item()


def first_row(prompt_cache: list[Any], n_layers: int) -> int:
    """The position of the first of the head's rows: 0 but where the prompt cache has tokens that it has not seen."""
    n_before = n_tokens(prompt_cache[:n_layers])
    return n_before if prompt_cache[-1].empty() else n_before - 1 - prompt_cache[n_layers].offset
