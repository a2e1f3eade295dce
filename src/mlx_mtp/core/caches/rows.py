"""The caches of the sequences in a pass, one in each row.

    row 0   a b c d e f . . . .     a row's tokens begin at column 0 and never move;
    row 1   g h . . . . . . . .     a window is written after each row's own last token,
    row 2   i j k l . . . . . .     and the next window overwrites rejected tokens

A pass changes no row: it writes keys and values after the rows' ends, and leaves the states of recurrent layers beside those
before it. ``Rows.keep`` then keeps the first tokens of each row, by one assignment of an immutable ``RowsState``. So an
earlier state can be restored by an assignment as well, as long as no row has joined or left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map, tree_reduce
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START

from .indexed import NAMES, enlarged, names_of, size_of
from .prompt_cache import PromptCache
from .recurrent import RecurrentCache, rewound

EVERY = 2048  # tokens of a prompt after which mlx-lm quantizes: its default ``prefill_step_size``


@dataclass(frozen=True, kw_only=True)
class KVOptions:
    """The quantization of keys and values, as in mlx-lm's ``generate_step``.

    Args:
        kv_bits (int, optional): The bits of a key's or value's number. Default: ``None``, no quantization.
        kv_group_size (int): The numbers that share a scale.
        quantized_kv_start (int): The tokens of a text from which on it may be quantized, see ``of_text``.
    """

    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START

    def of_text(self, n_cached: int, n_prompt: int) -> "KVOptions":
        """These options for one text: its keys and values are quantized once it has exactly ``quantized_kv_start`` tokens.

        As in mlx-lm's ``generate_step`` with its own chunks, whatever the chunks here: after a multiple of 2,048 tokens, before
        the last token of the prompt, or after any later token, and at least one token is read before.
        """
        first = max(self.quantized_kv_start, n_cached + 1)
        last = n_cached + n_prompt - 1
        return replace(self, quantized_kv_start=first if first > last else min(-(-first // EVERY) * EVERY, last))

    def at(self, n_tokens: int) -> dict[str, int]:
        """The bits and the group size of a text of so many tokens, as arguments; empty if it is not quantized."""
        if self.kv_bits is None or n_tokens < self.quantized_kv_start:
            return {}
        return {"kv_bits": self.kv_bits, "kv_group_size": self.kv_group_size}

    def end_of_chunk(self, begin: int, max_tokens: int) -> int:
        """The end of a chunk of up to ``max_tokens`` tokens from an index of the text on."""
        at = self.quantized_kv_start
        return min(begin + max_tokens, at) if self.kv_bits is not None and begin < at else begin + max_tokens


@dataclass(frozen=True)
class Ends:
    """The end of each row. Arrays and parts of it are made once for all layers."""

    lengths: tuple[int, ...] = ()  # the number of tokens in each row, [B]
    shifts: tuple[int, ...] = ()  # position minus index of each row's next token: not 0 in texts with images, [B]
    made: dict[Any, Any] = field(default_factory=dict, init=False, compare=False)  # what ``next`` and ``of`` made

    @cached_property
    def columns(self) -> mx.array:
        return mx.array(self.lengths, mx.int32)

    @cached_property
    def positions(self) -> mx.array:
        return self.columns + mx.array(self.shifts, mx.int32) if any(self.shifts) else self.columns

    def next(self, T: int) -> tuple[mx.array, mx.array]:
        """The rows, [B, 1], and columns, [B, T], of the next T tokens of each row."""
        if T not in self.made:
            self.made[T] = mx.arange(len(self.lengths))[:, None], self.columns[:, None] + mx.arange(T)
        return self.made[T]

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @property
    def are_equal(self) -> bool:
        return len(set(self.lengths)) == 1

    def plus(self, counts: Sequence[int]) -> "Ends":
        return Ends(tuple(n + count for n, count in zip(self.lengths, counts)), self.shifts)

    def of(self, rows: Sequence[int]) -> "Ends":
        """The ends of these rows."""
        key = tuple(rows)
        if key not in self.made:
            self.made[key] = Ends(tuple(self.lengths[b] for b in rows), tuple(self.shifts[b] for b in rows))
        return self.made[key]

    def joined(self, other: "Ends") -> "Ends":
        return Ends(self.lengths + other.lengths, self.shifts + other.shifts)


class KVRows:
    """The arrays [B, H, S, D] of an attention layer, named as those of ``like``, a cache of the layer."""

    def __init__(self, like: Any):
        self.ends = Ends()
        self.names = names_of(like)
        self.kind = type(like)
        for name in self.names:
            setattr(self, name, None)
        if hasattr(like, "bits"):  # mlx-lm's attention reads them, too.
            self.group_size, self.bits = like.group_size, like.bits

    @property
    def arrays(self) -> list[Any]:
        return [getattr(self, name) for name in self.names]

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token, [B]: rope takes an array."""
        return self.ends.positions

    @property
    def nbytes(self) -> int:
        return tree_reduce(lambda n, x: n + (0 if x is None else x.nbytes), self.arrays, 0)

    def update_and_fetch(self, *new: mx.array) -> tuple[Any, ...]:
        """Add the arrays of T tokens of each row, [B, H, T, D] each -> those of all tokens, [B, H, n, D]"""
        n = self.ends.longest + new[0].shape[2]
        for name, array, x in zip(self.names, self.arrays, new):
            parts: Any = x
            if name in NAMES and hasattr(self, "bits"):
                parts = mx.quantize(x, self.group_size, self.bits)
                array = array or [None] * len(parts)
            setattr(self, name, tree_map(lambda part, before: self._added(before, part, n), parts, array))
        return tuple(tree_map(lambda x: x[..., :n, :], array) for array in self.arrays)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The columns that each of N tokens attends to, up to itself: [B, 1, N, n], ``"causal"``, or ``None`` for all."""
        if self.ends.are_equal and not return_array:
            return None if N == 1 else "causal"
        _, columns = self.ends.next(N)
        return (mx.arange(self.ends.longest + N) <= columns[..., None])[:, None]

    def _added(self, before: mx.array | None, new: mx.array, n: int) -> mx.array:
        """The array with new columns [B, H, T, D] after each row's end, enlarged to n columns if needed."""
        array = enlarged(before, new, n)
        T = new.shape[2]
        if self.ends.are_equal:
            array[..., n - T : n, :] = new
        else:
            rows, columns = self.ends.next(T)
            array[rows, :, columns] = new.transpose(0, 2, 1, 3)  # [B, T, H, D]
        return array

    def join(self, caches: list[Any], ends: Ends) -> None:
        """Add a row for each ``KVCache`` to those held so far, which have these ends."""
        sizes = [len(ends.lengths), *[1] * len(caches)]
        lengths = [ends.longest, *(c.offset for c in caches)]
        for name in self.names:
            setattr(self, name, _stacked([getattr(c, name) for c in (self, *caches)], sizes, lengths))

    def filter(self, keep: list[int], longest: int) -> None:
        """Keep these rows, the ``longest`` of which has so many tokens."""
        rows = mx.array(keep)
        for name, array in zip(self.names, self.arrays):
            if array is not None:
                setattr(self, name, tree_map(lambda x: x[rows, :, : size_of(longest)], array))

    def extract(self, b: int, n: int) -> Any:
        """The first n tokens of row b. A row that is alone shares its arrays: copy the cache if both go on."""
        cache = self.kind(self.group_size, self.bits) if hasattr(self, "bits") else self.kind()
        if n > 0:
            for name, array in zip(self.names, self.arrays):
                of_row = tree_map(lambda x: x if len(x) == 1 else mx.contiguous(x[b : b + 1, :, :n]), array)
                setattr(cache, name, of_row)
            cache.offset = n
        return cache


class MixedKVRows(KVRows):
    """The keys and values of a layer some of whose rows are quantized, in parts. Attention is computed for each by itself."""

    def __init__(self, parts: list[tuple[list[int], KVRows]]):
        self.ends = Ends()
        self.parts = parts

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for _, part in self.parts)

    def extract(self, b: int, n: int) -> Any:
        rows, part = next((rows, part) for rows, part in self.parts if b in rows)
        return part.extract(rows.index(b), n)


def rows_of(caches: list[Any]) -> KVRows:
    """The rows of a layer, made of a ``KVCache`` or a ``QuantizedKVCache`` for each."""
    parts: list[tuple[list[int], KVRows]] = []
    for is_quantized in (False, True):
        if rows := [b for b, c in enumerate(caches) if hasattr(c, "bits") is is_quantized]:
            part = KVRows(caches[rows[0]])
            part.join([caches[b] for b in rows], Ends())
            parts.append((rows, part))
    return parts[0][1] if len(parts) == 1 else MixedKVRows(parts)


def _stacked(arrays: Sequence[Any], sizes: Sequence[int], lengths: Sequence[int] | None = None) -> Any:
    """Concatenate arrays [B, ...], given the B of each and, of keys and values, the tokens, after which they get space.

    One that is alone is taken as it is, and zeros stand for a missing one.
    """
    like = next((x for x in arrays if x is not None), None)
    if like is None or sum(B > 0 for B in sizes) == 1:
        return like
    if isinstance(like, list | tuple):  # quantized
        parts = zip(*([None] * len(like) if x is None else x for x in arrays))
        return [_stacked(part, sizes, lengths) for part in parts]
    _, *shape = like.shape
    if lengths is not None:
        shape[1] = size_of(max(lengths))
        arrays = [
            x if x is None else mx.pad(x[:, :, :n], [(0, 0), (0, 0), (0, shape[1] - n), (0, 0)])
            for x, n in zip(arrays, lengths)
        ]
    each = zip(arrays, sizes)
    return mx.concatenate([mx.zeros((B, *shape), like.dtype) if x is None else x for x, B in each if B > 0])


@dataclass(frozen=True)
class RowsState:
    """The rows without a pass in flight."""

    ends: Ends
    recurrent: list[list[mx.array | None]]  # the arrays of each recurrent layer
    entries: list[Any]  # a cache for each layer, for the model's call
    starts: tuple[float, ...] = ()  # the tokens at which each row is quantized; infinite if never, or already, [B]


class Rows:
    """The caches of the sequences in a pass, which is in flight, over ``in_flight`` tokens of each row, until ``keep``."""

    def __init__(self, model: Any, kv: KVOptions):
        self.kv = kv
        self.in_flight = 0
        entries = [c if isinstance(c, RecurrentCache) else KVRows(c) for c in model.make_cache()]
        self.recurrent = [c for c in entries if isinstance(c, RecurrentCache)]
        self.state = RowsState(Ends(), self.states, entries)  # without the pass in flight

    @property
    def entries(self) -> list[Any]:
        return self.state.entries

    @property
    def n_tokens(self) -> tuple[int, ...]:
        """The number of tokens in each row, without those of the pass in flight, [B]."""
        return self.state.ends.lengths

    @property
    def bits(self) -> list[int | None]:
        """The bits of the keys and values of each row; ``None`` where they are not quantized, [B]."""
        entry = next((c for c in self.entries if isinstance(c, KVRows)), None)
        every = range(len(self.n_tokens))
        parts = entry.parts if isinstance(entry, MixedKVRows) else [(every, entry)]
        found = {b: getattr(part, "bits", None) for rows, part in parts for b in rows}
        return [found[b] for b in every]

    @property
    def states(self) -> list[list[Any]]:
        """The arrays of the recurrent layers, which a pass in flight computes."""
        return [c.cache for c in self.recurrent]

    @property
    def snapshots(self) -> list[list[mx.array]]:
        """The arrays of the recurrent layers after the confirmed tokens of a pass with drafts."""
        return [c.split.snapshot for c in self.recurrent if c.split is not None]

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.entries)

    def run(self, model: Any, tokens: mx.array, **options: Any) -> Any:
        """Start a pass of the model over the next tokens [B, n] -> its output."""
        self.in_flight = 0
        for c, arrays in zip(self.recurrent, self.state.recurrent):
            c.cache, c.split = [*arrays], None
        for c in self.entries:
            if isinstance(c, KVRows):
                c.ends = self.state.ends
        out = model(tokens, cache=self.entries, **options)
        self.in_flight = tokens.shape[1]
        return out

    def keep(self, kept: Sequence[int]) -> None:
        """Keep the first ``kept[b]`` tokens of the pass in flight in row b, from 1 on, and roll back the others.

        May be interrupted at any line.
        """
        if self.in_flight == 0:
            return
        ends = self.state.ends.plus(kept)
        state = replace(self.state, ends=ends, recurrent=self._after(kept))
        due = [n >= start for n, start in zip(ends.lengths, state.starts)]
        if any(due):
            rows = [*enumerate(ends.lengths)]
            entries = [
                rows_of([self._row(c, *row) for row in rows]) if isinstance(c, KVRows) else c for c in self.entries
            ]
            starts = [math.inf if is_due else start for start, is_due in zip(state.starts, due)]
            state = replace(state, entries=entries, starts=tuple(starts))
        self.state, self.in_flight = state, 0

    def _after(self, kept: Sequence[int]) -> list[list[Any]]:
        """The arrays of the recurrent layers after the first ``kept[b]`` tokens of row b in the pass in flight."""
        splits = [c.split for c in self.recurrent if c.split is not None]  # All recurrent layers have one, or none.
        if not splits or min(kept) == self.in_flight:
            return self.states
        recurrent = rewound(splits, kept)
        mx.async_eval(recurrent)  # Otherwise the device would idle while the host builds the next pass.
        return recurrent

    def _row(self, entry: KVRows, b: int, n: int) -> Any:
        """The first n tokens of row b of a layer, quantized if that is due."""
        cache = entry.extract(b, n)
        return cache.to_quantized(self.kv.kv_group_size, self.kv.kv_bits) if n >= self.state.starts[b] else cache

    def join(self, caches: list[PromptCache], kvs: Sequence[KVOptions]) -> None:
        """Add a row for each prompt cache, with the quantization of its text."""
        state = self.state
        states = iter(state.recurrent)
        sizes = [len(self.n_tokens), *[1] * len(caches)]
        recurrent, entries = list[Any](), list[Any]()
        for entry, *new in zip(state.entries, *(c.backbone for c in caches)):
            if isinstance(entry, RecurrentCache):
                recurrent.append([_stacked(arrays, sizes) for arrays in zip(next(states), *(c.cache for c in new))])
            elif type(entry) is KVRows and all(hasattr(c, "bits") is hasattr(entry, "bits") for c in new):
                entry.join(new, state.ends)
            else:
                entry = rows_of([*(entry.extract(b, n) for b, n in enumerate(self.n_tokens)), *new])
            entries.append(entry)
        shifts = tuple(sum(image.shift for image in c.images) for c in caches)
        ends = state.ends.joined(Ends(tuple(c.n_tokens for c in caches), shifts))
        starts = [
            math.inf
            if kv.kv_bits is None or any(hasattr(entry, "bits") for entry in c.backbone)
            else kv.quantized_kv_start
            for c, kv in zip(caches, kvs)
        ]
        self.state = RowsState(ends, recurrent, entries, (*state.starts, *starts))

    def filter(self, keep: list[int]) -> None:
        """Keep these rows."""
        ends = self.state.ends.of(keep)
        rows = mx.array(keep)
        entries = [*self.entries]
        for i, entry in enumerate(entries):
            if isinstance(entry, MixedKVRows):
                entries[i] = rows_of([entry.extract(b, self.n_tokens[b]) for b in keep])
            elif isinstance(entry, KVRows):
                entry.filter(keep, ends.longest)
        recurrent = [[None if x is None else x[rows] for x in arrays] for arrays in self.state.recurrent]
        self.state = RowsState(ends, recurrent, entries, tuple(self.state.starts[b] for b in keep))

    def extract(self, b: int, n: int) -> list[Any]:
        """The first n tokens of row b as a cache for each layer, with a pass in flight up to its first token."""
        has_first = n > self.n_tokens[b]
        states = iter(self._after([1] * len(self.n_tokens)) if has_first else self.state.recurrent)
        caches = list[Any]()
        for c in self.entries:
            if isinstance(c, RecurrentCache):
                arrays = [None if x is None else mx.contiguous(x[b : b + 1]) for x in next(states)]
                caches.append(RecurrentCache.from_state((arrays, None, None)))
            else:
                caches.append(self._row(c, b, n))
        return caches
