"""Parts of originals that were fetched: one folder for each original and revision, which all of its conversions share.

HF_HOME/mlx_mtp/heads/Qwen--Qwen3.6-27B/<commit>/config.json
                                                 model.safetensors   the part alone
                      of.json                                        the part of each checkpoint, by its folder
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock

from ...files import write_atomic
from ..config import Config, first_difference, parse_json, read_json, text_config_of
from ..storage.reader import CheckpointReader

WEIGHTS, CONFIG, OF = "model.safetensors", "config.json", "of.json"


def folder_of(kind: str) -> Path:
    """Where the parts of a kind are, ``heads`` or ``towers``: beside the hub's cache, in ``HF_HOME``."""
    return Path(constants.HF_HOME) / "mlx_mtp" / kind


def fetched_before(kind: str, folder: Path, config: Config) -> Path | None:
    """The part that was fetched for a checkpoint, if it still fits: another checkpoint may be in that folder now."""
    root = folder_of(kind)
    known = read_own(root / OF).get(str(folder.resolve()))
    if known is None or not (root / known / CONFIG).exists():
        return None
    own = read_json(root / known / CONFIG).get("text_config", {})
    return None if first_difference(own, text_config_of(config)) else root / known


def fetch_part(
    kind: str, original: CheckpointReader, folder: Path, write: Callable[[Path], Config]
) -> tuple[Path, bool]:
    """Fetch a part of an original for a checkpoint in ``folder``, unless it is there -> its folder, and whether that is new.

    Args:
        write (Callable[[Path], Config]): Writes the part to a folder and returns its config.json, which is written last: a
          folder without one is incomplete, and another call resumes there.

    Raises:
        FileNotFoundError: It could not be downloaded.
        OSError: It could not be written.
    """
    root = folder_of(kind)
    target = root / original.name.strip("/").replace("/", "--") / (original.revision or _revision_of(original))
    try:
        target.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(target / ".lock"):  # another process may fetch it, too
            is_new = not (target / CONFIG).exists()
            if is_new:
                write_atomic(target / CONFIG, json.dumps(write(target), indent=4) + "\n")
        update_own(root / OF, str(folder.resolve()), str(target.relative_to(root)))
    except OSError as e:
        if isinstance(e, FileNotFoundError) and e.errno is None:
            raise  # the hub's, which says why
        raise OSError(f"{target} cannot be written: {e.strerror or e}") from e
    return target, is_new


def _revision_of(original: CheckpointReader) -> str:
    """That of a folder, which has no commit: its place and the times of its files."""
    assert original.folder is not None
    files = sorted(original.folder.glob("*.safetensors"))
    state = [str(original.folder.resolve()), *((f.name, f.stat().st_mtime_ns) for f in files)]
    return hashlib.sha1(json.dumps(state).encode()).hexdigest()


def read_own(file: Path) -> dict[str, Any]:
    """A file of ours; empty if it is missing or damaged, since it can be made again."""
    try:
        return parse_json(file.read_bytes(), str(file))
    except (OSError, ValueError):
        return {}


def update_own(file: Path, key: str, value: Any) -> None:
    """Set one entry of a file of ours, which other processes may change."""
    with WeakFileLock(file.with_name(f".{file.name}.lock")):
        write_atomic(file, json.dumps(read_own(file) | {key: value}, indent=4) + "\n")
