"""A safetensors file whose name is the digest of its bytes.

So a file is written once, whoever writes it, and the digest of a damaged one is not its name.
"""

import io
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import mlx.core as mx

from .arrays import Arrays

SUFFIX = ".safetensors"
CHUNK = 4 << 20  # bytes that are written at once, while other threads run


class Damaged(ValueError):
    """The bytes of a file have another digest than its name says."""


def encode(arrays: Arrays, metadata: Mapping[str, str]) -> tuple[str, memoryview]:
    """The name and the bytes of a file. The same arrays in the same order give the same bytes, with one version of MLX.

    Args:
        arrays (Dict[str, mx.array]): Evaluated, since another thread may have made them. None is empty.
    """
    file = io.BytesIO()
    mx.save_safetensors(file, arrays, dict(metadata))
    data = file.getbuffer()
    return _digest(data), data


def write(path: Path, temporary: Path, data: memoryview) -> None:
    """Write a file under a temporary name and then rename it, so that nobody reads a part of it. Only its owner may."""
    try:
        with open(temporary, "wb", opener=private) as file:
            for i in range(0, len(data), CHUNK):
                file.write(data[i : i + CHUNK])
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def private(path: str, flags: int) -> int:
    """An ``opener`` of files that nobody but their owner may read or write."""
    return os.open(path, flags, 0o600)


def read(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        Damaged: The file has another digest than its name says.
        OSError: It cannot be read.
    """
    data = path.read_bytes()
    if _digest(data) != path.name.removesuffix(SUFFIX):
        raise Damaged(f"{path} is damaged: its bytes are not those that it is named by.")
    return data


def decode(data: bytes) -> tuple[Arrays, dict[str, str]]:
    """The arrays and the metadata of a file."""
    arrays, metadata = mx.load(io.BytesIO(data), format="safetensors", return_metadata=True)
    mx.eval(arrays)
    return arrays, metadata  # type: ignore[return-value]  # no other format has these types


def _digest(data: bytes | memoryview) -> str:
    return sha256(data).hexdigest()[:32]
