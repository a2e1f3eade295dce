"""Estimate the memory of a checkpoint from its config and the headers of its files, in a folder or on the hub."""

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx

from ... import memory
from ...errors import MTPError
from ...images.tower import split_tower
from ...memory import CHUNK, Account, Needs, Sizes, check_fits, size, sizes_of
from .. import AUTO
from ..catalog import published
from ..config import check_config, skeleton
from ..hub import sizes_to_download
from ..ngram_files import without_tables
from ..reader import FLOATS, CheckpointReader, Tensors, model_tensors

# These have the dtype of all unquantized weights.
NORMS = "layers.0.input_layernorm.weight", "layers.0.attn_hyper_connection.hc_norm.weight"


def check_memory(
    checkpoint: CheckpointReader,
    source: CheckpointReader | None,
    account: Account | None,
    context: int,
    dtype: str = AUTO,
    *,
    is_plain: bool = False,
    has_tower: bool = False,
    ngram_memory: bool | None = None,
) -> bool:
    """Raise an MTPError if a checkpoint with the head of ``source`` and a text do not fit in memory; without ``account`` never.

    Return whether n-gram tables are in memory: if ``ngram_memory``, or with ``None`` if they leave enough of it.
    """
    if account is None:
        return bool(ngram_memory)
    if checkpoint.folder is None:
        to_download = sizes_to_download(checkpoint.name, checkpoint.revision, checkpoint.model_files).values()
        if sum(to_download) <= account.left / 2:
            return bool(ngram_memory)  # it is checked after the download
    tensors = model_tensors(checkpoint)
    name = checkpoint.name
    if is_plain:  # without heads, towers and texts
        backbone = checkpoint.names.split(split_tower(tensors)[0])[0]
        _check_arrays(backbone, name)
        check_fits(name, Needs(weights=_nbytes(backbone, *_types(backbone, dtype))), account)
        return False
    others, table_bytes = without_tables(tensors)
    _check_arrays(others, name)
    needs, sizes = needs_of_checkpoint(checkpoint, source, context, dtype, has_tower)
    if ngram_memory is None:
        max_bytes = min(memory.NGRAM_SHARE * min(memory.total_memory(), account.limit), account.left)
        ngram_memory = needs.total + table_bytes <= max_bytes
    if ngram_memory:
        needs = needs._replace(ngrams=table_bytes)
    check_fits(name, needs, account, _advice(needs, sizes, account, context))
    return needs.ngrams > 0


def _check_arrays(tensors: Tensors, name: str) -> None:
    """Raise an MTPError if a tensor is too large for the device. Experts that are stored one by one become one array."""
    max_bytes: Any = mx.device_info().get("max_buffer_length")  # on Metal
    arrays = Counter[str]()
    for tensor, info in tensors.items():
        arrays[re.sub(r"\.experts\.\d+\.", ".experts.", tensor)] += _nbytes({tensor: info})
    for tensor, largest in arrays.most_common(1):
        if max_bytes is not None and largest > max_bytes:
            raise MTPError(
                f"{name} does not fit: {tensor} takes {size(largest)}, and an array on this GPU at most {size(max_bytes)}. "
                "Use a conversion with fewer bits."
            )


def needs_of_checkpoint(
    checkpoint: CheckpointReader,
    source: CheckpointReader | None,
    context: int,
    dtype: str = AUTO,
    has_tower: bool = False,
) -> tuple[Needs, Sizes]:
    config = check_config(checkpoint.config, checkpoint.name)
    head = Tensors()
    language, tower = split_tower(without_tables(model_tensors(checkpoint))[0])
    backbone, _ = checkpoint.names.split(language)
    with suppress(MTPError, OSError):  # a head that cannot be used
        head = {} if source is None else source.head()
    own, n = _types(backbone, dtype)
    sizes = sizes_of(skeleton(config, checkpoint.name, source is not None), n)
    tower_bytes = _nbytes(tower, FLOATS if n == 2 else (), n) if has_tower else 0
    return _with_text(Needs(_nbytes(backbone, own, n), _nbytes(head, FLOATS, n), tower_bytes), sizes, context), sizes


def _types(backbone: Tensors, dtype: str) -> tuple[Sequence[str], int]:
    """The type of a backbone's activations in its files, and the bytes of a number in the type that it gets."""
    sizes = Counter[str]()
    for t in (t for t in backbone.values() if t.dtype in FLOATS):
        sizes[t.dtype] += math.prod(t.shape)
    norms = [t.dtype for name, t in backbone.items() if name.endswith(NORMS)]
    own = norms[0] if norms else max(sizes, key=sizes.__getitem__, default="BF16")
    return (own,), 4 if own == "F32" and dtype == AUTO else 2


def _with_text(needs: Needs, sizes: Sizes, context: int) -> Needs:
    """The needs with a text, or with the test of the device if that takes more."""
    caches = sizes.caches(context)
    return needs._replace(caches=caches, chunk=max(sizes.chunk(min(CHUNK, context), context), sizes.of_test - caches))


def _advice(needs: Needs, sizes: Sizes, account: Account, context: int) -> str:
    """Advice: the longest text that fits or, if none does, the largest published model that fits."""
    left = account.left
    n = bisect_right(range(1, context + 1), left, key=lambda n: _with_text(needs, sizes, n).total)
    if n > 0:
        return f"The longest context that fits is {n} tokens."
    fitting = [model for model in published().values() if model.needs(context).total <= left]
    if not fitting:
        return "End other programs, or give --max-memory more."
    largest = max(fitting, key=lambda model: model.disk_gb)
    return f"The largest published model that fits is {largest.name}: `mlx_mtp models` lists them."


def _nbytes(tensors: Tensors, cast: Sequence[str] = (), n: int = 0) -> int:
    """The bytes of tensors. Those in the types ``cast`` get n bytes a number."""
    return sum(math.prod(t.shape) * n if t.dtype in cast else t.stop - t.start for t in tensors.values())
