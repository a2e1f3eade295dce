"""Writing of checkpoints: folders that appear when complete, and heads or vision encoders beside another's files."""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import ModelCard, ModelCardData
from yaml import YAMLError

from ..errors import MTPError, MTPOSError
from ..files import writing
from .config import EXTRA_TENSORS, Config, text_config_of
from .heads.formats import load_tensors, quantization_beside
from .hub import HEAD_FILE, TOWER_FILE, check_path, warn_once
from .reader import INDEX_FILE, CheckpointReader, n_bytes

CLONE = ["cp", "-c"] if sys.platform == "darwin" else ["cp", "--reflink=always"]

log = logging.getLogger(__name__)


def check_new(target: Path) -> None:
    check_path(target.absolute())
    if target.exists():
        raise MTPError(
            f"Cannot save to the path {target} as it already exists."
            " Please delete the file/directory or specify a new path to save to."
        )


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Fill a temporary folder beside ``target`` and rename it at the end. After a failure nothing of it remains."""
    made = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing(target):
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with naming(folder, str(target)):
            yield folder
        folder.chmod(0o755)  # mkdtemp allows only the user
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # another program has created it
                parent.rmdir()
        raise


@contextmanager
def naming(folder: Path, name: str) -> Iterator[None]:
    """A context that replaces this temporary folder in errors by a name that the user knows."""
    try:
        yield
    except (MTPError, OSError) as e:
        if str(folder) not in str(e):
            raise
        if isinstance(e, OSError) and e.strerror and e.filename:  # an error of the system
            raise OSError(e.errno, e.strerror, str(e.filename).replace(str(folder), name)) from e
        raise type(e)(str(e).replace(str(folder), name)) from e


def save(file: Path, weights: dict[str, mx.array]) -> None:
    with writing(file):
        mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})


def write_index(folder: Path, weight_map: Mapping[str, str], metadata: Config) -> None:
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).unlink(missing_ok=True)  # it may be a link to a file of another checkpoint
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=4))


def check_written(folder: Path, tensors: Mapping[str, mx.array], weight_map: Mapping[str, str]) -> None:
    """Read all of these tensors back, and raise an OSError if one differs."""
    written = {file: load_tensors(folder / file) for file in {weight_map[name] for name in tensors}}
    for name, w in tensors.items():
        back = written[weight_map[name]][name]
        if back.dtype != w.dtype or not mx.array_equal(back, w, equal_nan=True):
            raise MTPOSError(f"{name} was not read back as it was written to {folder / weight_map[name]}.")


def describe_head(config: Config, origin: Config, dtype: mx.Dtype, bits: int | None, separate: bool) -> None:
    """Record a head in a config: its source and revision, which may be those of an earlier record, and its format."""
    config.pop("mtp_num_hidden_layers", None)
    text_config_of(config)["mtp_num_hidden_layers"] = 1
    of_head = {"dtype": dtype_name(dtype), "bits": bits, "norms_shifted": True}
    config["mlx_mtp"] = {key: origin.get(key) for key in ("source", "revision")} | of_head
    config.pop(EXTRA_TENSORS, None)
    if separate:
        config[EXTRA_TENSORS] = {"mtp_file": HEAD_FILE}


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def write_beside(
    folder: Path,
    receiver: CheckpointReader,
    config: Config,
    head: dict[str, mx.array],
    tower: dict[str, mx.array],
    origin: Config,
    card: str,
) -> None:
    """Write a head and a vision encoder beside clones of the receiver's files or links, with an index of all, and the config.

    Either may be empty. ``origin`` is that of ``describe_head``, and ``card`` ends the model card.
    """
    linked = receiver.model_map | receiver.head_map
    linked = receiver.names.split(linked)[0] if head else linked
    weight_map = dict(linked)
    for file, tensors in ((HEAD_FILE, head), (TOWER_FILE, tower)):
        if tensors:
            save(folder / file, tensors)
            weight_map.update(dict.fromkeys(tensors, file))
    _link_files(receiver, folder, {*linked.values()})
    metadata = receiver.read_json(INDEX_FILE).get("metadata", {}) if INDEX_FILE in receiver.files else {}
    if "total_size" in metadata:
        metadata["total_size"] = n_bytes(receiver.tensors(linked))
        metadata["total_size"] += sum(w.nbytes for w in (*head.values(), *tower.values()))
    write_index(folder, weight_map, metadata)
    check_written(folder, head | tower, weight_map)
    if head:
        config.update(quantization_beside(config, head))
        describe_head(config, origin, next(iter(head.values())).dtype, None, separate=True)
    (folder / "config.json").write_text(json.dumps(config, indent=4) + "\n")
    with (folder / "README.md").open("a", encoding="utf-8") as f:
        f.write(card)


def _link_files(source: CheckpointReader, folder: Path, weights: Collection[str]) -> None:
    """Clone or link these of a checkpoint's weights, and copy its other files. Existing files stay."""
    for name in {name for name in source.files if "/" not in name and not name.endswith(".safetensors")}.union(weights):
        file = source.path / name
        target = folder / name
        if not file.is_file() or target.exists():
            continue
        target.parent.mkdir(exist_ok=True)
        if file.suffix == ".safetensors":
            if subprocess.run([*CLONE, str(file.resolve()), str(target)], capture_output=True).returncode == 0:
                continue
            target.unlink(missing_ok=True)  # that cp leaves where the file system has no copy on write
            with suppress(OSError):  # another disk, or no support for links
                os.link(file.resolve(), target)  # files of the hub's cache are links
                warn_once(
                    f"The weights are hard links: a program that writes into these files also changes {source.name}."
                )
                continue
        shutil.copy(file, target)


# The model card

USAGE = """
## Multi-token prediction

This checkpoint keeps the model's MTP head. mlx_mtp uses it to generate the same text faster. Install mlx_mtp
(see its README), then:

```sh
mlx_mtp generate --mtp --model {name} --prompt 'Write a binary search in Python.'
```

mlx-lm 0.32.0 and later loads the checkpoint and ignores the head.
"""
IMAGES = """
## Images

This checkpoint keeps the model's vision encoder:

```sh
mlx_mtp generate --mtp --model {name} --image picture.png --prompt 'What is this?'
```
"""


def write_card(folder: Path, original: Path, base_model: str | None, usage: str, takes_images: bool) -> None:
    """Write the model card. mlx-lm's function asks the hub for the base model's even if it is in the cache."""
    card = ModelCard.from_template(ModelCardData(language="en"))
    try:
        card = ModelCard.load(original) if original.exists() else card
    except (ValueError, YAMLError) as e:  # a conversion does not fail because of its card
        log.warning(f"[WARNING] {original} is ignored, because it cannot be read: {' '.join(str(e).split())}")
    data: Any = card.data
    data.library_name = "mlx"
    data.pipeline_tag = "image-text-to-text" if takes_images else "text-generation"
    tags = data.tags or []
    data.tags = tags if "mlx" in tags else [*tags, "mlx"]
    if base_model is not None:
        data.base_model = base_model
    card.text = usage
    card.save(folder / "README.md")
