"""``mlx_mtp convert --graft-mtp-from`` and ``--graft-vision-from``: add a base model's head or vision encoder."""

from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub.utils import TensorInfo
from mlx.utils import tree_flatten

from ..checkpoint.config import Config, check_config, first_difference, skeleton
from ..checkpoint.fetched import CHECK_TOKENS, FLOOR, is_quantized, measure_acceptance
from ..checkpoint.head_formats import check_head, load_tensors
from ..checkpoint.hub import fetch
from ..checkpoint.load import load
from ..checkpoint.originals import copy_tensors
from ..checkpoint.output import atomic_directory, check_new, naming, write_config, write_weights
from ..checkpoint.reader import CheckpointReader
from ..images.tower import PREFIX, VisionArgs, make_tower, split_tower
from ..images.vision import CONFIG_FILES, Vision, settings_of
from ..layers.mtp import sanitize_head, split_head
from ..models.protocol import MTPModel
from .output import IMAGES, USAGE


def graft(
    model: str,
    target: Path,
    *,
    mtp_from: str | None = None,
    vision_from: str | None = None,
    original_revision: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    skip_check: bool = False,
    name: str | None = None,
) -> None:
    """Add the MTP head, the vision encoder or both of an original to one of its conversions.

    The conversion's weights are hard-linked or, if that is not possible, copied. Only the tensors to add and the headers of
    their files are downloaded from the hub.

    Args:
        target (Path): The folder to write, which appears when it is complete.
        original_revision (str, optional): A revision of both originals.
        dtype (str, optional): Cast the head to it. Default: ``None``, the base model's.
        name (str, optional): The new checkpoint's name in its model card. Default: ``None``, its folder.

    Raises:
        FileNotFoundError: A checkpoint or one of its files is missing.
        ValueError: The target exists, or the head or the tower does not fit or is from another model. Nothing is written.
    """
    check_new(target)
    receiver = CheckpointReader(str(fetch(model, revision)), None, False)
    config, origin = check_config(receiver.config, model), Config()
    head, tower = dict[str, mx.array](), dict[str, mx.array]()
    with atomic_directory(target) as folder:
        if vision_from is not None:
            tower = _tower(CheckpointReader(vision_from, original_revision, False), receiver, config, model, folder)
        if mtp_from is not None:
            donor = CheckpointReader(mtp_from, original_revision)
            head, origin = _head(donor, receiver, config, model, dtype, folder)
        write_weights(folder, receiver, head, tower)
        write_config(folder, config, head, origin)
        with (folder / "README.md").open("a") as f:
            f.write((USAGE * bool(head) + IMAGES * bool(tower)).format(name=name or target))
        if mtp_from is not None and not skip_check:
            check_acceptance(folder, mtp_from, model)


def _head(
    donor: CheckpointReader, receiver: CheckpointReader, config: Config, model: str, dtype: str | None, folder: Path
) -> tuple[dict[str, mx.array], Config]:
    """Read a head. Return its tensors as parameters of the model, and the record of its origin."""
    donor_config = check_config(donor.config, donor.name)
    tensors = _fitting_head(donor, donor_config, receiver, config, model)
    raw = donor.has_raw_head(tensors)
    print("[INFO] Reading the head")
    weights = split_head(_read(donor, tensors, folder))[1]
    origin = donor_config.get("mlx_mtp") or {"source": donor.name, "revision": donor.revision}
    return _to_parameters(skeleton(config, model), weights, raw, dtype), origin


def _tower(
    donor: CheckpointReader, receiver: CheckpointReader, config: Config, model: str, folder: Path
) -> dict[str, mx.array]:
    """Read a tower, write its image settings, and update the config. Return its tensors, named as in MLX conversions.

    Raises:
        ValueError: There is no tower, it does not fit, or the conversion has one.
    """
    donor_config, tensors = check_config(donor.config, donor.name), donor.tower()
    if not tensors or not isinstance(donor_config.get("vision_config"), dict):
        raise ValueError(
            f"{donor.name} has no vision encoder to graft: name the base model that {model} was converted from."
        )
    if receiver.tower():
        raise ValueError(f"{model} has a vision encoder already.")
    if difference := first_difference(donor_config, config):
        raise ValueError(f"The vision encoder of {donor.name} does not fit {model}: {difference}.")
    config |= settings_of(donor_config)
    for file in CONFIG_FILES:
        if file in donor.files:
            (folder / file).write_bytes(donor.read(file))
    Vision(folder, config, []).processor  # noqa: B018 (raises where the settings do not fit)
    print("[INFO] Reading the vision encoder")
    weights = split_tower(_read(donor, tensors, folder))[1]
    tower = make_tower(VisionArgs.from_dict(config["vision_config"]), weights)
    parameters: Any = tree_flatten(tower.parameters())
    return {PREFIX + path: w for path, w in parameters}


def _fitting_head(
    donor: CheckpointReader, donor_config: Config, receiver: CheckpointReader, config: Config, model: str
) -> dict[str, TensorInfo]:
    """The tensors of the donor's head, or a ValueError if it has none that fits the model."""
    tensors = donor.head()
    if not tensors:
        raise ValueError(f"{donor.name} has no MTP head to graft: name the base model that {model} was converted from.")
    check_head(donor.name, donor_config, donor.weight_map)
    if difference := first_difference(donor_config, config) or _vocabulary_difference(donor, receiver):
        raise ValueError(f"The MTP head of {donor.name} does not fit {model}: {difference}.")
    if is_quantized(tensors):
        raise ValueError(f"The MTP head of {donor.name} is quantized: graft the base model's, in bfloat16.")
    return tensors


def _vocabulary_difference(donor: CheckpointReader, receiver: CheckpointReader) -> str:
    ours, theirs = receiver.first_tensor("embed_tokens.weight"), donor.first_tensor("embed_tokens.weight")
    if ours is None or theirs is None or ours.shape[0] == theirs.shape[0]:
        return ""
    return f"its vocabulary has {theirs.shape[0]} rows, not {ours.shape[0]}"


def _read(donor: CheckpointReader, tensors: dict[str, TensorInfo], folder: Path) -> dict[str, mx.array]:
    """Read some tensors. Tensors in a folder are read when they are used."""
    weights: dict[str, mx.array] = {}
    if donor.folder is not None:
        for file in {donor.weight_map[name] for name in tensors}:
            weights.update(load_tensors(donor.folder / file))
    else:
        copy_tensors(donor, tensors, part := folder / "part.safetensors")
        weights = load_tensors(part)
        mx.eval(weights)
        part.unlink()
    return {name: weights[name] for name in tensors}


def _to_parameters(model: MTPModel, head: dict[str, mx.array], raw: bool, dtype: str | None) -> dict[str, mx.array]:
    """Convert a head's tensors to the names, shapes and values of the model's parameters."""
    head = sanitize_head(model.mtp, head, raw)
    if dtype is not None:
        head = {name: w.astype(getattr(mx, dtype)) for name, w in head.items()}
    return {model.head_prefix + name: w for name, w in head.items()}


def check_acceptance(folder: Path, mtp_from: str, model: str) -> None:
    """Raise a ValueError if the model rejects nearly all drafts of the grafted head."""
    print("[INFO] Checking the head on built-in text")
    try:
        with naming(folder, model):
            loaded, tokenizer = load(str(folder))
        acceptance = measure_acceptance(loaded, tokenizer, CHECK_TOKENS)
    except RuntimeError as e:
        raise ValueError(f"{model} cannot be run here ({e}): --skip-check skips the check of its head.") from e
    if acceptance < FLOOR:
        raise ValueError(
            f"The model accepts {acceptance:.0%} of the drafts of the head of {mtp_from} on built-in text, and at least "
            f"{FLOOR:.0%} of its own head's: nothing was written. Graft from the base model that {model} was converted from."
        )
    print(f"[INFO] Drafts accepted on built-in text: {acceptance:.0%}")
