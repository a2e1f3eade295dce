"""The layouts of MTP heads, and whether a head can be used. In Hugging Face's ("raw"), norms lack the 1 that MLX's adds."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ...core.models.head_weights import check_quantized, is_head, norms_of, sanitize_head
from ...errors import MTPError
from ..config import Config, check_config, family_in, first_difference, skeleton, text_config_of
from ..reader import CheckpointReader, Tensor, Tensors, fetch_checkpoint, is_copy

RUNTIME = "mtplx_runtime.json"  # MTPLX's settings beside config.json
# The keys of config.json and RUNTIME that tell the encoding of the head's norms, and the values that mean without the 1.
ENCODINGS = ("mtplx_mtp_norm_encoding", "mtp_norm_encoding", "norm_encoding", "norm_weight_encoding")
WITHOUT_ONE = ("delta", "delta_plus_one", "mlx_delta")
DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U32": mx.uint32}  # MLX has others as uint8


class Head(NamedTuple):
    source: CheckpointReader
    weights: dict[str, mx.array]  # under names without a prefix; MLX reads a tensor when it is used
    raw: bool  # whether it is in the Hugging Face layout
    norms: dict[str, mx.array]  # those of ``weights``, which are empty once the model has them


def check_head(checkpoint: CheckpointReader) -> None:
    """Raise an error if a checkpoint has no MTP head, or it cannot be used; the message has the fix."""
    name = checkpoint.name
    text_config = text_config_of(checkpoint.config or {})
    for parameter, own in checkpoint.head_copies.items():
        if not is_copy(checkpoint, parameter):
            raise MTPError(f"The MTP head of {name} has its own {own}, other than the model's: generate with --no-mtp.")
    if head := checkpoint.head():
        check_shapes(checkpoint, head)
        return
    fix = (
        'load it with mtp="auto", which fetches its base model\'s head, add that head with `mlx_mtp convert --graft-mtp-from '
        f"BASE_MODEL --model {name} --mlx-path NEW`, or generate with --no-mtp."
    )
    if text_config.get("mtp_num_hidden_layers"):
        raise MTPError(f"The config of {name} claims an MTP head, but its weights have none: {fix}")
    raise MTPError(f"{name} has no MTP head: {fix}")


def check_shapes(checkpoint: CheckpointReader, head: Tensors) -> None:
    """Raise an MTPError if tensors of a head for a checkpoint are missing, unknown or of the wrong shape."""
    model = skeleton(check_config(checkpoint.config, checkpoint.name), checkpoint.name)
    # Zeros that are never evaluated take no memory.
    own = checkpoint.names.split(head)[1]
    zeros = {n: mx.zeros(t.shape, DTYPES.get(str(t.dtype), mx.uint8)) for n, t in own.items()}
    check_quantized(model.mtp, sanitize_head(model, zeros, False))


def read_head(source: CheckpointReader) -> Head:
    files = {file: load_tensors(source.path / file) for file in {*source.head_map.values()}}
    weights = source.names.split({name: files[file][name] for name, file in source.head_map.items()})[1]
    return Head(source, weights, has_raw_head(source), norms_of(weights))


def first_tensor(checkpoint: CheckpointReader, suffix: str | None) -> Tensor | None:
    """Describe the backbone's first tensor whose name has this suffix, if any, among the files that exist."""
    own = checkpoint.names.split(checkpoint.model_map)[0].items() if suffix is not None else ()
    first = next(((name, file) for name, file in own if name.endswith(suffix or "") and checkpoint.has(file)), None)
    return None if first is None else checkpoint.tensors(dict([first]))[first[0]]


def has_raw_backbone(checkpoint: CheckpointReader) -> bool | None:
    """Whether it is in the Hugging Face layout; ``None`` if no tensor tells."""
    family = family_in(checkpoint.config)
    convolution = None if family is None else first_tensor(checkpoint, family.convolution)
    return (
        None if family is None or convolution is None else family.is_raw({str(family.convolution): convolution.shape})
    )


def has_raw_head(checkpoint: CheckpointReader) -> bool:
    """Whether a checkpoint's head is in the Hugging Face layout, so that 1 must be added to its norms."""
    record = (checkpoint.config or {}).get("mlx_mtp")
    if isinstance(record, dict) and isinstance(record.get("norms_shifted"), bool):
        return not record["norms_shifted"]
    runtime = checkpoint.read_json(RUNTIME) if RUNTIME in checkpoint.files else None
    if encodings := [*_encodings(checkpoint.config), *_encodings(runtime)]:
        return any(encoding.strip().lower() in WITHOUT_ONE for encoding in encodings)
    if checkpoint.names.marker in checkpoint.head_map:  # without a prefix, as in mlx-vlm's drafters
        return False
    family = family_in(checkpoint.config)
    if family is not None and family.convolution is None:
        return False
    if has_raw_backbone(checkpoint) is not False:
        return True
    # A head in a file of its own beside a converted backbone may have either layout: this is a guess. The values of the norms
    # can be near 0 or near 1 in both, but only the right ones make drafts that the model accepts, see ``acceptance.py``.
    own_files = checkpoint.head_files
    from_torch = any(checkpoint.header(file).metadata.get("format") == "pt" for file in own_files)
    return from_torch or (bool(own_files) and any(".experts.0." in tensor for tensor in checkpoint.head_map))


def _encodings(config: Any) -> Iterator[str]:
    for key, value in config.items() if isinstance(config, dict) else ():
        if key in ENCODINGS and isinstance(value, str):
            yield value
        yield from _encodings(value)


def fetch_drafter(drafter: str, checkpoint: CheckpointReader) -> CheckpointReader:
    """Fetch a drafter for a checkpoint. Raise an MTPError if it is none, or its head cannot be used."""
    name = checkpoint.name
    reader = fetch_checkpoint(drafter)
    own = reader.config or {}
    family = family_in(checkpoint.config)
    if family is None or own.get("model_type") != (wanted := family.drafter):
        raise MTPError(
            f"{drafter} is not a drafter: its model type is {own.get('model_type')}, not {wanted}. To use its head, graft "
            f"it: `mlx_mtp convert --graft-mtp-from {drafter} --model {name} --mlx-path NEW`."
        )
    if difference := first_difference(own.get("text_config", {}), text_config_of(checkpoint.config or {})):
        raise MTPError(f"The drafter {drafter} does not fit {name}: {difference}.")
    check_shapes(checkpoint, reader.head())
    return reader


def load_tensors(file: Path) -> dict[str, mx.array]:
    """The tensors of a safetensors file, which MLX reads when they are used."""
    weights: Any = mx.load(str(file))
    return dict(weights)


def quantization_beside(config: Config, head: Iterable[str]) -> Config:
    """The changes to a config for a head from another file. For a quantized one mlx-lm needs any entry."""
    if isinstance(quantization := config.get("quantization"), dict):
        kept = {key: value for key, value in quantization.items() if not is_head(key)}
        return {"quantization": kept, "quantization_config": kept}
    if any(name.endswith(".scales") for name in head):
        return {"quantization": {"group_size": 64, "bits": 4}}
    return {}


def head_bits(mtp: nn.Module) -> int | None:
    """The fewest bits that a layer of the head is quantized to."""
    return min((m.bits for _, m in mtp.named_modules() if hasattr(m, "bits")), default=None)
