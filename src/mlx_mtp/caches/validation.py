"""Checks that a prompt cache fits a model. A damaged or foreign file could otherwise crash the process or change the text.

A model's fingerprint identifies its prompt caches: a digest of its config and of a few values of each weight. Errors name the
entry and its fault.
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import cache as stock

from .positions import ImageSpan, check_images

SIZE = 16  # bytes of a digest
N_VALUES = 4  # the least number of values read along each axis of a tensor, if the axis has as many


def fingerprint(model: Any) -> bytes:
    """The digest of the backbone, [16], followed by the digest of the head, [16].

    They are separate since the text depends only on the backbone: a prompt cache stays valid if the head is quantized or
    fitted.
    """
    parameters: Any = tree_flatten(model.parameters())
    args = {name: x for name, x in vars(model.text_args).items() if not name.startswith("mtp_")}

    def part(is_head: bool) -> bytes:
        own = [(name, p) for name, p in parameters if name.startswith(model.head_prefix) is is_head]
        modules = [
            (name, m) for name, m in model.named_modules() if f"{name}.".startswith(model.head_prefix) is is_head
        ]
        return digest(own, [args, [(name, _numbers(m)) for name, m in modules]])

    return part(False) + part(True)


def digest(parameters: Iterable[tuple[str, mx.array]], settings: Any = None) -> bytes:
    """The digest of named tensors and of the settings of their modules, [16]."""
    parameters = sorted(parameters)
    names = json.dumps([[(name, p.shape, str(p.dtype)) for name, p in parameters], settings], sort_keys=True)
    values = [p[_spread(p.shape)].flatten().view(mx.uint8) for _, p in parameters]
    read = bytes(np.array(mx.concatenate(values))) if values else b""
    return blake2b(names.encode() + read, digest_size=SIZE).digest()


def _numbers(module: Any) -> dict[str, Any]:
    """A module's numbers and names, such as an adapter's scale."""
    is_setting = lambda name, x: not name.startswith("_") and isinstance(x, bool | int | float | str)  # noqa: E731
    return {name: x for name, x in sorted(vars(module).items()) if is_setting(name, x)}


def _spread(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of a few values, spread over a tensor of this shape."""
    return tuple(slice(None, None, max(n // N_VALUES, 1)) for n in shape)


FLOATS = (mx.bfloat16, mx.float16, mx.float32)
BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)  # of quantized keys and values


def check_backbone(caches: Sequence[Any], layers: Sequence[Any]) -> None:
    """Check the caches of a model's layers: their arrays, and that they have the same number of tokens.

    Raises:
        ValueError: A cache does not fit its layer or the other caches.
    """
    counts: dict[int, int] = {}  # the number of tokens, by entry
    # Whether there are any tokens, by entry; the states of recurrent layers do not have their number.
    filled: dict[int, bool] = {}
    for i, (c, layer) in enumerate(zip(caches, layers)):
        if layer.is_linear:
            _check_states(i, c, layer.linear_attn)
            filled[i] = c.cache[0] is not None
        else:
            check_keys(i, c, layer.self_attn)
            counts[i], filled[i] = c.offset, c.offset > 0
    for of_entry in (counts, filled):
        for i, n in of_entry.items():
            first, n_first = next(iter(of_entry.items()))
            if n != n_first:
                raise misfit(i, f"is of other tokens than entry {first}: {_amount(n)} and {_amount(n_first)}")


def _amount(n: int | bool) -> str:
    return ("some" if n else "none") if isinstance(n, bool) else str(n)


def _check_states(i: int, entry: stock.ArraysCache, layer: Any) -> None:
    """Check the convolution's inputs and the state of a recurrent layer."""
    if entry.left_padding is not None or entry.lengths is not None:
        raise misfit(i, "is that of padded prompts")
    if not isinstance(entry.cache, list) or len(entry.cache) != 2:
        raise misfit(i, f"has {_described(entry.cache)} in place of a list of two arrays")
    conv, state = entry.cache
    if conv is not None or state is not None:
        check_array(i, "convolution inputs", conv, (1, layer.conv_kernel_size - 1, layer.conv_dim), FLOATS)
        check_array(i, "state", state, (1, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim), FLOATS)


def check_keys(i: int, entry: Any, attention: Any) -> None:
    """Check the keys and values of an attention layer, quantized or not.

    Raises:
        ValueError: They do not fit it.
    """
    n, heads, S = entry.offset, attention.num_key_value_heads, None  # S: the allocated length, the same in all arrays
    if type(n) is not int or n < 0:
        raise misfit(i, f"is of {n} tokens")
    if entry.keys is None and entry.values is None and n == 0:
        return
    for name, x, width, dtypes in _parts(i, entry, attention.head_dim):
        check_array(i, name, x, (1, heads, S, width), dtypes)
        S = x.shape[2]
        if n > S:
            raise misfit(i, f"is of {n} tokens, and its {name} of {S}")


def _parts(i: int, entry: Any, D: int) -> list[tuple[str, Any, int, tuple[mx.Dtype, ...]]]:
    """The arrays of keys and values: for each its name, the array, the size of its last axis, and its allowed dtypes."""
    both = (("keys", entry.keys), ("values", entry.values))
    if not isinstance(entry, stock.QuantizedKVCache):
        return [(name, x, D, FLOATS) for name, x in both]
    bits, size = entry.bits, entry.group_size
    are_ints = type(bits) is int and type(size) is int  # 8 + 0j is in BITS as well
    if not are_ints or bits not in BITS or size not in GROUP_SIZES or D % size > 0:
        raise misfit(i, f"is quantized to {bits} bits in groups of {size}")
    parts: list[tuple[str, Any, int, tuple[mx.Dtype, ...]]] = []
    for name, x in both:
        if not isinstance(x, list | tuple) or len(x) != 3:
            raise misfit(i, f"has {_described(x)} in place of three arrays of quantized {name}")
        parts += [(f"quantized {name}", x[0], D * bits // 32, (mx.uint32,))]
        parts += [(f"{part} of the {name}", y, D // size, FLOATS) for part, y in zip(("scales", "biases"), x[1:])]
    return parts


def check_last(i: int, last: Any, size: int, hidden_size: int, vocab_size: int) -> None:
    """Check the arrays in the last entry of a prompt cache.

    Args:
        size (int): The number of its arrays.

    Raises:
        ValueError: An array does not fit this model, or the text has a token that is not in its vocabulary.
    """
    if not isinstance(last, stock.ArraysCache) or not isinstance(last.cache, list) or len(last.cache) != size:
        raise misfit(i, "is not the head's: it needs the hidden state, the tokens and the model")
    shapes: list[tuple[str, tuple[int | None, ...], tuple[mx.Dtype, ...]]] = [
        ("hidden state", (1, 1, hidden_size), FLOATS),
        ("number of tokens", (), (mx.int32,)),
        ("tokens", (None,), (mx.uint32,)),
        ("rank", (2,), (mx.int32,)),
        ("fingerprint", (2 * SIZE,), (mx.uint8,)),
        ("images", (None, 3), (mx.int32,)),
    ]
    for (name, shape, dtypes), x in zip(shapes, last.cache):
        if x is not None:
            check_array(i, name, x, shape, dtypes)
    text = last.cache[2]
    if text is not None and text.size > 0 and (most := text.max().item()) >= vocab_size:
        raise misfit(i, f"has the token {most}, and the vocabulary ends at {vocab_size - 1}")
    if last.cache[5] is not None:
        try:
            check_images([ImageSpan(*image) for image in last.cache[5].tolist()])
        except ValueError as e:
            raise misfit(i, f"has images that no text has ({e})") from e


def check_array(i: int, name: str, x: Any, shape: tuple[int | None, ...], dtypes: tuple[mx.Dtype, ...]) -> None:
    """
    Args:
        shape (Tuple[int]): The shape; ``None`` for an axis of any size.

    Raises:
        ValueError: ``x`` is not an array of this shape and of one of these dtypes.
    """
    fits = isinstance(x, mx.array) and x.dtype in dtypes and x.ndim == len(shape)
    if not fits or any(n not in (None, own) for n, own in zip(shape, x.shape)):
        wanted = f"[{', '.join('n' if n is None else str(n) for n in shape)}] {' or '.join(map(_short, dtypes))}"
        raise misfit(i, f"has as {name} {_described(x)}, not {wanted}")


def misfit(i: int, what: str) -> ValueError:
    return ValueError(
        f"Entry {i} of the prompt cache {what}: it is damaged, or belongs to another model. Make a new one with "
        "mlx_mtp.make_prompt_cache(model)."
    )


def _described(x: Any) -> str:
    if isinstance(x, mx.array):
        return f"{list(x.shape)} {_short(x.dtype)}"
    return f"{len(x)} values" if isinstance(x, list | tuple) else repr(x)


def _short(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
