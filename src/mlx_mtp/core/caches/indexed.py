"""The arrays of key-value caches by name, and mlx-lm's caches with one array more: the keys of a sparse layer's indexer."""

from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock

NAMES = ("keys", "values")  # the arrays of mlx-lm's caches: [B, H, S, D], or three such arrays if they are quantized
STEP = stock.KVCache.step


def names_of(cache: Any) -> tuple[str, ...]:
    return getattr(cache, "names", NAMES)


def size_of(n: int) -> int:
    """The columns of arrays for n tokens: whole steps, with space for the next tokens."""
    return (n // STEP + 1) * STEP


def enlarged(array: mx.array | None, like: mx.array, n: int) -> mx.array:
    """An array [B, H, S, D] with space for n tokens; ``None`` for an empty one like another array."""
    size = 0 if array is None else array.shape[2]
    if array is not None and n <= size:
        return array
    B, H, _, D = like.shape
    space = mx.zeros((B, H, size_of(n) - size, D), like.dtype)
    return space if array is None else mx.concatenate([array, space], axis=2)


class Indexed(stock._BaseCache):
    """A key-value cache with ``index_keys``, [B, 1, S, D], which are never quantized. List it before mlx-lm's cache.

    Its state is that of mlx-lm's cache with ``[values, index_keys]`` in place of the values.
    """

    names = (*NAMES, "index_keys")
    index_keys: mx.array | None = None
    offset: int

    def update_and_fetch(self, keys: mx.array, values: mx.array, index_keys: mx.array) -> tuple[Any, Any, mx.array]:
        begin = self.offset
        fetched = super().update_and_fetch(keys, values)
        self.index_keys = enlarged(self.index_keys, index_keys, self.offset)
        self.index_keys[..., begin : self.offset, :] = index_keys
        return *fetched, self.index_keys[..., : self.offset, :]

    @property
    def state(self) -> Any:
        keys, values, *others = super().state
        return keys, [values, self.index_keys], *others

    @state.setter
    def state(self, v: Any) -> None:
        keys, (values, self.index_keys), *others = v
        super(Indexed, type(self)).state.fset(self, (keys, values, *others))

    @property
    def nbytes(self) -> int:
        n: int = super().nbytes
        return n + (0 if self.index_keys is None else self.index_keys.nbytes)


class IndexedQuantizedKVCache(Indexed, stock.QuantizedKVCache):
    pass


class IndexedKVCache(Indexed, stock.KVCache):
    def to_quantized(self, group_size: int = 64, bits: int = 4) -> IndexedQuantizedKVCache:
        cache = IndexedQuantizedKVCache(group_size, bits)
        if self.keys is not None:
            cache.keys, cache.values = (mx.quantize(x, group_size, bits) for x in (self.keys, self.values))
        cache.offset, cache.index_keys = self.offset, self.index_keys
        return cache


# Our classes by mlx-lm's, whose names they have: prompt cache files name classes, and mlx-lm looks them up among its own.
KINDS: Any = {stock.KVCache: IndexedKVCache, stock.QuantizedKVCache: IndexedQuantizedKVCache}
for stock_kind, kind in KINDS.items():
    kind.__name__ = stock_kind.__name__


def adopted(cache: Any) -> Any:
    """One of these caches in place of mlx-lm's, if its state, such as that of a file, has keys of an indexer."""
    ours = KINDS.get(type(cache))
    is_pair = isinstance(getattr(cache, "values", None), list | tuple) and len(cache.values) == 2
    return cache if ours is None or not is_pair else ours.from_state(cache.state)
