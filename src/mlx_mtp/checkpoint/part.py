"""The parts of a checkpoint and of a model for one of several ranks: a share of each layer, or in a pipeline some layers.

Tensors are read when they are used, so a rank reads only what it keeps. A stage also downloads only the files with its layers.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..core.distributed import Ranks
from ..core.models import MODULES, family_of
from ..core.models.family import Family, HeadNames
from ..core.models.head_weights import head_names
from ..core.models.mixin import MTPModel
from ..core.models.shard import check_pipeline, check_shard
from ..errors import MTPError
from ..images.tower import split_tower
from .config import check_config, skeleton
from .hub import WEIGHTS
from .reader import CheckpointReader

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def make_ranks(
    tensor_group: mx.distributed.Group | None, pipeline_group: mx.distributed.Group | None, adapter_path: str | None
) -> Ranks | None:
    """The ranks that run the model together; ``None`` for one process. Raises an MTPError for arguments that exclude ranks."""
    if tensor_group is not None and pipeline_group is not None:
        raise MTPError("tensor_group and pipeline_group cannot be combined.")
    group = tensor_group or pipeline_group
    if group is None or group.size() == 1:
        return None
    if adapter_path is not None:
        raise MTPError("Adapters are not supported on several machines: fuse it first with `mlx_lm.fuse`.")
    if pipeline_group is not None and group.size() != mx.distributed.init().size():
        raise MTPError("pipeline_group must have all processes: mlx-lm's pipelines use the global group.")
    return Ranks(group)


def divide(checkpoint: CheckpointReader, ranks: Ranks, is_pipeline: bool) -> range | None:
    """The layers of this rank's stage of a pipeline; ``None`` for a share of each layer. An MTPError if it is impossible."""
    config = checkpoint.config or {}
    if "model_type" in config and config["model_type"] not in MODULES:
        raise MTPError(
            f"Model type {config['model_type']} does not run on several machines (supported: {', '.join(MODULES)}): "
            "use `mlx_lm.chat` or `mlx_lm.server`."
        )
    model: Any = skeleton(check_config(checkpoint.config, checkpoint.name), checkpoint.name)
    if not is_pipeline:
        check_shard(model, ranks.size)
        return None
    check_pipeline(model, ranks.size)
    model.model.pipeline(ranks.group)
    return range(model.model.start_idx, model.model.end_idx)


def files_of(checkpoint: CheckpointReader, layers: range) -> list[str]:
    """The files of a stage with these layers."""
    family: Family = family_of((checkpoint.config or {})["model_type"])
    names = names_of(checkpoint.index, layers, checkpoint.names)
    if not any(map(family.tells_layout, names)):
        names += [name for name in checkpoint.index if family.tells_layout(name)][:1]
    return sorted({checkpoint.index[name] for name in names}) or [WEIGHTS]


def own_weights(weights: Mapping[str, mx.array], layers: range, model: MTPModel) -> dict[str, mx.array]:
    """The tensors that a stage with these layers keeps, and those that tell the layout of the checkpoint."""
    names = {*names_of(weights, layers, head_names(model))}
    return {name: w for name, w in weights.items() if name in names or model.family.tells_layout(name)}


def names_of(names: Collection[str], layers: range, of_heads: HeadNames) -> list[str]:
    """The tensors of these layers and those outside of layers, but not the vision encoder's, which no rank needs."""
    language, _ = split_tower(dict.fromkeys(names))
    backbone, _ = of_heads.split(language)
    elsewhere = {name for name in backbone if (match := LAYER.search(name)) and int(match[1]) not in layers}
    return [name for name in language if name not in elsewhere]


def shard(model: Any, ranks: Ranks) -> None:
    check_shard(model, ranks.size)  # again: quantized weights can only be divided between their groups
    model.shard(ranks.group)


def evaluate(model: Any) -> None:
    """Read the model's weights one layer or array at a time, to limit the memory of those that are cast or dropped."""
    for layer in model.layers:
        mx.eval(layer.parameters())
    others: Any = tree_flatten(model.parameters())
    for _, p in others:
        mx.eval(p)
    lm_head = model.draft_settings.lm_head if isinstance(model, MTPModel) else None
    # The graph of the random numbers of new layers, which their weights have replaced, would grow with each model.
    mx.eval([] if lm_head is None else lm_head.layers[0].parameters(), mx.random.state)
