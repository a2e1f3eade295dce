"""Checks that a prompt cache fits a model. A damaged or foreign file could otherwise crash the process or change the text."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock

from ...errors import MTPError
from .indexed import NAMES
from .recurrent import State

FLOATS = (mx.bfloat16, mx.float16, mx.float32)
BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)  # those of MLX's affine quantization

Dtypes = tuple[mx.Dtype, ...]
Shape = tuple[int | None, ...]  # ``None`` for any size


def check_backbone(caches: Sequence[Any], layers: Sequence[Any]) -> None:
    """Raise an MTPError if a cache does not fit its layer, or is of another number of tokens than the others."""
    for i, (c, layer) in enumerate(zip(caches, layers)):
        if not layer.fits(c):
            raise misfit(i)
    # The states of recurrent layers do not have their number of tokens.
    n = max((c.offset for c in caches if hasattr(c, "offset")), default=any(not c.empty() for c in caches))
    for i, c in enumerate(caches):
        if c.offset != n if hasattr(c, "offset") else c.empty() == (n > 0):
            raise misfit(i)


def are_states(entry: Any, states: Sequence[State]) -> bool:
    """Whether an entry has the states of a recurrent layer: all of them, or none."""
    dtypes = [FLOATS if state.dtype is None or state.dtype in FLOATS else (state.dtype,) for state in states]
    wanted = [((1, *state.shape), types) for state, types in zip(states, dtypes)]
    return are_arrays(entry, *wanted) and len({x is None for x in entry.cache}) == 1


def are_arrays(entry: Any, *wanted: tuple[Shape, Dtypes]) -> bool:
    """Whether an entry is an ``ArraysCache`` of arrays of these shapes and types, each of which may be missing."""
    if not isinstance(entry, stock.ArraysCache) or not isinstance(entry.cache, list) or len(entry.cache) != len(wanted):
        return False
    is_padded = entry.left_padding is not None or entry.lengths is not None
    return not is_padded and all(x is None or _is_array(x, *each) for x, each in zip(entry.cache, wanted))


def are_keys(entry: Any, layer: Any, may_be_quantized: bool = True) -> bool:
    """Whether an entry has the keys and values of an attention layer."""
    is_quantized = may_be_quantized and isinstance(entry, stock.QuantizedKVCache)
    if not is_quantized and not isinstance(entry, stock.KVCache):
        return False
    n = entry.offset
    sizes = layer.row_sizes
    S: int | None = None  # the allocated length, the same in keys and values
    if type(n) is not int or n < 0:
        return False
    if n == 0 and all(getattr(entry, name, None) is None for name in sizes):
        return True
    for name, (H, D) in sizes.items():
        found: Any = getattr(entry, name, None)
        if name not in NAMES:
            if found is None and n == 0:  # An interrupted pass has made only some.
                continue
            S = None
        is_one = name not in NAMES or not is_quantized
        arrays, parts = ([found], [(D, FLOATS)]) if is_one else (found, _quantized_parts(entry, D))
        if not isinstance(arrays, list | tuple) or not 0 < len(arrays) == len(parts):
            return False
        for x, (width, dtypes) in zip(arrays, parts):
            if not _is_array(x, (1, H, S, width), dtypes) or (S := x.shape[2]) < n:
                return False
    return True


def _quantized_parts(entry: Any, D: int) -> list[tuple[int, Dtypes]]:
    """The width and types of quantized keys, or values, of D dimensions, their scales and biases; empty if MLX has none."""
    bits, size = entry.bits, entry.group_size
    are_ints = type(bits) is int and type(size) is int  # 8 + 0j is in BITS as well
    if not are_ints or bits not in BITS or size not in GROUP_SIZES or D % size > 0:
        return []
    return [(D * bits // 32, (mx.uint32,)), *[(D // size, FLOATS)] * 2]


def _is_array(x: Any, shape: Shape, dtypes: Dtypes) -> bool:
    if not isinstance(x, mx.array) or x.dtype not in dtypes or x.ndim != len(shape):
        return False
    return all(wanted in (None, n) for wanted, n in zip(shape, x.shape))


def misfit(i: int) -> MTPError:
    return MTPError(
        f"Entry {i} of the prompt cache is damaged, or belongs to another model. Make a new one with "
        "mlx_mtp.make_prompt_cache(model)."
    )
