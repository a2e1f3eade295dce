"""Caches that can roll back a few tokens, and the list that holds those of a model and its head.

A prompt cache is mlx-lm's list with two more entries: one cache for each layer of the backbone, the head's ``KVCache``, and
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
    """The state after a few tokens. Compiled, so that the unused outputs are not computed."""
    return gated_delta_update(*inputs)[1]


@dataclass
class _Window:
    """What is needed to roll back inside one call of a recurrent layer."""

    n_confirmed: int
    n_tokens: int = 0
    conv_input: mx.array | None = None  # [B, K - 1 + n_tokens, C]
    state: mx.array | None = None  # [B, Hv, Dv, Dk], after n_confirmed tokens
    inputs: tuple[mx.array, ...] = ()  # q, k, v, a, b of the other tokens, each [B, n_tokens - n_confirmed, ...]
    gates: tuple[mx.array, ...] = ()  # A_log [Hv], dt_bias [Hv]
    # In exact mode, in place of these: the cache's arrays after the last confirmed token and after each that follows.
    states: list[list[mx.array]] | None = None


class ArraysCache(stock.ArraysCache):
    """mlx-lm's ``ArraysCache`` of a GatedDeltaNet layer, whose last call can be undone in part.

    ``begin`` opens a window, the layer's call records in it, ``rollback`` closes it. In between, ``state`` is that after the
    whole window. The class has its parent's name because a prompt cache file names the classes it is made of.
    """

    cache: list[Any]
    window: _Window | None = None
    draft: Any = None  # the draft model's cache, in mlx-lm's own speculative loop: see draft_model.py
    in_use = False  # a generation is open on the prompt cache

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
            raise ValueError("The last verify pass on this cache was not finished: call rollback first.")
        if self.lengths is not None or self.left_padding is not None:
            raise ValueError("A cache of padded prompts cannot roll back.")
        self.window = _Window(n_confirmed, states=[] if exact else None)

    @property
    def records_inputs(self) -> bool:
        """Whether the layer's next call has to record what the recurrence is replayed from."""
        return self.window is not None and self.window.states is None

    def keep_state(self) -> None:
        """In an exact window, after the layer's call on one token: keep the state, so that rollback can return to it."""
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
            raise ValueError("There is nothing to roll back: call the model with n_confirmed to record a window.")
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
                raise ValueError("This cache cannot roll back: make it with model.make_cache().")
            c.begin(n_confirmed, exact)


def trim(caches: list[Any], n_tokens: int) -> None:
    """Keep the first ``n_tokens`` tokens of the key-value caches. Recurrent layers need ``rollback``."""
    for c in caches:
        if not isinstance(c, ArraysCache):
            c.trim(c.offset - n_tokens)


def rollback(caches: list[Any], offset: int, n: int, again: bool = False) -> None:
    """Keep the first ``n`` tokens of the window that began at ``offset`` in each of a model's caches.

    With ``again``, after a call that was interrupted: those where the window is closed already stay as they are.
    """
    trim(caches, offset + n)
    for c in caches:
        if isinstance(c, ArraysCache) and not (again and c.window is None):
            c.rollback(n)
    # So that the device does not wait while the next pass is being built.
    mx.async_eval(recurrent_states(caches))


def recurrent_states(caches: list[Any]) -> list[list[Any]]:
    """The arrays of the recurrent layers' caches."""
    return [c.cache for c in caches if isinstance(c, ArraysCache)]


def snapshot(caches: list[Any]) -> list[Any]:
    """What ``restore`` needs: the number of tokens, or the arrays where tokens cannot be trimmed one by one.

    Keys and values are not held: a cache whose arrays are referenced elsewhere is copied when it is next written.
    """
    return [c.offset if hasattr(c, "offset") else list(c.cache) for c in caches]


def restore(caches: list[Any], before: list[Any]) -> None:
    """Take caches back to a ``snapshot``, whatever part of a pass they have been given since."""
    for c, b in zip(caches, before):
        if hasattr(c, "offset"):
            c.trim(c.offset - b)
        else:
            c.cache, c.window = b, None


class PromptCache:
    """A prompt cache by name. The list stays the one that the caller holds: this is a view of it.

    Args:
        entries (List[Any]): Of ``make_prompt_cache``.
        n_layers (int): The number of the backbone's layers.

    Attributes:
        head (KVCache): The head's keys and values.
    """

    def __init__(self, entries: list[Any], n_layers: int):
        self.entries, self.n_layers = entries, n_layers
        self.head, self._last = entries[n_layers:]

    @property
    def backbone(self) -> list[Any]:
        """A cache for each layer."""
        return self.entries[: self.n_layers]

    @backbone.setter
    def backbone(self, caches: list[Any]) -> None:
        self.entries[: self.n_layers] = caches

    @property
    def last_hidden(self) -> mx.array | None:
        """The hidden state of the last token, [1, 1, H], which the head needs once the next token is known."""
        return self._last[0]

    @last_hidden.setter
    def last_hidden(self, hidden: mx.array) -> None:
        self._last[0] = hidden

    @property
    def n_tokens(self) -> int:
        """The number of tokens in the backbone's caches."""
        return n_tokens(self.backbone)

    @property
    def n_recorded(self) -> int:
        """The number of tokens in the backbone's caches when the head was last in step with them."""
        _, count = self._last.cache
        return 0 if count is None else count.item()

    def record(self, n_tokens: int) -> None:
        """The head is in step with this number of tokens."""
        self._last[1] = mx.array(n_tokens)

    @property
    def first_row(self) -> int:
        """The position of the head's first row: 0, unless mlx-lm filled the backbone's caches without the head."""
        return self.n_tokens if self.last_hidden is None else self.n_tokens - 1 - self.head.offset

    @property
    def in_use(self) -> bool:
        """Whether a generation is open on this cache: its last tokens may be drafts that will be rejected."""
        return any(getattr(c, "in_use", False) for c in self.backbone)

    @in_use.setter
    def in_use(self, value: bool) -> None:
        for c in self.backbone:
            if isinstance(c, ArraysCache):
                c.in_use = value


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


def open_prompt_cache(model: nn.Module, entries: list[Any] | None) -> PromptCache:
    """Check a prompt cache, make it one of ``make_prompt_cache`` in place, and name its parts.

    A cache that mlx-lm filled lacks the head's rows. Only relative positions count in the head: it begins with the tokens that
    follow, and drafts less well until it has seen some of them.

    Args:
        entries (List[Any], optional): Of ``make_prompt_cache``, of mlx-lm or from a file; ``None`` for an empty one.

    Raises:
        ValueError: The cache does not fit this model, or a generation is open on it.
    """
    if entries is None:
        return PromptCache(make_prompt_cache(model), len(model.layers))
    n_layers = len(model.layers)
    if len(entries) not in (n_layers, n_layers + 2):
        raise ValueError(
            f"The prompt cache has {len(entries)} entries and this model's {n_layers + 2}: "
            "make it with mlx_mtp.make_prompt_cache(model)."
        )
    for i, own in enumerate(model.make_cache()):
        entries[i] = _adopt(entries[i], own, i)
    if len(entries) == n_layers:
        entries += _make_head_cache()
    cache = PromptCache(entries, n_layers)
    if cache.in_use:
        raise ValueError(
            "A generation is open on this prompt cache, or ended in another thread: close its generator first, in the thread "
            "that runs it, or give each generation its own copy.deepcopy of the cache."
        )
    if cache.n_recorded != cache.n_tokens:
        entries[n_layers:] = _make_head_cache()
        cache = PromptCache(entries, n_layers)
    return cache


def _adopt(entry: Any, own: Any, i: int) -> Any:
    """The entry of layer i, as a cache that can roll back; ``own`` is an empty one of the model's."""
    kind = stock.ArraysCache if isinstance(own, stock.ArraysCache) else stock.KVCache
    if not isinstance(entry, (kind, stock.QuantizedKVCache) if kind is stock.KVCache else kind):
        raise ValueError(
            f"Entry {i} of the prompt cache is a {type(entry).__name__}, where this model's is a {kind.__name__}: "
            "make it with mlx_mtp.make_prompt_cache(model)."
        )
    if type(entry) is stock.ArraysCache:
        return ArraysCache.from_state(entry.state)
    if isinstance(entry, ArraysCache):
        entry.draft = None  # it may come from mlx-lm's own speculative loop
    return entry


def n_tokens(caches: list[Any]) -> int:
    """The number of tokens in the caches of a backbone."""
    return max(getattr(c, "offset", 0) for c in caches)
