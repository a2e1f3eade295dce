"""The extras of the package, ``pip install 'mlx-mtp[server]'``: libraries that only some commands use."""

import sys
from contextlib import suppress
from importlib.util import find_spec

from .errors import MTPError

ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
EXTRAS = {  # the modules of each that are imported
    "server": ("fastapi", "uvicorn", "pydantic", "prometheus_client", "llguidance", ZSTD),
    "chat": ("prompt_toolkit",),
    "image": ("PIL",),
    "plot": ("matplotlib",),
}


class MissingExtra(ImportError, MTPError):
    """An extra that is not installed."""


def require(extra: str, what: str) -> None:
    """Raise a MissingExtra with the command to install it if an extra is missing; ``what`` requires it."""
    if missing := [name for name in EXTRAS[extra] if _is_missing(name)]:
        raise MissingExtra(f"{what} requires {', '.join(missing)}: pip install 'mlx-mtp[{extra}]'")


def _is_missing(name: str) -> bool:
    with suppress(ModuleNotFoundError):  # of its package
        return find_spec(name) is None
    return True
