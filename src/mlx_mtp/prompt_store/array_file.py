"""A safetensors file whose name is the digest of its bytes.

Processes that write the same arrays write the same file, and a damaged file is recognized by its name.
"""

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .arrays import Arrays

SUFFIX = ".safetensors"
CHUNK = 4 << 20  # bytes that are written at once, while other threads run
# The names of safetensors, with the types of MLX and of numpy, which has no bfloat16.
DTYPES: dict[str, tuple[mx.Dtype, Any]] = {
    "F32": (mx.float32, np.float32),
    "BF16": (mx.bfloat16, np.uint16),
    "F16": (mx.float16, np.float16),
    "U32": (mx.uint32, np.uint32),
    "I64": (mx.int64, np.int64),
}
NAMES = {dtype: name for name, (dtype, _) in DTYPES.items()}


def encode(arrays: Arrays, metadata: Mapping[str, str]) -> tuple[str, memoryview]:
    """The name and the bytes of a file. The same arrays in the same order give the same bytes.

    MLX's ``save_safetensors`` is not used: with a buffer it waits for Python's lock, which can deadlock a server.

    Args:
        arrays (Dict[str, mx.array]): Evaluated and contiguous arrays: another thread may have created them.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, x in arrays.items():
        begin, end = end, end + x.nbytes
        header[name] = {"dtype": NAMES[x.dtype], "shape": x.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = [memoryview(x) for x in arrays.values() if x.size > 0]  # type: ignore[arg-type]
    data = memoryview(b"".join([len(text).to_bytes(8, "little"), text, *parts]))
    return _digest(data), data


def write(path: Path, temporary: Path, data: memoryview) -> None:
    """Write a file that only its owner may read. It is renamed when it is complete, so no process reads a part of it."""
    try:
        with open(temporary, "wb", opener=private) as file:
            for i in range(0, len(data), CHUNK):
                file.write(data[i : i + CHUNK])
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def private(path: str, flags: int) -> int:
    """An ``opener`` of files that only their owner may read or write."""
    return os.open(path, flags, 0o600)


def read(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        ValueError: The file does not match the digest in its name.
        OSError: It cannot be read.
    """
    data = path.read_bytes()
    if _digest(data) != path.name.removesuffix(SUFFIX):
        raise ValueError(f"{path} is damaged: its bytes do not match its name.")
    return data


def decode(data: bytes) -> tuple[Arrays, dict[str, str]]:
    """The arrays and the metadata of a file."""
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    metadata: dict[str, str] = header.pop("__metadata__")
    arrays = {}
    for name, entry in header.items():
        dtype, held_as = DTYPES[entry["dtype"]]
        first, end = entry["data_offsets"]
        x = mx.array(np.frombuffer(data[begin + first : begin + end], held_as).reshape(entry["shape"]))
        arrays[name] = x if x.dtype == dtype else x.view(dtype)
    mx.eval(arrays)
    return arrays, metadata


def _digest(data: bytes | memoryview) -> str:
    return sha256(data).hexdigest()[:32]
