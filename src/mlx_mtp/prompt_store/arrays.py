"""A prompt cache as named arrays: the keys and values of a span of tokens, and the states after a token.

    keys and values   of the tokens [begin, end) in each attention layer and in the head
    states            of the recurrent layers after the last token, and the last hidden state, for the head

The head's input p - 1 has the hidden state of token p - 1 and token p. It belongs to token p, so the first token has none.
"""

from collections.abc import Sequence
from itertools import count, islice
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import cache as stock
from numpy.typing import NDArray

from ..core.caches.indexed import NAMES, names_of, size_of
from ..core.caches.prompt_cache import PromptCache, evaluate, make_prompt_cache
from ..core.caches.rows import KVOptions
from ..errors import MTPError

Arrays = dict[str, mx.array]
Tokens = NDArray[np.int64]  # token ids, and negative numbers for the tokens of images


class Format(NamedTuple):
    """The kinds of arrays in a prompt cache. Prompt caches of different formats share no nodes."""

    kv: KVOptions | None  # the quantization of keys and values; ``None`` if they are not quantized, or not yet
    head: bool  # whether the head has keys and values for each token except the first


def format_of(model: Any, cache: PromptCache, kv: KVOptions | None) -> Format:
    """Raises an MTPError if the quantization of keys and values is not that of ``kv``."""
    quantized = {(c.bits, c.group_size) for c in cache.backbone if isinstance(c, stock.QuantizedKVCache)}
    if quantized and (kv is None or quantized != {(kv.kv_bits, kv.kv_group_size)}):
        bits, size = next(iter(quantized))
        raise MTPError(
            f"The prompt cache has keys and values of {bits} bits in groups of {size}: give kv=mlx_mtp.KVOptions(...) with the "
            f"options that it was read with, not {kv}."
        )
    has_inputs = cache.last_hidden is not None and cache.head.offset == cache.n_tokens - 1
    return Format(kv if quantized else None, has_inputs and model.head_layer is not None)


def keys_and_values(cache: PromptCache, format: Format, begin: int, end: int) -> Arrays:
    """The keys and values of the tokens [begin, end), as slices of the cache's arrays."""
    parts = [(str(i), c, begin, end) for i, c in enumerate(cache.backbone) if hasattr(c, "offset")]
    if format.head and end > 1:
        parts.append(("head", cache.head, max(begin - 1, 0), end - 1))
    out: Arrays = {}
    for name, c, i, k in parts:
        held: Any = tree_flatten([getattr(c, name) for name in names_of(c)])  # quantized keys are three arrays
        out |= {f"{name}.{j}": x[:, :, i:k] for j, (_, x) in enumerate(held)}  # [1, H, k - i, D]
    return out


def states(cache: PromptCache, format: Format) -> Arrays:
    recurrent = [(i, c) for i, c in enumerate(cache.backbone) if isinstance(c, stock.ArraysCache)]
    arrays = {f"{i}.{j}": x for i, c in recurrent for j, x in enumerate(c.cache)}
    return arrays | ({"hidden": cache.last_hidden} if format.head else {})


def are_equal(a: Arrays, b: Arrays) -> bool:
    """Whether two sets of keys and values are equal bit for bit."""
    if a.keys() != b.keys() or any(a[n].shape != b[n].shape or a[n].dtype != b[n].dtype for n in a):
        return False
    same = [mx.array_equal(a[name].view(mx.uint8), b[name].view(mx.uint8)) for name in a]
    return not same or bool(mx.stack(same).all().item())


def nbytes(arrays: Arrays) -> int:
    return sum(x.nbytes for x in arrays.values())


def make_cache(model: Any, format: Format, tokens: Tokens, spans: Sequence[Arrays], last: Arrays) -> list[Any]:
    """A prompt cache of tokens, with their keys and values and the states after the last of them."""
    entries = make_prompt_cache(model)
    cache = PromptCache(entries, len(model.layers))
    for i, c in enumerate(cache.backbone):
        if isinstance(c, stock.ArraysCache):
            c.cache = [last[f"{i}.{j}"] for j in range(len(c.cache))]
        else:
            entries[i] = _filled(c, str(i), format.kv, spans)
    if format.head:
        entries[cache.n_layers] = _filled(cache.head, "head", None, spans)
        cache.last_hidden = last["hidden"]
    of_images = np.flatnonzero(tokens < 0)  # drafts can be copied from the tokens after the last image
    cache.record(len(tokens), tokens[of_images[-1] + 1 if len(of_images) > 0 else 0 :].tolist())
    evaluate([c.state for c in entries])  # another thread may use them
    return entries


def _filled(entry: Any, name: str, kv: KVOptions | None, spans: Sequence[Arrays]) -> Any:
    """An empty cache with the arrays of all spans, and with space for the next tokens."""
    held = [span for span in spans if f"{name}.0" in span]
    n = sum(span[f"{name}.0"].shape[2] for span in held)
    if kv is not None:
        entry = entry.to_quantized(kv.kv_group_size, kv.kv_bits)
    if n == 0:
        return entry
    space = size_of(n) - n

    def joined(j: int) -> mx.array:
        parts = [span[f"{name}.{j}"] for span in held]
        B, H, _, D = parts[0].shape
        return mx.concatenate([*parts, mx.zeros((B, H, space, D), parts[0].dtype)], axis=2)

    arrays = map(joined, count())
    for own in names_of(entry):  # quantized keys and values are three arrays: packed, scales, biases
        setattr(entry, own, tuple(islice(arrays, 3)) if kv is not None and own in NAMES else next(arrays))
    entry.offset = n
    return entry
