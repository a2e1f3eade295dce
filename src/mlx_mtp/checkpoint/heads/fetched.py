"""Heads that were fetched from originals: one folder for each original and revision, which all of its conversions share.

HF_HOME/mlx_mtp/heads/Qwen--Qwen3.6-27B/<commit>/config.json         as a drafter's, see ``head_formats.py``
                                                 model.safetensors   the head alone
                                                 acceptance.json     what each model has accepted of its drafts
                                        of.json                      the head of each checkpoint, by its folder
"""

import hashlib
import json
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock

from ...models.mtp import split_head
from ..config import Config, check_config, first_difference, parse_json, read_json, text_config_of
from ..files import write_atomic
from ..head_formats import DRAFTER, head_file_of
from ..reader import CheckpointReader
from ..tensors import tensor_names
from .original import find_original, fitting_head

WEIGHTS, CONFIG, ACCEPTANCE, OF = "model.safetensors", "config.json", "acceptance.json", "of.json"


def heads_folder() -> Path:
    """Where fetched heads are: beside the hub's cache, in ``HF_HOME``."""
    return Path(constants.HF_HOME) / "mlx_mtp" / "heads"


@dataclass(frozen=True)
class FetchedHead:
    """A head in the folder of fetched heads.

    Args:
        folder (Path): It is a drafter, as ``load(..., mtp=str(folder))`` takes.
        is_new (bool): Whether it was fetched just now.
    """

    folder: Path
    is_new: bool = False

    @property
    def source(self) -> str:
        """The original's path or repository."""
        return str(self.record.get("source", ""))

    @property
    def revision(self) -> str:
        return str(self.record.get("revision", ""))

    @property
    def nbytes(self) -> int:
        return (self.folder / WEIGHTS).stat().st_size

    @property
    def record(self) -> Config:
        """Where it is from, as conversions record it in their config.json."""
        record: Config = read_json(self.folder / CONFIG)["mlx_mtp"]
        return record

    def acceptance(self, fingerprint: bytes) -> float | None:
        """What a model accepted of its drafts when it was tried; ``None`` if it was not."""
        return _read(self.folder / ACCEPTANCE).get(fingerprint.hex())

    def remember(self, fingerprint: bytes, acceptance: float) -> None:
        """Remember what a model accepts of its drafts."""
        _update(self.folder / ACCEPTANCE, fingerprint.hex(), acceptance)


def fetch_missing_head(
    name: str, folder: Path, config: Config, needed: Collection[str] | None = None
) -> FetchedHead | None:
    """Return the head of a checkpoint's original, fetching it the first time. Later nothing is asked of the hub.

    Args:
        name (str): The checkpoint's path or repository.
        folder (Path): The checkpoint.
        config (Dict[str, Any]): Its config.json.
        needed (Collection[str], optional): As in ``tensor_names``.

    Returns:
        Optional[FetchedHead]: ``None`` if the checkpoint has a head of its own.

    Raises:
        FileNotFoundError: The original was not found, or the head could not be downloaded. What was downloaded of it stays, and
          the next call resumes there.
        ValueError: The original is damaged.
    """
    if head_file_of(name, config) is not None or split_head(dict.fromkeys(tensor_names(folder, needed=needed)))[1]:
        return None
    heads = heads_folder()
    if (known := _of(heads, folder, config)) is not None:
        return FetchedHead(known)
    original = find_original(name, folder, config)
    target = heads / original.name.strip("/").replace("/", "--") / (original.revision or _revision_of(original))
    try:
        target.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(target / ".lock"):  # another process may fetch it, too
            is_new = not (target / CONFIG).exists()
            if is_new:
                _write(original, config, name, target)
        _update(heads / OF, str(folder.resolve()), str(target.relative_to(heads)))
    except OSError as e:
        if isinstance(e, FileNotFoundError) and e.errno is None:
            raise  # the hub's, which says why
        raise OSError(f"The head of {original.name} cannot be written to {target}: {e.strerror or e}") from e
    return FetchedHead(target, is_new)


def fetched_heads() -> Iterator[FetchedHead]:
    """All heads that were fetched completely."""
    for file in sorted(heads_folder().glob(f"*/*/{CONFIG}")):
        yield FetchedHead(file.parent)


def remove(head: FetchedHead) -> None:
    shutil.rmtree(head.folder)
    with suppress(OSError):  # another revision is there
        head.folder.parent.rmdir()


def _of(heads: Path, folder: Path, config: Config) -> Path | None:
    """The head that was fetched for a checkpoint, if it still fits: another checkpoint may be in that folder now."""
    known = _read(heads / OF).get(str(folder.resolve()))
    if known is None or not (heads / known / CONFIG).exists():
        return None
    own = read_json(heads / known / CONFIG).get("text_config", {})
    return None if first_difference(own, text_config_of(config)) else heads / known


def _write(original: CheckpointReader, config: Config, name: str, target: Path) -> None:
    """Write the head as a drafter. Its config comes last: a folder without one is incomplete."""
    tensors = fitting_head(original, config, name)
    own = check_config(original.config, original.name)
    # A drafter's names tell its layout.
    prefix = "mtp." if original.has_raw_head(tensors) else ""
    original.save(
        tensors, target / WEIGHTS, {old: prefix + new for new, old in split_head({n: n for n in tensors})[1].items()}
    )
    record = own.get("mlx_mtp") or {"source": original.name, "revision": original.revision}
    drafter = {"model_type": DRAFTER, "text_config": text_config_of(own), "mlx_mtp": record}
    write_atomic(target / CONFIG, json.dumps(drafter, indent=4) + "\n")


def _revision_of(original: CheckpointReader) -> str:
    """That of a folder: its head's bytes are told from others by their place and the time of their files."""
    assert original.folder is not None
    files = sorted({original.weight_map[name] for name in original.head()})
    state = [(str(original.folder.resolve()), file, (original.folder / file).stat().st_mtime_ns) for file in files]
    return hashlib.sha1(json.dumps(state).encode()).hexdigest()


def _read(file: Path) -> dict[str, Any]:
    """A file of ours; empty if it is missing or damaged, since it can be made again."""
    try:
        return parse_json(file.read_bytes(), str(file))
    except (OSError, ValueError):
        return {}


def _update(file: Path, key: str, value: Any) -> None:
    with WeakFileLock(file.with_name(f".{file.name}.lock")):
        write_atomic(file, json.dumps(_read(file) | {key: value}, indent=4) + "\n")
