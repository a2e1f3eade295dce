"""The places and layouts of MTP heads in checkpoints.

A head is among the model's tensors, in a separate file named in config.json, or in a drafter: a folder with only a head. In the
Hugging Face layout ("raw") its norms are stored without the 1 that MLX's layout adds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.utils import TensorInfo
from mlx.utils import tree_flatten

from ..layers.mtp import sanitize_head, split_head
from ..models.protocol import MTPModel
from .config import Config, first_difference, read_json, text_config_of
from .storage.hub import fetch
from .storage.tensors import WEIGHTS, tensor_names

DRAFTER = "qwen3_5_mtp"  # the model type of a drafter, as in mlx-vlm
EXTRA_TENSORS = "mlx_lm_extra_tensors"  # the config's key for files other than the model's
FEW_BITS = 4


@dataclass(frozen=True)
class SeparateHead:
    """A head that is not among the model's tensors.

    Args:
        weights (Dict[str, mx.array]): Its tensors, under names without ``mtp.``.
        raw (bool, optional): Whether it is in the Hugging Face layout. ``None``: it has the layout of the backbone.
        metadata (Mapping[str, str]): The metadata of the file.
    """

    weights: dict[str, mx.array]
    raw: bool | None
    metadata: Mapping[str, str]

    def is_raw(self, name: str, config: Config, raw_backbone: bool) -> bool:
        """Whether it is in the Hugging Face layout, given the layout of the backbone."""
        if self.raw is not None:
            return self.raw
        return is_raw_head_file(name, config, raw_backbone, self.weights, self.metadata)


def check_head(name: str, config: Config, tensors: Iterable[str]) -> None:
    """Raise a ValueError if a checkpoint has no MTP head among its tensors; the message has the fix."""
    text_config = text_config_of(config)
    if text_config.get("mtp_use_dedicated_embeddings"):
        raise ValueError(
            f"The MTP head of {name} has its own embeddings, which is not supported: generate with --no-mtp."
        )
    _, head = split_head(dict.fromkeys(tensors))
    if head:
        return
    fix = (
        'load it with mtp="auto", which fetches its base model\'s head, add that head with `mlx_mtp convert --graft-mtp-from '
        f"BASE_MODEL --model {name} --mlx-path NEW`, or generate with --no-mtp."
    )
    if text_config.get("mtp_num_hidden_layers"):
        raise ValueError(f"The config of {name} claims an MTP head, but its weights have none: {fix}")
    raise ValueError(f"{name} has no MTP head: {fix}")


def check_shapes(model: MTPModel, head: Mapping[str, TensorInfo]) -> int | None:
    """Check that a head's tensors, named without ``mtp.``, fit a model. Return the fewest bits of a quantized tensor.

    Raises:
        ValueError: Tensors are missing, unknown or of the wrong shape.
    """
    # Zeros that are never evaluated take no memory.
    weights = sanitize_head(model.mtp, {name: mx.zeros(t.shape) for name, t in head.items()}, False)
    mtp: nn.Module = model.mtp
    parameters = dict(tree_flatten(mtp.parameters()))
    bits = [
        32 * weights[name].shape[-1] // p.shape[-1]
        for name, p in parameters.items()
        if name.removesuffix("weight") + "scales" in weights
    ]
    return min(bits, default=None)


def head_file_of(name: str, config: Config) -> str | None:
    """The separate file that the config names for the head.

    Raises:
        ValueError: The file is outside the checkpoint's folder.
    """
    extra = config.get(EXTRA_TENSORS)
    file = extra.get("mtp_file") if isinstance(extra, dict) else None
    if file is None:
        return None
    if not isinstance(file, str) or PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
        raise ValueError(
            f"The config of {name} names {file!r} as the file of its MTP head, which is not in its folder."
        )
    return file


def is_raw_head_file(
    name: str, config: Config, raw_backbone: bool, head: Iterable[str], metadata: Mapping[str, str]
) -> bool:
    """Whether a head in a separate file is in the Hugging Face layout, so that 1 must be added to its norms.

    Conversions by this package record it in config.json. Otherwise the file has the layout of the backbone, except that a file
    from PyTorch, or with experts named as in an original, may have either layout beside a converted backbone. The values of the
    norms do not help: they can be near 0 or near 1 in both layouts.

    Raises:
        ValueError: The layout cannot be determined.
    """
    record = config.get("mlx_mtp")
    if isinstance(record, dict) and isinstance(record.get("norms_shifted"), bool):
        return not record["norms_shifted"]
    if raw_backbone:
        return True
    if metadata.get("format") == "pt" or any(".experts." in tensor for tensor in head):
        raise ValueError(
            f"The MTP head of {name} is in a separate file that looks like the base model's, but the weights are converted: "
            "whether its norms are shifted is unknown. Graft the base model's: `mlx_mtp convert --graft-mtp-from BASE_MODEL "
            f"--model {name} --mlx-path NEW`."
        )
    return False


def load_head_file(file: Path) -> SeparateHead:
    """Load a head from a separate file."""
    weights, metadata = mx.load(str(file), return_metadata=True)
    assert isinstance(weights, dict)
    assert isinstance(metadata, dict)
    return SeparateHead(split_head(weights)[1], None, metadata)


def load_drafter(drafter: str, name: str, config: Config) -> SeparateHead:
    """Load the head of a drafter in mlx-vlm's layout, for the model with this name and config.

    As in mlx-vlm, the names of its tensors imply the layout: ``mtp.norm.weight`` is raw, ``norm.weight`` is converted.
    """
    path = fetch(drafter, None)
    own = read_json(path / "config.json") if (path / "config.json").exists() else {}
    if own.get("model_type") != DRAFTER:
        raise ValueError(
            f"{drafter} is not a drafter: its model type is {own.get('model_type')}, not {DRAFTER}. To use its head, graft "
            f"it: `mlx_mtp convert --graft-mtp-from {drafter} --model {name} --mlx-path NEW`."
        )
    if difference := first_difference(own.get("text_config", {}), text_config_of(config)):
        raise ValueError(f"The drafter {drafter} does not fit {name}: {difference}.")
    tensor_names(path)
    weights: dict[str, mx.array] = {}
    for file in path.glob(WEIGHTS):
        weights.update(load_tensors(file))
    raw = any(tensor.startswith("mtp.") for tensor in weights)
    return SeparateHead({tensor.removeprefix("mtp."): w for tensor, w in weights.items()}, raw, {})


def load_tensors(file: Path) -> dict[str, mx.array]:
    """The tensors of a safetensors file, which MLX reads when they are used."""
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    return weights


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


def few_bits_warning(head_of: str, bits: int, model: str) -> str:
    """A warning about a head of few bits, with the command that fixes it."""
    return (
        f"the MTP head of {head_of} is quantized to {bits} bits, so the model may reject most drafts. Add the base model's "
        f"head: `mlx_mtp convert --graft-mtp-from BASE_MODEL --model {model} --mlx-path NEW`."
    )
