"""Files that are written completely or not at all."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx


def check_target(file: Path) -> None:
    """Raise an OSError if the file cannot be written."""
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder: name a file.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {file.parent} to write {file.name} to.")
    with tempfile.TemporaryFile(dir=file.parent):
        pass


def write_atomic(file: Path, text: str) -> None:
    """Write or replace a file; a failure, which is an OSError, leaves the old one."""
    with _replacing(file) as new:
        new.write_text(text, encoding="utf-8")


def save_atomic(file: Path, arrays: dict[str, mx.array], metadata: dict[str, str] | None = None) -> None:
    """Write or replace a file of arrays; a failure, which is an OSError, leaves the old one."""
    with _replacing(file) as new:
        mx.save_safetensors(str(new), arrays, metadata=metadata or {})


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as folder:
            new = Path(folder) / file.name
            yield new
            new.replace(file)
    except (OSError, RuntimeError) as e:  # MLX's is a RuntimeError
        raise OSError(f"{file} could not be written: {getattr(e, 'strerror', None) or e}") from e
