"""The MTP head and the vision encoder of a model's base model, and whether the model accepts the head's drafts."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import MTPError
from ..images.vision import CONFIG_FILES, Vision, settings_of
from ..memory import GB
from ..models import drafter_of
from ..models.head_weights import split_head
from . import originals
from .config import Config, check_config, read_json, text_config_of
from .head_formats import check_head, check_shapes, has_raw_head
from .originals import Tensors
from .reader import CheckpointReader, n_bytes

DTYPES = ("BF16", "F16", "F32", "F8_E4M3")
PATIENCE = 5  # seconds to wait for the hub's answer about a head that the user has not asked for


@dataclass(frozen=True)
class FetchedHead:
    folder: Path  # a drafter for load(..., mtp=str(folder))

    @property
    def record(self) -> Config:
        """Its source, as recorded in the config.json of conversions."""
        record: Config = read_json(self.folder / originals.CONFIG)["mlx_mtp"]
        return record

    @property
    def source(self) -> str:
        return str(self.record.get("source", ""))

    @property
    def nbytes(self) -> int:
        return (self.folder / originals.WEIGHTS).stat().st_size


def fetch_missing_head(checkpoint: CheckpointReader) -> FetchedHead | None:
    """Fetch the head of a checkpoint's original, see ``fetch_from_original``. ``None`` if the checkpoint has its own head."""
    if checkpoint.head_map:
        return None
    advice = (
        f"Name a head with --mtp HEAD, add one with `mlx_mtp convert --graft-mtp-from BASE_MODEL --model {checkpoint.name} "
        "--mlx-path NEW`, or generate without a head (--no-mtp, in Python mtp=False)."
    )
    return FetchedHead(originals.fetch_from_original(originals.HEADS, checkpoint, fitting_head, _write_head, advice))


def has_usable_head(checkpoint: CheckpointReader) -> bool:
    """Whether a checkpoint has its own head. Raises an error if that cannot be used."""
    if checkpoint.head_map:
        check_head(checkpoint)
        return True
    return False


def head_to_fetch(path_or_hf_repo: str, revision: str | None = None) -> tuple[str, int] | None:
    """The original of a checkpoint without a head and the bytes of its head, by the catalog or the hub; ``None`` if unknown."""
    checkpoint = CheckpointReader(path_or_hf_repo, revision)
    check_config(checkpoint.config, path_or_hf_repo)
    if checkpoint.head_map:
        return None  # which cannot be used
    if (known := originals.published_base(checkpoint)) is not None:
        return known.original, int(known.head_gb * GB)
    found: list[tuple[str, int]] = []

    def ask() -> None:
        with suppress(MTPError, OSError):
            original, tensors = originals.find_original(originals.HEADS, checkpoint, fitting_head)
            found.append((original.name, n_bytes(*tensors.values())))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return next(iter(found), None)


def fitting_head(original: CheckpointReader, checkpoint: CheckpointReader) -> Tensors:
    """Describe the tensors of an original's head. Raises MTPError if there is none, or it does not fit or is quantized."""
    originals.check_sizes(original, checkpoint)
    if not (tensors := original.head()):
        raise MTPError(f"{original.name} has no MTP head: the base model of {checkpoint.name} has.")
    check_head(original)
    if original.name != checkpoint.name and any(t.dtype not in DTYPES for t in tensors.values()):
        raise MTPError(f"The MTP head of {original.name} is quantized: the base model's is in bfloat16.")
    check_shapes(checkpoint, tensors)
    return tensors


def _write_head(original: CheckpointReader, tensors: Tensors, target: Path) -> Config:
    own = original.config or {}
    prefix = "mtp." if has_raw_head(original) else ""  # the names of a drafter's tensors imply its layout
    names = {old: prefix + new for new, old in split_head({n: n for n in tensors})[1].items()}
    originals.copy_tensors(original, tensors, target / originals.WEIGHTS, names)
    record = own.get("mlx_mtp") or {"source": original.name, "revision": original.revision}
    return {"model_type": drafter_of(own["model_type"]), "text_config": text_config_of(own), "mlx_mtp": record}


def fetched_heads() -> Iterator[FetchedHead]:
    for file in sorted(originals.folder_of(originals.HEADS).glob(f"*/*/{originals.CONFIG}")):
        yield FetchedHead(file.parent)


def fetch_tower(checkpoint: CheckpointReader, config: Config) -> Vision:
    """Fetch the vision encoder of a checkpoint's original, see ``fetch_from_original``."""
    advice = f"Add one with `mlx_mtp convert --graft-vision-from BASE_MODEL --model {checkpoint.name} --mlx-path NEW`."
    tower = originals.fetch_from_original(originals.TOWERS, checkpoint, fitting_tower, _write_tower, advice)
    return Vision(tower, config | settings_of(read_json(tower / originals.CONFIG)), [originals.WEIGHTS])


def fitting_tower(original: CheckpointReader, checkpoint: CheckpointReader) -> Tensors:
    """Describe the tensors of a base model's tower. Raises MTPError if there is none, or the sizes of the models differ."""
    own, tensors = originals.check_sizes(original, checkpoint), original.tower()
    if not tensors or not isinstance(own.get("vision_config"), dict):
        raise MTPError(f"{original.name} has no vision encoder: the base model of {checkpoint.name} has.")
    return tensors


def _write_tower(original: CheckpointReader, tensors: Tensors, target: Path) -> Config:
    own = original.config or {}
    copy_image_settings(original, target)
    originals.copy_tensors(original, tensors, target / originals.WEIGHTS)
    record = {"source": original.name, "revision": original.revision}
    return {"text_config": text_config_of(own), **settings_of(own), "mlx_mtp": record}


def copy_image_settings(original: CheckpointReader, target: Path) -> None:
    for file in CONFIG_FILES:
        if file in original.files:
            (target / file).write_bytes(original.read(file))
