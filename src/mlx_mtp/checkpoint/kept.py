"""Small files of this package: results that are kept on this machine, in the user's cache folder."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub.utils import WeakFileLock
from platformdirs import user_cache_path

from ..files import write_atomic
from .config import parse_json


def cache_file(name: str) -> Path:
    return user_cache_path("mlx_mtp", appauthor=False) / name


def kept(name: str, key: str) -> Any:
    """What was kept before; ``None`` for nothing."""
    return read_own(cache_file(name)).get(key)


def keep(name: str, key: str, value: Any) -> None:
    with suppress(OSError):  # a read-only folder: it is found again
        cache_file(name).parent.mkdir(parents=True, exist_ok=True)
        update_own(cache_file(name), key, value)


def read_own(file: Path) -> dict[str, Any]:
    """Read a file of this package. Empty if it is missing or damaged, since it can be made again."""
    try:
        return parse_json(file.read_bytes(), str(file))
    except (OSError, ValueError):
        return {}


def update_own(file: Path, key: str, value: Any) -> None:
    """Set one entry of a file of this package, which other processes may change."""
    with WeakFileLock(file.with_name(f".{file.name}.lock")):
        write_atomic(file, json.dumps(read_own(file) | {key: value}, indent=4) + "\n")
