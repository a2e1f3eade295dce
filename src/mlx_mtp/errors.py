"""The errors that a user can mend, which commands print in one line, and those of the device. Others keep their traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
EXTRAS = {  # of pip install 'mlx-mtp[server]', with the modules of each that are imported
    "server": ("fastapi", "uvicorn", "pydantic", "prometheus_client", "llguidance", ZSTD),
    "chat": ("prompt_toolkit",),
    "image": ("PIL",),
    "plot": ("matplotlib",),
}
SHORT = "Unable to allocate", "Insufficient Memory", "out of memory"  # in MLX's errors on Metal and CUDA
FAILED_PASS = "Command buffer execution failed"  # in Metal's errors, such as those of memory and of time


class MTPError(ValueError):
    """A wrong argument, flag, checkpoint, file or prompt cache. The message names the remedy."""


class NotANumberError(MTPError):
    """The model has no distribution of the next token."""

    def __init__(self) -> None:
        super().__init__(
            "The model's output is not a number: a weight, an embedding or a prompt cache is damaged, a value is too large for "
            "their type (load the model with another dtype), or a logits processor allows no token."
        )


class MTPOSError(OSError, MTPError):
    """A file, a folder, the disk, a port or the hub cannot be used."""


class MTPFileNotFoundError(FileNotFoundError, MTPOSError):
    """A file or a repository is missing."""


class MissingExtra(ImportError, MTPError):
    """An extra that is not installed."""


def is_mendable(error: BaseException) -> bool:
    """Whether the user can mend an error: one of this package's, or one of the system, such as a full disk."""
    return isinstance(error, MTPError) or (isinstance(error, OSError) and error.errno is not None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the system has no more memory, which other programs may have taken."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in SHORT)


def is_device_error(error: BaseException) -> bool:
    """Whether a pass has failed on the GPU: arrays that it should have computed have other values."""
    return isinstance(error, RuntimeError) and FAILED_PASS in str(error)


def advice(error: BaseException | None) -> str | None:
    """What to do about an error of the device, of memory or of a failed pass; ``None`` for other errors."""
    if not isinstance(error, RuntimeError) or not (is_device_error(error) or is_out_of_memory(error)):
        return None
    return (
        "A pass has failed on this device, for lack of memory or because it took too long: use a shorter context, a smaller "
        "--prefill-step-size, or a smaller --max-memory."
    )


@contextmanager
def as_mtp_error(wrong: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """A context that turns errors of other libraries about the user's input into an MTPError, which begins with ``wrong``."""
    try:
        yield
    except MTPError:
        raise
    except kind as e:
        raise MTPError(f"{wrong}: {' '.join(str(e).split()) or type(e).__name__}") from e


def require(extra: str, what: str) -> None:
    """Raise a MissingExtra with the command to install it if an extra is missing; ``what`` requires it."""
    if missing := [name for name in EXTRAS[extra] if _is_missing(name)]:
        raise MissingExtra(f"{what} requires {', '.join(missing)}: pip install 'mlx-mtp[{extra}]'")


def _is_missing(name: str) -> bool:
    with suppress(ModuleNotFoundError):  # of its package
        return find_spec(name) is None
    return True
