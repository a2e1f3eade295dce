"""``mlx_mtp.convert --inspect``: what a checkpoint is and whether its head can be used, from config and headers alone."""

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoint.hub import INDEX_FILE, Checkpoint, Tensor
from ..checkpoint.load import (
    FEW_BITS,
    check_config,
    check_head,
    few_bits,
    is_raw_file,
    own_head_file,
    skeleton,
    tensor_names,
)
from ..models.mtp import sanitize_head, split_head


def inspect(path_or_hf_repo: str, revision: str | None = None) -> str:
    """
    Describe a checkpoint. Of a repository on the hub no weights are downloaded.

    Returns:
        str: Model type, quantization of the backbone, the head's tensors, what ``--mtp`` would say, memory of the head.

    Raises:
        FileNotFoundError: It is not there, or one of its files is missing.
        ValueError: One of its files is damaged.
    """
    checkpoint = Checkpoint(path_or_hf_repo, revision)
    config = checkpoint.config
    if config is None:
        raise FileNotFoundError(f"{path_or_hf_repo} is not a model: it has no config.json.")
    head_file = own_head_file(path_or_hf_repo, config)
    weight_map = checkpoint.weight_map(head_file)
    if checkpoint.folder is not None:
        tensor_names(checkpoint.folder, head_file)
    names = split_head({name: name for name in weight_map})[1].values()
    head = checkpoint.tensors(names, weight_map)
    samples = [[n for n in weight_map if n.endswith(end)][:1] for end in ("conv1d.weight", "embed_tokens.weight")]
    convolution, embedding = (list(checkpoint.tensors(n, weight_map).values()) for n in samples)
    raw_backbone = any(t.shape[-1] != 1 for t in convolution)
    raw_head: bool | None = raw_backbone
    verdict = "ready"
    try:
        check_config(config, path_or_hf_repo)
        check_head(path_or_hf_repo, config, weight_map)
        if head_file is not None:
            raw_head = None
            raw_head = is_raw_file(path_or_hf_repo, config, raw_backbone, head, checkpoint.header(head_file)[1])
        bits = _check_shapes(skeleton(config, path_or_hf_repo), head)
        if bits is not None and bits <= FEW_BITS:
            verdict = "ready, but " + few_bits(path_or_hf_repo, bits, path_or_hf_repo)
    except ValueError as e:
        verdict = str(e)

    lines = [
        ("Model", path_or_hf_repo + (f" at {checkpoint.revision}" if checkpoint.revision else "")),
        ("Model type", str(config.get("model_type"))),
        ("Backbone", f"{_quantization(config, embedding)}, {_layout(raw_backbone)}"),
        ("Size", _size(_total_size(checkpoint, weight_map))),
    ]
    if head:
        n_bytes = sum(t.nbytes for t in head.values())
        where = f" in {head_file}" if head_file is not None else ""
        lines.append(("MTP head", f"{len(head)} tensors{where}, {_size(n_bytes)}, {_layout(raw_head)}"))
        lines += [("", row) for row in _table(head)]
    else:
        lines.append(("MTP head", "none"))
    lines.append(("--mtp", verdict))
    if verdict.startswith("ready"):
        lines.append(
            ("Memory", f"{_size(n_bytes)} for the head, and {_bytes_a_token(config):,} bytes a token of context")
        )
    return "\n".join(f"{key + ':' if key else '':<12}{value}" for key, value in lines)


def _check_shapes(model: nn.Module, head: dict[str, Tensor]) -> int | None:
    """What loading would say of the head's tensors; returns the fewest bits of a quantized one."""
    # Zeros that are never evaluated take no memory.
    zeros = split_head({name: mx.zeros(t.shape) for name, t in head.items()})[1]
    weights = sanitize_head(model.mtp, zeros, False)
    parameters: Any = tree_flatten(model.mtp.parameters())
    bits = [
        32 * weights[name].shape[-1] // p.shape[-1]
        for name, p in parameters
        if name.removesuffix("weight") + "scales" in weights
    ]
    return min(bits, default=None)


def _table(head: dict[str, Tensor]) -> list[str]:
    """A line for each tensor, and one for all experts of a kind."""
    kinds: dict[tuple, list[Tensor]] = {}
    for name, t in head.items():
        kinds.setdefault((re.sub(r"\.experts\.\d+\.", ".experts.*.", name), t.dtype, t.shape), []).append(t)
    width = max(len(name) for name, _, _ in kinds)
    return [
        f"{name:<{width}}  {dtype:>5}  {sum(t.nbytes for t in tensors):>13,} bytes  {list(shape)}"
        + (f" x {len(tensors)}" if len(tensors) > 1 else "")
        for (name, dtype, shape), tensors in kinds.items()
    ]


def _quantization(config: dict[str, Any], embedding: list[Tensor]) -> str:
    quantization = config.get("quantization") or config.get("quantization_config")
    if not quantization:
        return f"not quantized ({embedding[0].dtype})" if embedding else "not quantized"
    if "bits" not in quantization:
        return f"quantized ({quantization.get('quant_method')})"
    own = sum(isinstance(value, dict) for value in quantization.values())
    return (
        f"{quantization['bits']} bits in groups of {quantization['group_size']} ({quantization.get('mode', 'affine')})"
        + (f", {own} modules otherwise" if own else "")
    )


def _layout(raw: bool | None) -> str:
    if raw is None:
        return "raw or converted, which cannot be told"
    return "raw (norms to be shifted)" if raw else "converted (norms shifted)"


def _total_size(checkpoint: Checkpoint, weight_map: dict[str, str]) -> int:
    if INDEX_FILE in checkpoint.files:
        metadata = checkpoint.read_json(INDEX_FILE).get("metadata") or {}
        if isinstance(metadata.get("total_size"), int):
            return metadata["total_size"]
    return sum(t.nbytes for file in set(weight_map.values()) for t in checkpoint.header(file)[0].values())


def _bytes_a_token(config: dict[str, Any]) -> int:
    """Keys and values of the head's one layer, in 16 bits."""
    text_config = config.get("text_config", config)
    return 2 * 2 * text_config["num_key_value_heads"] * text_config["head_dim"]


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.2f} MB"
