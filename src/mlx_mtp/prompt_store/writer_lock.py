"""Which writers of a folder are alive: each holds a lock, which the system takes back when its process ends.

A process's number would not tell: another process may have it, the next one of a container always has, and two stores of one
process share it.
"""

import fcntl
import secrets
from pathlib import Path

from .array_file import private

SUFFIX = ".writer"


class WriterLock:
    """A writer's name, and a file of that name which is locked as long as the writer lives.

    No other writer may look for dead ones while it is made.

    Raises:
        OSError: The folder cannot be written to, or its file system has no locks.
    """

    def __init__(self, folder: Path):
        self.name = secrets.token_hex(8)
        self._path = folder / f"{self.name}{SUFFIX}"
        self._file = open(self._path, "xb", opener=private)  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def is_alive(folder: Path, name: str) -> bool:
    """Whether the writer of this name is alive."""
    try:
        with open(folder / f"{name}{SUFFIX}", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
