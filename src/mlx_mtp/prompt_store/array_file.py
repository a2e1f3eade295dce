"""Files of arrays that are named by what is in them: a safetensors file whose name is the digest of its bytes.

So a file is written once, whoever writes it, and one that is damaged has another digest than its name says.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .arrays import Arrays

SUFFIX = ".safetensors"
CHUNK = 4 << 20  # bytes that are written or hashed at once, while other threads run
# Of MLX, of safetensors, and of numpy, which has no bfloat16.
DTYPES: list[tuple[mx.Dtype, str, Any]] = [
    (mx.float32, "F32", np.float32),
    (mx.bfloat16, "BF16", np.uint16),
    (mx.float16, "F16", np.float16),
    (mx.uint32, "U32", np.uint32),
    (mx.int64, "I64", np.int64),
]
NAMES = {dtype: name for dtype, name, _ in DTYPES}
BY_NAME = {name: (dtype, held_as) for dtype, name, held_as in DTYPES}


class Damaged(ValueError):
    """A file is not what its name says."""


def encode(arrays: Arrays, metadata: Mapping[str, str]) -> tuple[str, list[Any]]:
    """The name of a file with these arrays, which are done and contiguous, and its parts in order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, x in arrays.items():
        begin, end = end, end + x.nbytes
        header[name] = {"dtype": NAMES[x.dtype], "shape": x.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = [struct.pack("<Q", len(text)) + text, *(memoryview(x) for x in arrays.values() if x.size > 0)]  # type: ignore[arg-type]
    return digest(parts), parts


def digest(parts: list[Any]) -> str:
    found = sha256()
    for chunk in _chunks(parts):
        found.update(chunk)
    return found.hexdigest()[:32]


def write(path: Path, parts: list[Any]) -> None:
    """Write a file under another name, and then give it its own: nobody sees a part of one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            for chunk in _chunks(parts):
                file.write(chunk)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: Path) -> tuple[Arrays, dict[str, str]]:
    """The arrays of a file, and its metadata.

    Raises:
        Damaged: The file is not what its name says.
        OSError: It cannot be read.
    """
    data = np.fromfile(path, np.uint8)
    if digest([data]) != path.name.removesuffix(SUFFIX):
        raise Damaged(f"{path} is damaged: its bytes are not those that it is named by.")
    (n,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + n].tobytes())
    metadata: dict[str, str] = header.pop("__metadata__")
    arrays = {}
    for name, entry in header.items():
        dtype, held_as = BY_NAME[entry["dtype"]]
        begin, end = (8 + n + offset for offset in entry["data_offsets"])
        x = mx.array(data[begin:end].view(held_as).reshape(entry["shape"]))
        arrays[name] = x if x.dtype == dtype else x.view(dtype)
    mx.eval(arrays)
    return arrays, metadata


def _chunks(parts: list[Any]) -> Iterator[Any]:
    for part in parts:
        data = np.frombuffer(part, np.uint8)
        for i in range(0, len(data), CHUNK):
            yield data[i : i + CHUNK]
