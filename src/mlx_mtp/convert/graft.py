"""``mlx_mtp.convert --graft-mtp-from``: add an original's MTP head to a conversion without one."""

from pathlib import Path

import mlx.core as mx
from huggingface_hub.utils import TensorInfo

from ..checkpoint.beside import write_config, write_weights
from ..checkpoint.config import Config, check_config, first_difference
from ..checkpoint.head_formats import check_head, load_tensors
from ..checkpoint.hub import fetch
from ..checkpoint.output import atomic_directory, check_new
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.skeleton import skeleton
from ..models.mtp import sanitize_head, split_head
from ..models.protocol import MTPModel
from .acceptance import check_acceptance
from .card import USAGE

DTYPES = ("BF16", "F16", "F32")


def graft(
    mtp_from: str,
    model: str,
    target: Path,
    *,
    mtp_revision: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    skip_check: bool = False,
    name: str | None = None,
) -> None:
    """Add the MTP head of an original to a conversion of it, whose weights are hard-linked, or else copied, unchanged.

    From a repository on the hub this downloads only the head's bytes, and the headers of their files.

    Args:
        mtp_from (str): The path or the huggingface repository of the original.
        model (str): The path or the huggingface repository of the conversion.
        target (Path): The folder to write, which appears when it is complete.
        dtype (str, optional): Cast the head to it. Default: ``None``, the original's.
        skip_check (bool): Do not run the model to check that the head is its own. Default: ``False``.
        name (str, optional): What the model card calls the new checkpoint. Default: ``None``, its folder.

    Raises:
        FileNotFoundError: A checkpoint or one of its files is missing.
        ValueError: The target exists, or the head does not fit or is another model's; nothing is written then.
    """
    check_new(target)
    donor, receiver = (
        CheckpointReader(mtp_from, mtp_revision),
        CheckpointReader(str(fetch(model, revision)), None, False),
    )
    config, donor_config = check_config(receiver.config, model), check_config(donor.config, mtp_from)
    tensors = _fitting_head(donor, donor_config, receiver, config, model)
    raw = donor.has_raw_head(tensors)

    with atomic_directory(target) as folder:
        print("[INFO] Reading the head")
        head = _to_parameters(skeleton(config, model), _read(donor, tensors, folder), raw, dtype)
        write_weights(folder, receiver, head)
        write_config(
            folder, config, head, donor_config.get("mlx_mtp") or {"source": mtp_from, "revision": donor.revision}
        )
        with (folder / "README.md").open("a") as f:
            f.write(USAGE.format(name=name or target))
        if not skip_check:
            check_acceptance(folder, mtp_from, model)


def _fitting_head(
    donor: CheckpointReader, donor_config: Config, receiver: CheckpointReader, config: Config, model: str
) -> dict[str, TensorInfo]:
    """The tensors of the donor's head, or a ValueError if it has none that fits the model."""
    tensors = donor.head()
    if not tensors:
        raise ValueError(f"{donor.name} has no MTP head to graft: name the original that {model} was converted from.")
    check_head(donor.name, donor_config, donor.weight_map)
    if difference := first_difference(donor_config, config) or _vocabulary_difference(donor, receiver):
        raise ValueError(f"The MTP head of {donor.name} does not fit {model}: {difference}.")
    if any(name.endswith(".scales") or t.dtype not in DTYPES for name, t in tensors.items()):
        raise ValueError(f"The MTP head of {donor.name} is quantized: graft the original's, in bfloat16.")
    return tensors


def _vocabulary_difference(donor: CheckpointReader, receiver: CheckpointReader) -> str:
    ours, theirs = receiver.first("embed_tokens.weight"), donor.first("embed_tokens.weight")
    if ours is None or theirs is None or ours.shape[0] == theirs.shape[0]:
        return ""
    return f"its vocabulary has {theirs.shape[0]} rows, not {ours.shape[0]}"


def _read(donor: CheckpointReader, tensors: dict[str, TensorInfo], folder: Path) -> dict[str, mx.array]:
    """The head's tensors; those of a folder are read when they are used."""
    weights: dict[str, mx.array] = {}
    if donor.folder is not None:
        for file in {donor.weight_map[name] for name in tensors}:
            weights.update(load_tensors(donor.folder / file))
    else:
        donor.save(tensors, part := folder / "part.safetensors")
        weights = load_tensors(part)
        mx.eval(weights)
        part.unlink()
    return split_head({name: weights[name] for name in tensors})[1]


def _to_parameters(model: MTPModel, head: dict[str, mx.array], raw: bool, dtype: str | None) -> dict[str, mx.array]:
    """Bring a head's tensors to the names, shapes and values of the model's parameters."""
    head = sanitize_head(model.mtp, head, raw)
    if dtype is not None:
        head = {name: w.astype(getattr(mx, dtype)) for name, w in head.items()}
    return {model.head_prefix + name: w for name, w in head.items()}
