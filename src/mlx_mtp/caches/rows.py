"""Caches of several sequences in one pass, one in each row.

    row 0   a b c d e f . . . .     a row's tokens begin at column 0 and never move;
    row 1   g h . . . . . . . .     a window is written after each row's own last token,
    row 2   i j k l . . . . . .     and the next window overwrites rejected tokens

Each row has its own rollback: its keys and values by their number, its recurrent states by a replay of the tokens to keep. A
row is made from the caches of one sequence, and can be extracted into such caches. This module does not depend on
layers, drafts or acceptance.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock

from .prompt_cache import PromptCache
from .recurrent import ArraysCache, recur


@mx.compile
def _replay(inputs: list[mx.array], state: mx.array, mask: mx.array) -> mx.array:
    """The state of each row after the tokens in its mask. It is compiled so that unused outputs are not computed."""
    return recur(inputs, state, mask)[1]


class Rows:
    """The number of tokens in each row, shared by the caches of all layers.

    Attributes:
        lengths (list[int]): [B]
        offset (mx.array): The same on the device, [B].
        shifts (list[int]): The difference of position and index of each row's next token: not 0 in texts with images, [B].
        positions (mx.array): The position of each row's next token, [B].
    """

    def __init__(self) -> None:
        self.shifts: list[int] = []
        self.set([])

    def set(self, lengths: Sequence[int], shifts: Sequence[int] | None = None) -> None:
        """Set the lengths and, if given, the shifts."""
        self.lengths = list(lengths)
        self.offset = mx.array(self.lengths, mx.int32)
        self.shifts = self.shifts if shifts is None else list(shifts)
        self.positions = self.offset + mx.array(self.shifts, mx.int32) if any(self.shifts) else self.offset
        self._columns: dict[int, mx.array] = {}

    def filter(self, keep: Sequence[int]) -> None:
        self.set([self.lengths[b] for b in keep], [self.shifts[b] for b in keep])

    def add(self, counts: Sequence[int]) -> None:
        self.set([n + count for n, count in zip(self.lengths, counts)])

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def are_equal(self) -> bool:
        return len(set(self.lengths)) == 1

    def columns(self, T: int) -> mx.array:
        """The columns of the next T tokens of each row, [B, T]."""
        if T not in self._columns:
            self._columns[T] = self.offset[:, None] + mx.arange(T)
        return self._columns[T]


class RowsKVCache:
    """The keys and values of a layer.

    A pass writes after each row's last token. ``Rows.add`` then sets how many of these tokens stay.

    Args:
        rows (Rows): Shared with the other layers.
    """

    step = stock.KVCache.step

    def __init__(self, rows: Rows):
        self.rows = rows
        self.keys: mx.array | None = None  # [B, H, S, D]
        self.values: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token, [B]: rope takes an array."""
        return self.rows.positions

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add keys and values of T tokens of each row, [B, H, T, D] -> the keys and values of all tokens, [B, H, n, D]."""
        B, _, T, _ = keys.shape
        n = self.rows.longest + T
        self.keys, self.values = self._grown(self.keys, keys, n), self._grown(self.values, values, n)
        if self.rows.are_equal:
            begin = n - T
            self.keys[..., begin:n, :] = keys
            self.values[..., begin:n, :] = values
        else:
            rows, columns = mx.arange(B)[:, None], self.rows.columns(T)
            self.keys[rows, :, columns] = keys.transpose(0, 2, 1, 3)  # [B, T, H, D]
            self.values[rows, :, columns] = values.transpose(0, 2, 1, 3)
        return self.keys[..., :n, :], self.values[..., :n, :]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """The columns that each of N tokens attends to, [B, 1, N, n]: its row up to itself; ``None`` for all columns."""
        if N == 1 and self.rows.are_equal and not return_array:
            return None
        columns = mx.arange(self.rows.longest + N)
        return (columns <= self.rows.columns(N)[..., None])[:, None]

    def join(self, caches: list[Any]) -> None:
        """Add a row for each ``KVCache``. Call before ``self.rows`` has the new lengths."""
        B = len(self.rows.lengths)
        n = max([*self.rows.lengths, *(c.offset for c in caches)])
        for name in ("keys", "values"):
            own = [(getattr(self, name), B, n)] if B else []
            new = [(getattr(c, name), 1, c.offset) for c in caches]
            setattr(self, name, self._stacked([*own, *new], n))

    def filter(self, keep: list[int]) -> None:
        """Keep these rows. Call after ``self.rows`` has the new lengths."""
        if self.keys is not None and self.values is not None:
            size, rows = self._size(self.rows.longest), mx.array(keep)
            self.keys, self.values = self.keys[rows, :, :size], self.values[rows, :, :size]

    def extract(self, b: int, n: int) -> stock.KVCache:
        """Row b's first n tokens."""
        cache = stock.KVCache()
        if n > 0:
            assert self.keys is not None
            assert self.values is not None
            cache.keys, cache.values = (mx.contiguous(x[b : b + 1, :, :n]) for x in (self.keys, self.values))
            cache.offset = n
        return cache

    def _size(self, n: int) -> int:
        """Whole steps, with space for the next tokens."""
        return (n // self.step + 1) * self.step

    def _grown(self, held: mx.array | None, new: mx.array, n: int) -> mx.array:
        """The held array, enlarged to hold n tokens if needed."""
        size = 0 if held is None else held.shape[2]
        if held is not None and n <= size:
            return held
        B, H, _, D = new.shape
        space = mx.zeros((B, H, self._size(n) - size, D), new.dtype)
        return space if held is None else mx.concatenate([held, space], axis=2)

    def _stacked(self, parts: list[tuple[mx.array | None, int, int]], n: int) -> mx.array | None:
        """Concatenate parts (array [B, H, S, D], its B, its number of tokens) along B, with space for n tokens."""
        like = next((x for x, *_ in parts if x is not None), None)
        if like is None:
            return None
        _, H, _, D = like.shape
        padded = []
        for x, B, n_held in parts:
            x = mx.zeros((B, H, 0, D), like.dtype) if x is None else x[:, :, :n_held]
            padded.append(mx.pad(x, [(0, 0), (0, 0), (0, self._size(n) - x.shape[2]), (0, 0)]))
        return mx.concatenate(padded)


class HeadRows(RowsKVCache):
    """The keys and values of the head. As in mlx-lm's ``KVCache``, the tokens of a pass stay until they are trimmed.

    Args:
        caches (Sequence[KVCache]): One for each row.
        shifts (Sequence[int]): As in ``Rows``.
    """

    def __init__(self, caches: Sequence[stock.KVCache] = (), shifts: Sequence[int] = ()):
        super().__init__(Rows())
        if caches:
            self.join([*caches], shifts)

    @property
    def state(self) -> list[mx.array | None]:
        return [self.keys, self.values]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        fetched = super().update_and_fetch(keys, values)
        self.rows.add([keys.shape[2]] * len(keys))
        return fetched

    def trim(self, n: int) -> None:
        """Remove the last ``n`` tokens of each row."""
        self.trim_each([n] * len(self.rows.lengths))

    def trim_each(self, counts: Sequence[int]) -> None:
        """Remove the last ``counts[b]`` tokens of row b."""
        if any(counts):
            self.rows.add([-n for n in counts])

    def join(self, caches: list[Any], shifts: Sequence[int] = ()) -> None:
        super().join(caches)
        self.rows.set([*self.rows.lengths, *(c.offset for c in caches)], [*self.rows.shifts, *shifts])

    def filter(self, keep: list[int]) -> None:
        self.rows.filter(keep)
        super().filter(keep)

    def extract(self, b: int, n: int | None = None) -> stock.KVCache:
        return super().extract(b, self.rows.lengths[b] if n is None else n)


class RowsArraysCache(ArraysCache):
    """The states of a recurrent layer. A window is recorded as for one sequence, with one confirmed token."""

    def join(self, caches: list[ArraysCache], B: int) -> None:
        """Add a row for each cache to the B present rows."""
        parts = [(self.cache, B), *((c.cache, 1) for c in caches)] if B else [(c.cache, 1) for c in caches]
        self.cache = [_stacked([(arrays[i], n) for arrays, n in parts]) for i in range(2)]

    def filter(self, keep: list[int]) -> None:
        rows = mx.array(keep)
        self.cache = [None if x is None else x[rows] for x in self.cache]

    def roll_back(self, kept: list[int], ends: mx.array, mask: mx.array) -> None:
        """Close the window, if one is open: keep the first tokens of each row.

        Args:
            kept (List[int]): The number of tokens to keep in each row, at least 1, [B].
            ends (mx.array): The indices of the convolution's last inputs after these tokens, [B, K - 1, 1].
            mask (mx.array): Whether each token after the first is kept, [B, max(kept) - 1].
        """
        window = self.window
        if window is not None and min(kept) < window.n_tokens:
            assert window.conv_input is not None
            assert window.state is not None
            state, m = window.state, mask.shape[1]
            if m > 0:
                state = _replay([x[:, :m] for x in window.inputs], state, mask)
            self.cache = [mx.take_along_axis(window.conv_input, ends, axis=1), state]
        self.window = None

    def extract(self, b: int) -> ArraysCache:
        """Row b; with an open window, after its confirmed token."""
        cache = ArraysCache(size=2)
        cache.cache = [mx.contiguous(x[b : b + 1]) for x in after_first(self)]
        return cache


def after_first(cache: ArraysCache) -> list[Any]:
    """The arrays of a recurrent layer, after the first token of an open window if there is one."""
    window = cache.window
    if window is None:
        return cache.cache
    assert window.conv_input is not None
    n_keep = window.conv_input.shape[1] - window.n_tokens  # K - 1
    return [window.conv_input[:, 1 : 1 + n_keep], window.state]


def _stacked(parts: list[tuple[mx.array | None, int]]) -> mx.array | None:
    """Concatenate parts (array [B, ...], its B) along B. A missing array becomes zeros, the state before any token."""
    like = next((x for x, _ in parts if x is not None), None)
    if like is None:
        return None
    return mx.concatenate([mx.zeros((B, *like.shape[1:]), like.dtype) if x is None else x for x, B in parts])


class RowsCache:
    """The caches of several sequences, with the interface of ``protocol.PassCaches``.

    Attributes:
        before_pass (None): Several sequences cannot be restored to the state before a pass.
    """

    before_pass: list[Any] | None = None

    def __init__(self, model: Any):
        self.rows = Rows()
        self.n_in_flight = 0  # tokens of each row in the pass in flight
        # A GatedDeltaNet layer's convolution keeps K - 1 inputs.
        self.n_conv = next((l.linear_attn.conv_kernel_size - 1 for l in model.layers if l.is_linear), 0)
        self.entries: list[Any] = [
            RowsArraysCache(size=2) if l.is_linear else RowsKVCache(self.rows) for l in model.layers
        ]

    @property
    def n_tokens(self) -> list[int]:
        return self.rows.lengths

    @property
    def states(self) -> list[list[Any]]:
        """The arrays of the recurrent layers."""
        return [c.cache for c in self.entries if isinstance(c, RowsArraysCache)]

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.entries)

    def join(self, caches: list[PromptCache]) -> None:
        """Add a row for each sequence."""
        for entry, *new in zip(self.entries, *(c.backbone for c in caches)):
            if isinstance(entry, RowsArraysCache):
                entry.join(new, len(self.rows.lengths))
            else:
                entry.join(new)
        shifts = (sum(image.shift for image in c.images) for c in caches)
        self.rows.set([*self.rows.lengths, *(c.n_tokens for c in caches)], [*self.rows.shifts, *shifts])

    def filter(self, keep: list[int]) -> None:
        """Keep these rows."""
        self.rows.filter(keep)
        for entry in self.entries:
            entry.filter(keep)

    def start_pass(self, n: int) -> None:
        self.n_in_flight = n

    def roll_back(self, kept: list[int]) -> None:
        n, m = mx.array(kept)[:, None], max(kept) - 1
        ends, mask = (n + mx.arange(self.n_conv))[..., None], mx.arange(m) < n - 1
        for entry in self.entries:
            if isinstance(entry, RowsArraysCache):
                entry.roll_back(kept, ends, mask)
        self.rows.add(kept)
        self.n_in_flight = 0
        mx.async_eval(self.states)

    def extract(self, b: int) -> list[Any]:
        n = self.n_tokens[b] + min(self.n_in_flight, 1)
        return [c.extract(b) if isinstance(c, RowsArraysCache) else c.extract(b, n) for c in self.entries]
