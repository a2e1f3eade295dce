"""``mlx_mtp convert --graft-mtp-from`` and ``--graft-vision-from``: add a base model's head or vision encoder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoint import output
from ..checkpoint.config import Config, check_config, skeleton
from ..checkpoint.heads.acceptance import FLOOR, Reading, best_of, key_of, known, measure_readings, told_by, with_ones
from ..checkpoint.heads.formats import first_tensor, has_raw_head, load_tensors
from ..checkpoint.heads.originals import check_method, copy_image_settings, copy_tensors, fitting_head, fitting_tower
from ..checkpoint.hub import HEAD_FILE
from ..checkpoint.load import load
from ..checkpoint.reader import CheckpointReader, Tensors, fetch_checkpoint, tower_tensors
from ..core.models.head_weights import in_files, norms_of, sanitize_head
from ..errors import MTPError
from ..images.tower import PREFIX, Vision, VisionArgs, make_tower, settings_of, split_tower


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
    name: str | None = None,  # in the card
) -> None:
    """Add the head, the vision encoder or both of an original to a conversion, whose weights are cloned, linked or copied."""
    check_method(CheckpointReader(model, revision))
    receiver = fetch_checkpoint(model, revision)
    config = check_config(receiver.config, model)
    origin = Config()
    head = dict[str, mx.array]()
    tower = dict[str, mx.array]()
    with output.atomic_directory(target) as folder:
        if vision_from is not None:
            if tower_tensors(receiver):
                raise MTPError(f"{model} has a vision encoder already.")
            seeing = CheckpointReader(vision_from, original_revision)
            tensors = fitting_tower(seeing, receiver)
            config |= settings_of(seeing.config or {})
            copy_image_settings(seeing, folder)
            Vision(folder, config, []).processor  # noqa: B018 (raises where the settings do not fit)
            print("[INFO] Reading the vision encoder")
            weights = split_tower(_read(seeing, tensors, folder))[1]
            tower = named_tower(make_tower(VisionArgs.from_dict(config["vision_config"]), weights))
        if mtp_from is not None:
            donor = CheckpointReader(mtp_from, original_revision)
            stored, told = _head(donor, receiver, config, dtype, folder)
            head = _as_parameters(stored, told, config, receiver.name)
            origin = (donor.config or {}).get("mlx_mtp") or {"source": donor.name, "revision": donor.revision}
        usage = (output.USAGE * bool(head) + output.IMAGES * bool(tower)).format(name=name or target)
        output.write_beside(folder, receiver, config, head, tower, origin, usage)
        if mtp_from is not None and not skip_check:
            best = check_acceptance(folder, norms_of(stored), told, mtp_from, model)
            if best != told:
                head = _as_parameters(stored, best, config, receiver.name)
                output.save(folder / HEAD_FILE, head)
                output.check_written(folder, head, dict.fromkeys(head, HEAD_FILE))


def _head(
    donor: CheckpointReader, receiver: CheckpointReader, config: Config, dtype: str | None, folder: Path
) -> tuple[dict[str, mx.array], Reading]:
    """Read a head. Return its tensors with the names of ``MTPModule``, and the reading of its norms, which are as stored."""
    tensors = fitting_head(donor, receiver)
    ours, theirs = (first_tensor(reader, "embed_tokens.weight") for reader in (receiver, donor))
    if ours is not None and theirs is not None and ours.shape[0] != theirs.shape[0]:
        difference = f"its vocabulary has {theirs.shape[0]} rows, not {ours.shape[0]}"
        raise MTPError(f"{donor.name} does not fit {receiver.name}: {difference}.")
    print("[INFO] Reading the head")
    weights = donor.names.split(_read(donor, tensors, folder))[1]
    measured = known(key_of(donor, donor))
    model = skeleton(config, receiver.name)
    head = sanitize_head(model, weights, raw=False)
    if dtype is not None:
        head = {n: w.astype(getattr(mx, dtype)) if mx.issubdtype(w.dtype, mx.floating) else w for n, w in head.items()}
    if measured is None or measured.reading is None:
        return head, told_by(model.family.shifts_norms and has_raw_head(donor))
    return head, measured.reading


def _as_parameters(head: Mapping[str, mx.array], reading: Reading, config: Config, name: str) -> dict[str, mx.array]:
    """The parameters of a model for a head whose norms are read in this way."""
    return in_files(skeleton(config, name), {**head, **with_ones(norms_of(head), reading)})


def named_tower(tower: nn.Module) -> dict[str, mx.array]:
    parameters: Any = tree_flatten(tower.parameters())
    return {PREFIX + path: w for path, w in parameters}


def _read(donor: CheckpointReader, tensors: Tensors, folder: Path) -> dict[str, mx.array]:
    copy_tensors(donor, tensors, part := folder / "part.safetensors")
    weights = load_tensors(part)
    mx.eval(weights)
    part.unlink()
    return weights


def check_acceptance(folder: Path, norms: Mapping[str, mx.array], told: Reading, mtp_from: str, model: str) -> Reading:
    """The reading of the grafted head's norms whose drafts are accepted; an MTPError if nearly all are rejected."""
    print("[INFO] Checking the head on built-in text")
    try:
        with output.naming(folder, model):
            loaded, tokenizer = load(str(folder), lazy=True)
        rates = measure_readings(loaded, tokenizer, norms, told)
    except RuntimeError as e:
        raise MTPError(f"{model} cannot be run here ({e}): --skip-check skips the check of its head.") from e
    best = best_of(rates, told)
    if rates[best] < FLOOR:
        raise MTPError(
            f"The model accepts {rates[best]:.0%} of the drafts of the head of {mtp_from} on built-in text, and at least "
            f"{FLOOR:.0%} of its own head's: nothing was written. Graft from the base model that {model} was converted from."
        )
    print(f"[INFO] Drafts accepted on built-in text: {rates[best]:.0%}")
    return best
