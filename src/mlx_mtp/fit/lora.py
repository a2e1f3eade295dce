"""A low-rank adapter of the head, in mlx-lm's layout: ``mlx_mtp.load(..., adapter_path=)`` applies it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from ..checkpoint.config import read_json
from ..checkpoint.head_formats import load_tensors
from ..checkpoint.storage.output import atomic_directory, save
from ..layers.draft_lm_head import ROUTERS

SCALE = 20.0  # mlx-lm's


@dataclass(frozen=True)
class Lora:
    """An adapter of the head, and the backbone's adapter that is written with it.

    Args:
        rank (int): The rank of both.
        beside (str, optional): The folder of the backbone's adapter.
    """

    rank: int
    beside: str | None

    @cached_property
    def scale(self) -> float:
        """
        Raises:
            ValueError: The backbone's adapter is not LoRA, or has another rank: the two share a file and its parameters.
        """
        if self.beside is None:
            return SCALE
        config = read_json(Path(self.beside) / "adapter_config.json")
        if config.get("fine_tune_type", "lora") != "lora":
            raise ValueError(f"--lora-rank writes the adapter {self.beside} too, which is not LoRA: omit --lora-rank.")
        parameters = config["lora_parameters"]
        if parameters["rank"] != self.rank:
            raise ValueError(
                f"--lora-rank must be that of {self.beside}, {parameters['rank']}, not {self.rank}: both are written in one."
            )
        return float(parameters["scale"])

    def parameters(self, keys: Iterable[str]) -> dict[str, Any]:
        """mlx-lm's ``lora_parameters`` for these modules."""
        return {"rank": self.rank, "scale": self.scale, "dropout": 0.0, "keys": sorted(keys)}


def add_lora(mtp: nn.Module, lora: Lora) -> None:
    """Freeze a head, and add trainable adapters to its linear layers except routers."""
    mtp.freeze()
    keys = {
        name
        for name, module in mtp.named_modules()
        if isinstance(module, nn.Linear | SwitchLinear) and not name.endswith(ROUTERS)
    }
    linear_to_lora_layers(mtp, 0, lora.parameters(keys))


def write_adapter(target: Path, model: Any, lora: Lora, record: dict[str, Any]) -> None:
    """Write the adapter of a fitted head; ``record`` describes the fit."""
    weights: Any = {} if lora.beside is None else load_tensors(Path(lora.beside) / "adapters.safetensors")
    trained: Any = tree_flatten(model.mtp.trainable_parameters())
    weights.update({model.head_prefix + name: w for name, w in trained})
    keys = {name.rpartition(".")[0] for name in weights}
    # The keys are whole paths, so mlx-lm need not count layers.
    config = {
        "fine_tune_type": "lora",
        "num_layers": 0,
        "lora_parameters": lora.parameters(keys),
        "mlx_mtp_fit": record,
    }
    with atomic_directory(target) as folder:
        save(folder / "adapters.safetensors", weights)
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
