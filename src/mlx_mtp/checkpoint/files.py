"""Small files that are written completely or not at all."""

import os
import tempfile
from pathlib import Path


def check_target(file: Path) -> None:
    """Raise an OSError if the file cannot be written."""
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder: name a file.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {file.parent} to write {file.name} to.")
    with tempfile.TemporaryFile(dir=file.parent):
        pass


def write_atomic(file: Path, text: str) -> None:
    """Write or replace a file; a failure leaves the old one."""
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        os.chmod(name, 0o644)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
