"""The errors that a user can mend. Commands print them in one line; every other error keeps its traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class MTPError(ValueError):
    """A wrong argument, flag, checkpoint, file or prompt cache. The message names the remedy."""


class MTPOSError(OSError, MTPError):
    """A file, a folder, the disk, a port or the hub cannot be used."""


class MTPFileNotFoundError(FileNotFoundError, MTPOSError):
    """A file or a repository is missing."""


def is_mendable(error: BaseException) -> bool:
    """Whether the user can mend an error: one of this package's, or one of the system, such as a full disk."""
    return isinstance(error, MTPError) or (isinstance(error, OSError) and error.errno is not None)


@contextmanager
def as_mtp_error(wrong: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """A context that turns errors of other libraries about the user's input into an MTPError, which begins with ``wrong``."""
    try:
        yield
    except MTPError:
        raise
    except kind as e:
        raise MTPError(f"{wrong}: {' '.join(str(e).split()) or type(e).__name__}") from e
