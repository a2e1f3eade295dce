"""Files that are written completely or not at all."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from .errors import MTPFileNotFoundError, MTPOSError


def check_source(file: Path, name: str) -> None:
    """Raise an OSError that begins with a name, such as that of a flag, if the file cannot be read."""
    if not file.is_file():
        raise MTPFileNotFoundError(
            f"{name}: {file} is not a file." if file.exists() else f"{name}: there is no file {file}."
        )
    try:
        file.open("rb").close()
    except OSError as e:
        raise MTPOSError(f"{name}: {file} cannot be read: {e.strerror}.") from e


def check_folder(folder: Path, name: str) -> None:
    """Raise an OSError that begins with a name, such as that of a flag, if there is no such folder."""
    if not folder.is_dir():
        wrong = f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}"
        raise MTPFileNotFoundError(f"{name}: {wrong}.")


def make_folder(folder: Path, name: str) -> None:
    """Make a folder that only its user can read, if it is missing. Raise an OSError that begins with a name, such as that of a
    flag, if files cannot be written there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError as e:
        raise MTPOSError(f"{name}: {folder} is not a folder.") from e
    except OSError as e:
        raise MTPOSError(f"{name}: the folder {folder} cannot be written to: {e.strerror}.") from e


def check_target(file: Path) -> None:
    """Raise an OSError if the file cannot be written."""
    if file.is_dir():
        raise MTPOSError(f"{file} is a folder: name a file.")
    if not file.parent.is_dir():
        raise MTPFileNotFoundError(f"There is no folder {file.parent} to write {file.name} to.")
    with tempfile.TemporaryFile(dir=file.parent):
        pass


def write_atomic(file: Path, text: str) -> None:
    """Write or replace a file. After a failure, an OSError, the old file remains."""
    with _replacing(file) as new:
        new.write_text(text, encoding="utf-8")


def save_atomic(file: Path, arrays: dict[str, mx.array], metadata: dict[str, str] | None = None) -> None:
    """Write or replace a file of arrays. After a failure, an OSError, the old file remains."""
    with _replacing(file) as new:
        mx.save_safetensors(str(new), arrays, metadata=metadata or {})


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    with writing(file), tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as folder:
        new = Path(folder) / file.name
        yield new
        new.replace(file)


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """A context in which the errors of the system and of MLX name the file. Others are raised as they are."""
    try:
        yield
    except (OSError, RuntimeError) as e:
        if isinstance(e, OSError) and e.errno is None:
            raise
        raise MTPOSError(f"{file} could not be written: {getattr(e, 'strerror', None) or e}") from e
