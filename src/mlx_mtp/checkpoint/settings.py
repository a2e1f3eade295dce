"""What ``python -m mlx_mtp.benchmark --tune`` has found best here, in a small file that ``mlx_mtp.load`` finds again.

What is best depends on the machine, the checkpoint and the versions of the software: a file says of which it is, and is not
used for others. It is never needed.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from platformdirs import user_cache_path

from .._version import __version__
from ..models.drafting import Settings
from .files import check_target, write_whole
from .hub import HEAD_FILE, WEIGHTS, parse_json

log = logging.getLogger(__name__)


def key_of(*folders: Path) -> dict[str, str]:
    """What settings are of: the device, the software, and the checkpoint in these folders (with a drafter, an adapter).

    The checkpoint is known by its place, its config and the sizes of its weights.
    """
    digest = hashlib.sha256()
    for folder in folders:
        digest.update(str(folder.resolve()).encode())
        config = folder / "config.json"
        digest.update(config.read_bytes() if config.exists() else b"")
        files = {f.name: f.stat().st_size for pattern in (WEIGHTS, HEAD_FILE, "adapter*") for f in folder.glob(pattern)}
        digest.update(json.dumps(sorted(files.items())).encode())
    device = mx.device_info()
    return {
        "checkpoint": digest.hexdigest()[:16],
        "device": f"{device.get('device_name')}, {device.get('architecture')}, {mx.default_device()}",
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "mlx-mtp": __version__,
    }


def default_file(key: Mapping[str, str]) -> Path:
    """Where the settings of a checkpoint on a device are kept: a cache folder of the user's."""
    name = hashlib.sha256(f"{key['checkpoint']} {key['device']}".encode()).hexdigest()[:16]
    return user_cache_path("mlx_mtp", appauthor=False) / f"{name}.json"


def find(file: bool | str | Path, folders: Sequence[Path]) -> Settings | None:
    """The settings of a checkpoint.

    Args:
        file (Union[bool, str, Path]): As ``settings`` in ``mlx_mtp.load``.
        folders (Sequence[Path]): Those of the checkpoint, see ``key_of``.

    Returns:
        Optional[Settings]: ``None`` where there are none, or, with a warning, where they are of something else.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not one of settings.
    """
    if file is False:
        return None
    key = key_of(*folders)
    path = default_file(key) if file is True else Path(file)
    if file is True and not path.exists():
        return None
    of, settings = read(path)
    if differs := [f"{name} is {key[name]}, not {of.get(name)}" for name in key if of.get(name) != key[name]]:
        log.warning(
            f"[WARNING] The settings in {path} are not used, because {' and '.join(differs)}: "
            "measure anew with `python -m mlx_mtp.benchmark --tune`, or delete the file."
        )
        return None
    log.info(f"Settings of {path}: {settings}")
    return settings


def read(file: Path) -> tuple[dict[str, str], Settings]:
    """What settings are of, and the settings."""
    if not file.is_file():
        raise FileNotFoundError(f"There are no settings {file}: write them with `python -m mlx_mtp.benchmark --tune`.")
    try:
        content: dict[str, Any] = parse_json(file.read_bytes(), str(file))
        settings = Settings(**content["settings"])
        seconds = {int(k): float(t) for k, t in settings.seconds.items()}
        numbers = [settings.mtp_bits, settings.draft_head_bits, settings.draft_vocab]
        if not all(n is None or type(n) is int for n in numbers) or not all(t > 0 for t in seconds.values()):
            raise ValueError
        if not 0 <= settings.draft_p_min <= 1:
            raise ValueError
        if settings.num_draft_tokens != "auto" and type(settings.num_draft_tokens) is not int:
            raise ValueError
        return dict(content["key"]), replace(settings, seconds=seconds)
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ValueError(
            f"{file} is not a file of settings as `python -m mlx_mtp.benchmark --tune` writes it: "
            "run that once more, or do without (--settings off)."
        ) from e


def write(file: Path, key: Mapping[str, str], model: str, settings: Settings) -> None:
    """Write settings, whole or not at all; ``model`` is for people who look into the file."""
    content = {"model": model, "key": key, "settings": asdict(settings)}
    write_whole(file, json.dumps(content, indent=2) + "\n")


def check_writable(file: Path) -> None:
    """Make the folder of a file, and raise an OSError if nothing can be written there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    check_target(file)
