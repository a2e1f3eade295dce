"""The places and layouts of MTP heads in checkpoints.

A head is among the model's tensors, in a separate file named in config.json, or in a drafter: a folder with only a head. In the
Hugging Face layout ("raw") its norms are stored without the 1 that MLX's layout adds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.utils import TensorInfo
from mlx.utils import tree_flatten

from ..models import MODEL_TYPES, drafter_of, model_module
from ..models.head_weights import sanitize_head, split_head
from .config import Config, check_config, first_difference, skeleton, text_config_of
from .hub import fetch
from .reader import CheckpointReader

FEW_BITS = 4


@dataclass(frozen=True)
class SeparateHead:
    """A head that is not among the model's tensors."""

    weights: dict[str, mx.array]  # under names without "mtp."
    raw: bool  # whether it is in the Hugging Face layout


def check_head(checkpoint: CheckpointReader) -> None:
    """Raise an error if a checkpoint has no MTP head among its tensors; the message has the fix."""
    name, text_config = checkpoint.name, text_config_of(checkpoint.config or {})
    if text_config.get("mtp_use_dedicated_embeddings"):
        raise ValueError(
            f"The MTP head of {name} has its own embeddings, which is not supported: generate with --no-mtp."
        )
    if checkpoint.head():
        return
    fix = (
        'load it with mtp="auto", which fetches its base model\'s head, add that head with `mlx_mtp convert --graft-mtp-from '
        f"BASE_MODEL --model {name} --mlx-path NEW`, or generate with --no-mtp."
    )
    if text_config.get("mtp_num_hidden_layers"):
        raise ValueError(f"The config of {name} claims an MTP head, but its weights have none: {fix}")
    raise ValueError(f"{name} has no MTP head: {fix}")


def check_shapes(checkpoint: CheckpointReader, head: Mapping[str, TensorInfo]) -> int | None:
    """Raise a ValueError if tensors of a head for a checkpoint are missing, unknown or of the wrong shape. Return the fewest
    bits of a quantized one."""
    mtp = skeleton(check_config(checkpoint.config, checkpoint.name), checkpoint.name).mtp
    # Zeros that are never evaluated take no memory.
    weights = sanitize_head(mtp, {name: mx.zeros(t.shape) for name, t in split_head(head)[1].items()}, False)
    parameters: Any = tree_flatten(mtp.parameters())
    shapes = {name: p.shape for name, p in parameters}
    quantized = [name for name in shapes if name.removesuffix("weight") + "scales" in weights]
    return min((32 * weights[name].shape[-1] // shapes[name][-1] for name in quantized), default=None)


def load_head_file(checkpoint: CheckpointReader) -> SeparateHead | None:
    """Load a checkpoint's head from a separate file, if its config names one."""
    if checkpoint.head_file is None:
        return None
    weights = split_head(load_tensors(checkpoint.path / checkpoint.head_file))[1]
    return SeparateHead(weights, has_raw_head(checkpoint, weights))


def first_tensor(checkpoint: CheckpointReader, suffix: str) -> TensorInfo | None:
    """Describe the first tensor whose name has this suffix, among the files that exist."""
    names = [name for name, file in checkpoint.weight_map.items() if name.endswith(suffix) and checkpoint.has(file)][:1]
    return next(iter(checkpoint.tensors(names).values()), None)


def has_raw_backbone(checkpoint: CheckpointReader) -> bool:
    """Whether the backbone is in the Hugging Face layout."""
    convolution = first_tensor(checkpoint, "conv1d.weight")
    return convolution is not None and convolution.shape[-1] != 1


def has_raw_head(checkpoint: CheckpointReader, head: Iterable[str]) -> bool:
    """Whether the head with these tensors is in the Hugging Face layout, so that 1 must be added to its norms.

    It has the layout of the backbone, except in a separate file. There, conversions by this package record it in
    config.json, and a file from PyTorch, or with experts named as in an original, may have either layout beside a
    converted backbone: a ValueError. The values of the norms can be near 0 or near 1 in both layouts.
    """
    raw = has_raw_backbone(checkpoint)
    if checkpoint.head_file is None:
        return raw
    record = (checkpoint.config or {}).get("mlx_mtp")
    if isinstance(record, dict) and isinstance(record.get("norms_shifted"), bool):
        return not record["norms_shifted"]
    from_torch = checkpoint.header(checkpoint.head_file).metadata.get("format") == "pt"
    is_unknown = not raw and (from_torch or any(".experts." in tensor for tensor in head))
    if is_unknown and shifts_norms(checkpoint):
        raise ValueError(
            f"The MTP head of {checkpoint.name} is in a separate file that looks like the base model's, but the weights are "
            "converted: whether its norms are shifted is unknown. Graft the base model's: `mlx_mtp convert "
            f"--graft-mtp-from BASE_MODEL --model {checkpoint.name} --mlx-path NEW`."
        )
    return raw


def shifts_norms(checkpoint: CheckpointReader) -> bool:
    """Whether the layouts of a checkpoint's family differ in its norms."""
    model_type = (checkpoint.config or {}).get("model_type")
    return model_type not in MODEL_TYPES or model_module(model_type).Model.shifts_norms


def load_drafter(drafter: str, checkpoint: CheckpointReader) -> SeparateHead:
    """Load the head of a drafter in mlx-vlm's layout, for a checkpoint.

    As in mlx-vlm, the names of its tensors imply the layout: ``mtp.norm.weight`` is raw, ``norm.weight`` is converted.
    """
    name, reader = checkpoint.name, CheckpointReader(drafter, folder=fetch(drafter, None))
    own = reader.config or {}
    if own.get("model_type") != (wanted := drafter_of((checkpoint.config or {})["model_type"])):
        raise ValueError(
            f"{drafter} is not a drafter: its model type is {own.get('model_type')}, not {wanted}. To use its head, graft "
            f"it: `mlx_mtp convert --graft-mtp-from {drafter} --model {name} --mlx-path NEW`."
        )
    if difference := first_difference(own.get("text_config", {}), text_config_of(checkpoint.config or {})):
        raise ValueError(f"The drafter {drafter} does not fit {name}: {difference}.")
    weights: dict[str, mx.array] = {}
    for file in set(reader.weight_map.values()):
        weights.update(load_tensors(reader.path / file))
    raw = any(tensor.startswith("mtp.") for tensor in weights)
    return SeparateHead({tensor.removeprefix("mtp."): w for tensor, w in weights.items()}, raw)


def load_tensors(file: Path) -> dict[str, mx.array]:
    """The tensors of a safetensors file, which MLX reads when they are used."""
    weights: Any = mx.load(str(file))
    return dict(weights)


def quantization_beside(config: Config, head: Iterable[str]) -> Config:
    """The changes to a config for a head from another file; mlx-lm detects its quantization from its tensors.

    Entries for the replaced head are dropped. If only the head is quantized, mlx-lm still needs an entry, which then applies to
    no module.
    """
    if isinstance(quantization := config.get("quantization"), dict):
        kept = {key: value for key, value in quantization.items() if not is_head(key)}
        return {"quantization": kept, "quantization_config": kept}
    if any(name.endswith(".scales") for name in head):
        return {"quantization": {"group_size": 64, "bits": 4}}
    return {}


def is_head(path: str) -> bool:
    """Whether this parameter or module of a model belongs to its head."""
    return path.startswith(("mtp.", "language_model.mtp."))


def head_bits(mtp: nn.Module) -> int | None:
    """The fewest bits that a layer of the head is quantized to."""
    return min((m.bits for _, m in mtp.named_modules() if hasattr(m, "bits")), default=None)


def few_bits_warning(head_of: str, bits: int | None, model: str) -> str | None:
    """A warning about a head of few bits, with the command that fixes it. ``None`` for more."""
    if bits is None or bits > FEW_BITS:
        return None
    return (
        f"the MTP head of {head_of} is quantized to {bits} bits, so the model may reject most drafts. Add the base model's "
        f"head: `mlx_mtp convert --graft-mtp-from BASE_MODEL --model {model} --mlx-path NEW`."
    )
