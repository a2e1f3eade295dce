"""The tables of n-gram embeddings in the files of a checkpoint, which are mapped and not loaded."""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub.utils import TensorInfo

from ..models.ngrams import NgramTable
from .reader import CheckpointReader, n_bytes

# In raw checkpoints shard_7.weight, in conversions shards.7.weight and .scales
TENSOR = re.compile(
    r"layers\.(\d+)\.ple\.ple_embedding\.ngram_embedding\.(?:shards?[._](\d+)\.)?(weight|scales|biases)$"
)
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U32": np.uint32, "U8": np.uint8}

Place = tuple[int, int, str]  # layer, part, name


def place_of(tensor: str) -> Place | None:
    """The place of a tensor in the tables; ``None`` for other tensors."""
    match = TENSOR.search(tensor)
    return None if match is None else (int(match[1]), int(match[2] or 0), match[3])


def without_tables(tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, TensorInfo], int]:
    """Tensors that are not of tables, and the bytes of those that are."""
    others = {name: t for name, t in tensors.items() if place_of(name) is None}
    return others, sum(n_bytes(t) for name, t in tensors.items() if name not in others)


def open_tables(model: Any, checkpoint: CheckpointReader, in_memory: bool) -> None:
    """Map the tables of a model's layers, if it has any, or read them into memory.

    Raises:
        ValueError: A table is incomplete, or does not fit the model.
    """
    if (ngrams := model.ngrams) is None:
        return
    found: dict[int, dict[int, dict[str, np.ndarray]]] = defaultdict(lambda: defaultdict(dict))
    for file in checkpoint.model_files:
        header, mapped = checkpoint.header(file), None
        for name, tensor in header.tensors.items():
            if (place := place_of(name)) is not None:
                mapped = _mapped(checkpoint.path / file) if mapped is None else mapped
                layer, part, kind = place
                found[layer][part][kind] = _array(mapped, header.start, name, tensor, checkpoint.name)
    for i in model.model.ngram_layers:
        parts = found[i]
        if lost := next((j for j in range(len(parts) + (not parts)) if "weight" not in parts.get(j, ())), None):
            raise ValueError(
                f"{checkpoint.name} lacks part {lost} of the n-gram table of layer {i}: download it again."
            )
        try:
            ngrams.tables[i] = NgramTable([parts[j] for j in sorted(parts)], ngrams.width, ngrams.hashes[i].n_rows)
        except ValueError as e:
            raise ValueError(
                f"The n-gram table of layer {i} of {checkpoint.name} {e}: download or convert it again."
            ) from e
        if in_memory:
            ngrams.tables[i].load()


def _mapped(file: Path) -> np.ndarray:
    return np.memmap(file, np.uint8, mode="r")


def _array(mapped: np.ndarray, start: int, name: str, tensor: TensorInfo, checkpoint: str) -> np.ndarray:
    """A tensor in a mapped file whose data begin at ``start``."""
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} of {checkpoint} is in {tensor.dtype}: convert it with `mlx_mtp convert`.")
    begin, end = (start + offset for offset in tensor.data_offsets)
    return mapped[begin:end].view(DTYPES[tensor.dtype]).reshape(tensor.shape)
