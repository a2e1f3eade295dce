"""Checks that a prompt cache fits a model. A damaged or foreign file could otherwise crash the process or change the text."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock

from ...errors import MTPError
from .indexed import NAMES

FLOATS = (mx.bfloat16, mx.float16, mx.float32)
BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)  # of MLX's affine quantization

# An array's name, shape and dtypes; ``None`` for any size
Wanted = tuple[str, tuple[int | None, ...], tuple[mx.Dtype, ...]]


def check_backbone(caches: Sequence[Any], layers: Sequence[Any]) -> None:
    """Raise an MTPError if a cache does not fit its layer, or is of another number of tokens than the others."""
    for i, (c, layer) in enumerate(zip(caches, layers)):
        if layer.is_linear:
            check_arrays(i, c, *((own.name, (1, *own.shape), _dtypes(own.dtype)) for own in layer.states))
            if any((x is None) != (c[0] is None) for x in c.cache):
                raise misfit(i, "has only some of its arrays")
        else:
            check_keys(i, c, layer)
    # The states of recurrent layers do not have their number of tokens.
    n = max((c.offset for c in caches if hasattr(c, "offset")), default=any(not c.empty() for c in caches))
    for i, c in enumerate(caches):
        if c.offset != n if hasattr(c, "offset") else c.empty() == (n > 0):
            raise misfit(i, "is of other tokens than the other layers'")


def check_arrays(i: int, entry: Any, *wanted: Wanted) -> None:
    """Raise an MTPError unless an entry is an ``ArraysCache`` of these arrays, each of which may be missing."""
    _check_kind(i, entry, stock.ArraysCache)
    if entry.left_padding is not None or entry.lengths is not None:
        raise misfit(i, "is that of padded prompts")
    if not isinstance(entry.cache, list) or len(entry.cache) != len(wanted):
        raise misfit(i, f"has {_described(entry.cache)} in place of {', '.join(name for name, *_ in wanted)}")
    for x, each in zip(entry.cache, wanted):
        if x is not None:
            _check_array(i, x, *each)


def check_keys(i: int, entry: Any, layer: Any, may_be_quantized: bool = True) -> None:
    """Raise an MTPError if keys and values do not fit an attention layer."""
    _check_kind(i, entry, stock.KVCache, *([stock.QuantizedKVCache] if may_be_quantized else []))
    n, sizes, S = entry.offset, layer.row_sizes, None  # S: the allocated length, the same in keys and values
    if type(n) is not int or n < 0:
        raise misfit(i, f"is of {n} tokens")
    if n == 0 and all(getattr(entry, name, None) is None for name in sizes):
        return
    for name, (H, D) in sizes.items():
        own: Any = getattr(entry, name, None)
        if name not in NAMES:
            if own is None and n == 0:  # an interrupted pass has made only some
                continue
            S = None
        is_quantized = isinstance(entry, stock.QuantizedKVCache) and name in NAMES
        parts = _quantized_parts(i, entry, D) if is_quantized else [("", D, FLOATS)]
        arrays = own if is_quantized else [own]
        if not isinstance(arrays, list | tuple) or len(arrays) != len(parts):
            raise misfit(i, f"has {_described(own)} in place of three arrays of quantized {name}")
        for x, (part, width, dtypes) in zip(arrays, parts):
            label = part + name.replace("_", " ")
            _check_array(i, x, label, (1, H, S, width), dtypes)
            S = x.shape[2]
            if n > S:
                raise misfit(i, f"is of {n} tokens, and its {label} of {S}")


def _quantized_parts(i: int, entry: Any, D: int) -> list[tuple[str, int, tuple[mx.Dtype, ...]]]:
    """The arrays of quantized keys, and of values, of D dimensions: the name, width and dtypes of each."""
    bits, size = entry.bits, entry.group_size
    are_ints = type(bits) is int and type(size) is int  # 8 + 0j is in BITS as well
    if not are_ints or bits not in BITS or size not in GROUP_SIZES or D % size > 0:
        raise misfit(i, f"is quantized to {bits} bits in groups of {size}")
    of_groups = [(f"{part} of the ", D // size, FLOATS) for part in ("scales", "biases")]
    return [("quantized ", D * bits // 32, (mx.uint32,)), *of_groups]


def _dtypes(dtype: mx.Dtype | None) -> tuple[mx.Dtype, ...]:
    return FLOATS if dtype is None or dtype in FLOATS else (dtype,)


def _check_kind(i: int, entry: Any, *kinds: type) -> None:
    if not isinstance(entry, kinds):
        raise misfit(i, f"is a {type(entry).__name__}, and this model needs a {kinds[0].__name__}")


def _check_array(i: int, x: Any, name: str, shape: tuple[int | None, ...], dtypes: tuple[mx.Dtype, ...]) -> None:
    fits = isinstance(x, mx.array) and x.dtype in dtypes and x.ndim == len(shape)
    if not fits or any(n not in (None, own) for n, own in zip(shape, x.shape)):
        wanted = f"[{', '.join('n' if n is None else str(n) for n in shape)}] {' or '.join(map(_short, dtypes))}"
        raise misfit(i, f"has as {name} {_described(x)}, not {wanted}")


def misfit(i: int, what: str) -> MTPError:
    return MTPError(
        f"Entry {i} of the prompt cache {what}: it is damaged, or belongs to another model. Make a new one with "
        "mlx_mtp.make_prompt_cache(model)."
    )


def _described(x: Any) -> str:
    if isinstance(x, mx.array):
        return f"{list(x.shape)} {_short(x.dtype)}"
    return f"{len(x)} values" if isinstance(x, list | tuple) else repr(x)


def _short(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
