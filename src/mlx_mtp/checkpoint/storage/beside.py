"""A checkpoint made of another one's files, which are linked, and of a head, a vision tower or both beside them."""

import json
import os
import shutil
from pathlib import Path

import mlx.core as mx

from ...layers.mtp import split_head
from ..config import Config
from ..head_formats import quantization_beside
from .hub import HEAD_FILE, TOWER_FILE
from .output import check_written, describe_head, save, write_index
from .reader import CheckpointReader
from .tensors import INDEX_FILE


def write_weights(
    folder: Path, receiver: CheckpointReader, head: dict[str, mx.array], tower: dict[str, mx.array] | None = None
) -> None:
    """Write a head and a vision tower beside links to the receiver's files, and an index of all; either may be empty."""
    assert receiver.folder is not None
    tower = tower or {}
    weight_map = dict(split_head(receiver.weight_map)[0] if head else receiver.weight_map)
    for file, tensors in ((HEAD_FILE, head), (TOWER_FILE, tower)):
        if tensors:
            save(folder / file, tensors)
            weight_map.update(dict.fromkeys(tensors, file))
    _link_files(receiver.folder, folder, receiver.head_file if head else None)
    metadata = receiver.read_json(INDEX_FILE).get("metadata", {}) if INDEX_FILE in receiver.files else {}
    if "total_size" in metadata:
        metadata["total_size"] += sum(w.nbytes for w in (*head.values(), *tower.values()))
    write_index(folder, weight_map, metadata)
    check_written(folder, head | tower, weight_map)


def _link_files(source: Path, folder: Path, old_head: str | None) -> None:
    """Link a checkpoint's weights and copy its other files, except those that are there already, and an old head."""
    for file in source.iterdir():
        if not file.is_file() or file.name == old_head or (folder / file.name).exists():
            continue
        if file.suffix == ".safetensors":
            try:
                os.link(file.resolve(), folder / file.name)  # the cache's files are links themselves
                continue
            except OSError:
                pass  # another disk, or one without links
        shutil.copy(file, folder / file.name)


def write_config(folder: Path, config: Config, head: dict[str, mx.array], origin: Config) -> None:
    """Write a config.json with the head, unless it is empty."""
    if head:
        config.update(quantization_beside(config, head))
        describe_head(config, origin, next(iter(head.values())).dtype, None, separate=True)
    (folder / "config.json").write_text(json.dumps(config, indent=4) + "\n")
