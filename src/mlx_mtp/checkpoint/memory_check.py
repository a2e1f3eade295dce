"""Estimate the memory of a checkpoint from its config and the headers of its files, in a folder or on the hub."""

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import mlx.core as mx
from huggingface_hub.utils import TensorInfo

from .. import memory
from ..errors import MTPError
from ..images.tower import split_tower
from ..memory import CHUNK, Account, Needs, Sizes, check_fits, size, sizes_of
from ..models.head_weights import split_head
from .catalog import published
from .config import check_config, skeleton
from .hub import WEIGHTS, sizes_to_download
from .ngram_files import without_tables
from .reader import CheckpointReader, n_bytes

# These have the dtype of all unquantized weights.
NORMS = "layers.0.input_layernorm.weight", "layers.0.attn_hyper_connection.hc_norm.weight"


def check_before_download(checkpoint: CheckpointReader, account: Account | None, *args: Any) -> None:
    """Do ``check_memory`` for a checkpoint on the hub, before its weights are downloaded. Its headers are read if the files to
    download take more than half of the memory left."""
    if account is None or checkpoint.folder is not None:
        return
    if sum(sizes_to_download(checkpoint.name, checkpoint.revision, [WEIGHTS]).values()) > account.left / 2:
        check_memory(checkpoint, account, *args)


def check_memory(
    checkpoint: CheckpointReader,
    account: Account | None,
    context: int,
    is_plain: bool,
    has_head: bool,
    has_tower: bool,
    ngram_memory: bool | None,
    source: CheckpointReader | None = None,
) -> bool:
    """Raise an MTPError if a checkpoint, with a head of ``source``, does not fit in memory with a text of ``context`` tokens.

    In plain mlx-lm, which drops heads and towers, it is checked without a text. No ``account``, no check. Tables of n-gram
    embeddings are in memory if ``ngram_memory``; ``None``: if they leave a share of the memory free.

    Returns:
        Whether there are such tables in memory.
    """
    if account is None:
        return bool(ngram_memory)
    tensors, name = model_tensors(checkpoint), checkpoint.name
    if is_plain:
        backbone = split_head(split_tower(tensors)[0])[0]
        _check_arrays(backbone, name)
        check_fits(name, Needs(weights=_nbytes(backbone)), account)
        return False
    others, table_bytes = without_tables(tensors)
    _check_arrays(others, name)
    needs, sizes = needs_of_checkpoint(checkpoint, context, has_head, has_tower)
    if source is not None:
        needs = needs._replace(head=_nbytes(source.head()))
    if ngram_memory is None:
        max_bytes = min(memory.NGRAM_SHARE * min(memory.total_memory(), account.limit), account.left)
        ngram_memory = needs.total + table_bytes <= max_bytes
    if ngram_memory:
        needs = needs._replace(ngrams=table_bytes)
    check_fits(name, needs, account, _advice(needs, sizes, account, context))
    return needs.ngrams > 0


def _check_arrays(tensors: Mapping[str, TensorInfo], name: str) -> None:
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
    checkpoint: CheckpointReader, context: int, has_head: bool, has_tower: bool
) -> tuple[Needs, Sizes]:
    """The memory of a checkpoint with a text, and the sizes of its model."""
    config = check_config(checkpoint.config, checkpoint.name)
    language, tower = split_tower(without_tables(model_tensors(checkpoint))[0])
    backbone, head = split_head(language)
    with suppress(MTPError, OSError):  # a head that cannot be used
        head = checkpoint.head()
    norm = next((t for n, t in backbone.items() if n.endswith(NORMS)), None)
    value_bytes = 2 if norm is None else n_bytes(norm) // math.prod(norm.shape)
    sizes = sizes_of(skeleton(config, checkpoint.name, has_head), value_bytes)
    needs = Needs(_nbytes(backbone), _nbytes(head) if has_head else 0, _nbytes(tower) if has_tower else 0)
    return _with_text(needs, sizes, context), sizes


def model_tensors(checkpoint: CheckpointReader) -> dict[str, TensorInfo]:
    """Describe the tensors that mlx-lm loads."""
    return {name: t for file in checkpoint.model_files for name, t in checkpoint.header(file).tensors.items()}


def _with_text(needs: Needs, sizes: Sizes, context: int) -> Needs:
    """With a text, or with the test of the device if that takes more."""
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


def _nbytes(tensors: Mapping[str, TensorInfo]) -> int:
    return sum(map(n_bytes, tensors.values()))
