"""The tables of n-gram embeddings in the files of a checkpoint, of which only the rows of a text's tokens are read.

Rows are read by position. Mapping the files would count the pages around each row to the memory of the process, and a file that
is cut while it is mapped would end the process.
"""

import os
import re
import weakref
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..core.models.ngrams import NgramTable
from ..errors import MTPError
from .heads.originals import base_in_16_bits
from .reader import CheckpointReader, Tensors, n_bytes

# A part is shard_7.weight in raw checkpoints, and shards.7.weight and .scales in conversions.
TABLE = r"layers\.(\d+)\.ple\.ple_embedding\.ngram_embedding\."
TENSOR = re.compile(TABLE + r"(?:shards?[._](\d+)\.)?(weight|scales|biases)$")
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U32": np.uint32, "U8": np.uint8}
N_THREADS = 8  # that read at once: most of the time goes to waiting for the disk


def place_of(tensor: str) -> tuple[int, int, str] | None:
    """The layer, the part and the array that a tensor is of; ``None`` if it is not of a table."""
    match = TENSOR.search(tensor)
    return None if match is None else (int(match[1]), int(match[2] or 0), match[3])


def without_tables(tensors: Tensors) -> tuple[Tensors, int]:
    """Tensors that are not of tables, and the bytes of those that are."""
    others = {name: t for name, t in tensors.items() if place_of(name) is None}
    return others, n_bytes(tensors) - n_bytes(others)


class FileRows:
    """The rows of a table in files, of which each part has arrays. Raises an MTPError if they do not fit together."""

    def __init__(self, folder: Path, parts: list[Tensors]):
        self.folder, self.layout = folder, _layout(parts[0])
        lengths = []
        for j, part in enumerate(parts):
            sizes = {x.shape[0] for x in part.values()}
            if _layout(part) != self.layout or len(sizes) > 1:
                raise MTPError(f"has other arrays in part {j} than in part 0")
            if unknown := next((dtype for _, dtype in self.layout.values() if isinstance(dtype, str)), None):
                raise MTPError(f"is in {unknown}, not in 16 or 32 bits or quantized by MLX")
            lengths.append(sizes.pop())
        self.parts, self.starts = parts, np.cumsum([0, *lengths])  # the id of each part's first row

    def open(self) -> None:
        files = {x.file for part in self.parts for x in part.values()}
        self.opened = {file: os.open(self.folder / file, os.O_RDONLY) for file in files}  # their descriptors
        for descriptor in self.opened.values():
            weakref.finalize(self, os.close, descriptor)
        self.pool = ThreadPoolExecutor(N_THREADS, "ngrams")

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Ids [n] -> the arrays of these rows, [n, width] each."""
        of_part = np.searchsorted(self.starts, ids, side="right") - 1
        rows = ids - self.starts[of_part]
        reads = []
        for name, (width, dtype) in self.layout.items():
            n = width * np.dtype(dtype).itemsize
            own = [part[name] for part in self.parts]
            begins = np.array([x.start for x in own])[of_part] + n * rows
            reads += [(self.opened[own[j].file], n, at) for j, at in zip(of_part.tolist(), begins.tolist())]
        step = -(-len(reads) // N_THREADS)
        slices = (reads[i : i + step] for i in range(0, len(reads), step))
        data = b"".join(self.pool.map(_read_all, slices))
        found = {}
        begin = 0
        for name, (width, dtype) in self.layout.items():
            x = np.frombuffer(data, dtype, len(ids) * width, begin)
            found[name] = x.reshape(len(ids), width)
            begin = begin + x.nbytes
        return found

    def read_range(self, begin: int, end: int) -> dict[str, np.ndarray]:
        found: dict[str, list[np.ndarray]] = {name: [] for name in self.layout}
        for start, stop, part in zip(self.starts.tolist(), self.starts[1:].tolist(), self.parts):
            first = max(begin, start)
            last = min(end, stop)
            for name, x in part.items() if first < last else ():
                width, dtype = self.layout[name]
                n = width * np.dtype(dtype).itemsize
                data = _read_all([(self.opened[x.file], n * (last - first), x.start + n * (first - start))])
                found[name].append(np.frombuffer(data, dtype).reshape(-1, width))
        return {name: np.concatenate(parts) for name, parts in found.items()}


def _layout(part: Tensors) -> dict[str, tuple[int, Any]]:
    """The width and the dtype of each array; bfloat16 is read as uint16."""
    return {name: (x.shape[-1], DTYPES.get(x.dtype, x.dtype)) for name, x in part.items()}


def _read_all(reads: list[tuple[int, int, int]]) -> bytes:
    """Read bytes of open files, by (file descriptor, number of bytes, position)."""
    data = b"".join([os.pread(*read) for read in reads])
    if len(data) < sum(n for _, n, _ in reads):
        raise MTPError("A file of the model's n-gram table has been cut: download or convert the model again.")
    return data


def find_tables(model: Any, checkpoint: CheckpointReader) -> dict[int, NgramTable]:
    """The tables of a model's layers by the headers of a checkpoint. Raises MTPError if one is incomplete or does not fit."""
    if (ngrams := model.ngrams) is None:
        return {}
    found: dict[int, dict[int, Tensors]] = defaultdict(lambda: defaultdict(dict))
    own = {name: file for name, file in checkpoint.model_map.items() if place_of(name) and checkpoint.has(file)}
    for name, tensor in checkpoint.tensors(own).items():
        layer, part, array = place_of(name) or (0, 0, "")
        found[layer][part][array] = tensor
    tables = {}
    folder = checkpoint.folder or Path()
    for i in model.model.ngram_layers:
        parts = [found[i][j] for j in sorted(found[i])]
        try:
            if [*found[i]] and [*sorted(found[i])] == [*range(len(parts))] and all("weight" in part for part in parts):
                tables[i] = NgramTable(FileRows(folder, parts), ngrams.width, ngrams.hashes[i].n_rows)
                continue
            wrong = f"{checkpoint.name} lacks a part of the n-gram table of layer {i}"
        except MTPError as e:
            wrong = f"The n-gram table of layer {i} of {checkpoint.name} {e}"
        command = f"mlx_mtp convert --quantize --hf-path {base_in_16_bits(checkpoint)} --mlx-path NEW"
        raise MTPError(f"{wrong}: download it again, or convert its base model with `{command}`.")
    return tables


def open_tables(model: Any, checkpoint: CheckpointReader, in_memory: bool) -> None:
    for i, table in find_tables(model, checkpoint).items():
        model.ngrams.tables[i] = table
        table.rows.open()
        if in_memory:
            table.load()
