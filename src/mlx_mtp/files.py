"""Files that are written completely or not at all, and results that are kept in the user's cache folder."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub.utils import WeakFileLock
from platformdirs import user_cache_path

from .errors import MTPFileNotFoundError, MTPOSError, as_mtp_error

MAX_DISK_BYTES = 64 * 10**9  # of a folder of prompt caches
SERVERS = (
    "servers.json"  # in the cache folder: the URL, the flags and the start time of each running server, by its process
)


def check_source(file: Path, name: str) -> None:
    """Raise an OSError that begins with a name, such as that of a flag, if the file cannot be read."""
    if not file.is_file():
        wrong = f"{file} is not a file" if file.exists() else f"there is no file {file}"
        raise MTPFileNotFoundError(f"{name}: {wrong}.")
    try:
        file.open("rb").close()
    except OSError as e:
        raise MTPOSError(f"{name}: {file} cannot be read: {e.strerror}.") from e


def read_text(file: Path) -> str:
    """The text of a user's file, without a byte order mark. Raises an MTPError if it is not UTF-8."""
    with as_mtp_error(f"{file} is not text in UTF-8", UnicodeDecodeError):
        return file.read_text(encoding="utf-8-sig")


def check_folder(folder: Path, name: str) -> None:
    """Raise an OSError that begins with a name, such as that of a flag, if there is no such folder."""
    if not folder.is_dir():
        wrong = f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}"
        raise MTPFileNotFoundError(f"{name}: {wrong}.")


def make_folder(folder: Path, name: str) -> None:
    """Make a folder that only its user can read, if it is missing. An OSError as of ``check_folder`` if it is not writable."""
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
    with replacing(file) as new:
        new.write_text(text, encoding="utf-8")


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A context that yields a new file, which then replaces this one. After a failure, an OSError, the old file remains."""
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


def cache_file(name: str) -> Path:
    return user_cache_path("mlx_mtp", appauthor=False) / name


def kept(name: str, key: str) -> Any:
    return read_own(cache_file(name)).get(key)


def keep(name: str, key: str, value: Any) -> None:
    with suppress(OSError):  # a read-only folder: it is found again
        cache_file(name).parent.mkdir(parents=True, exist_ok=True)
        update_own(cache_file(name), key, value)


def read_own(file: Path) -> dict[str, Any]:
    """Read a file of this package. Empty if it is missing or damaged, since it can be made again."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def update_own(file: Path, key: str, value: Any) -> None:
    """Set one entry of a file of this package, which other processes may change; ``None`` removes it."""
    with WeakFileLock(file.with_name(f".{file.name}.lock")):
        entries = {k: v for k, v in (read_own(file) | {key: value}).items() if v is not None}
        write_atomic(file, json.dumps(entries, indent=4) + "\n")
