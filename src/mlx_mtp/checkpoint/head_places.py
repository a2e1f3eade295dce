"""The places of MTP heads in checkpoints: among the model's tensors, in files that the config or an index names, in others."""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any

from ..errors import MTPError, MTPFileNotFoundError
from ..models.head_weights import MARKER, split_head
from .config import EXTRA_TENSORS
from .hub import WEIGHTS, is_inside

INDEX_FILE = "model.safetensors.index.json"


def places_of_heads(checkpoint: Any) -> Iterator[Mapping[str, str]]:
    """The files of tensors among which a head may be, in a ``CheckpointReader``, in this order."""
    model_map = checkpoint.model_map  # its errors first
    if (named := _file_in_config(checkpoint)) is not None:
        yield dict.fromkeys(checkpoint.header(named).tensors, named)
    yield model_map
    for file in checkpoint.files:
        if file.endswith(".safetensors.index.json") and file != INDEX_FILE:
            place = read_index(checkpoint, file)
            if MARKER in split_head(place)[1]:
                for own in sorted({*place.values()}):
                    if not checkpoint.has(own):
                        raise missing_file(checkpoint, own, file)
                yield place
    yield _in_unnamed_files(checkpoint)


def _file_in_config(checkpoint: Any) -> str | None:
    extra = (checkpoint.config or {}).get(EXTRA_TENSORS)
    file = extra.get("mtp_file") if isinstance(extra, dict) else None
    if file is not None:
        check_inside(file, "config.json", checkpoint.name)
        if not checkpoint.has(file):
            raise missing_file(checkpoint, file, "config")
    return file


def _in_unnamed_files(checkpoint: Any) -> dict[str, str]:
    """The files of a head's tensors that nothing names. Files whose names differ only in numbers belong together."""
    files = [file for file in checkpoint.files if file.endswith(".safetensors") and not is_models(file)]
    files.sort(key=lambda file: ("mtp" not in file, file.count("/"), file))
    for group in dict.fromkeys(map(_without_numbers, files)):
        found: dict[str, str] = {}
        for file in (file for file in files if _without_numbers(file) == group):
            try:
                names = {name: name for name in checkpoint.header(file).tensors}
            except MTPError as e:
                if "mtp" in file or isinstance(e, OSError):
                    raise
            else:
                found |= dict.fromkeys(split_head(names)[1].values(), file)
        if MARKER in split_head(found)[1]:
            return found
    return {}


def read_index(checkpoint: Any, file: str) -> dict[str, str]:
    """The file of every tensor in an index. Raises MTPError if it is damaged, or names a file outside the checkpoint."""
    weights = checkpoint.read_json(file).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(own, str) for own in weights.values()):
        raise MTPError(f"{file} of {checkpoint.name} has no weight_map: download it again.")
    weights = {name: str(PurePosixPath(file).parent / own) for name, own in weights.items()}
    for own in set(weights.values()):
        check_inside(own, file, checkpoint.name)
    return weights


def _without_numbers(file: str) -> str:
    return re.sub(r"\d+", "", file)


def is_models(file: str) -> bool:
    """Whether mlx-lm loads this file."""
    return fnmatch(file, WEIGHTS) and "/" not in file


def check_inside(file: Any, named_by: str, name: str) -> None:
    if not is_inside(file):
        raise MTPError(f"The {named_by} of {name} names the file {file!r}, which is not in its folder.")


def missing_file(checkpoint: Any, file: str, named_by: str) -> MTPFileNotFoundError:
    return MTPFileNotFoundError(f"{checkpoint.name} lacks {file}, which its {named_by} names: download it again.")
