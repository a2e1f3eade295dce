"""A low-rank adapter of the head, in mlx-lm's layout: ``mlx_mtp.load(..., adapter_path=)`` applies it."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from ..checkpoint.config import read_json
from ..convert.output import atomic_directory, save
from ..models.draft_lm_head import ROUTERS

SCALE = 20.0  # mlx-lm's


def add_lora(model: Any, rank: int, scale: float) -> None:
    """Freeze a head and give its linear layers adapters to train, but not its routers."""
    model.mtp.freeze()
    keys = {
        name
        for name, module in model.mtp.named_modules()
        if isinstance(module, nn.Linear | SwitchLinear) and not name.endswith(ROUTERS)
    }
    linear_to_lora_layers(model.mtp, 0, {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys})


def scale_beside(adapter_path: str | None, rank: int) -> float:
    """The scale of an adapter of the head; beside one of the backbone, the two share a file, a rank and a scale.

    Raises:
        ValueError: The backbone's has another rank, or is not LoRA.
    """
    if adapter_path is None:
        return SCALE
    config = read_json(Path(adapter_path) / "adapter_config.json")
    if config.get("fine_tune_type", "lora") != "lora":
        raise ValueError(
            f"--lora-rank writes one adapter with that of {adapter_path}, which is not LoRA: omit --lora-rank."
        )
    parameters = config["lora_parameters"]
    if parameters["rank"] != rank:
        raise ValueError(
            f"--lora-rank writes one adapter with that of {adapter_path}, whose rank is {parameters['rank']}, not {rank}: use "
            f"--lora-rank {parameters['rank']}, or omit it."
        )
    return float(parameters["scale"])


def write_adapter(target: Path, model: Any, rank: int, scale: float, adapter_path: str | None, record: Any) -> None:
    """Write the head's adapter and, where there is one, the backbone's in one.

    Args:
        record (Dict[str, Any]): What it was fitted on.
    """
    weights: dict[str, mx.array] = {}
    if adapter_path is not None:
        weights.update(mx.load(str(Path(adapter_path) / "adapters.safetensors")))  # type: ignore[arg-type]
    weights.update({model.head_prefix + name: w for name, w in tree_flatten(model.mtp.trainable_parameters())})
    keys = sorted({name.rpartition(".")[0] for name in weights})
    config = {
        "fine_tune_type": "lora",
        "num_layers": 0,  # the keys name whole paths, and so no layers need be counted
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys},
        "mlx_mtp": record,
    }
    with atomic_directory(target) as folder:
        save(folder / "adapters.safetensors", weights)
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=4) + "\n")
