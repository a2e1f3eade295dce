"""What a fit writes: a checkpoint with links to the backbone's files and one of the head, or an adapter in mlx-lm's layout."""

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

from ..checkpoint.config import Config, check_config, read_json
from ..checkpoint.head_formats import load_tensors
from ..checkpoint.output import atomic_directory, save, write_config, write_weights
from ..checkpoint.reader import CheckpointReader
from ..layers.drafting import ROUTERS

SCALE = 20.0  # mlx-lm's
USAGE = """
## Fitted MTP head

The MTP head of this checkpoint was trained with `mlx_mtp fit` for this backbone, which is
{model} without changes. The model generates the same text.

- Trained on: {trained_on}
- Measured on: {measured_on}

```
{table}
```
{adapter}
To restore the original head: `mlx_mtp convert --graft-mtp-from {original} --model {name} --mlx-path NEW`.
"""
WITH_ADAPTER = """
It was fitted on top of the adapter {adapter}: generate with `--adapter-path {adapter}`.
"""


def write_checkpoint(
    target: Path, source: Path, model: Any, name: str, adapter_path: str | None, record: dict[str, Any], table: str
) -> None:
    """Write the folder, which appears when it is complete.

    Args:
        source (Path): The folder of the fitted model.
        name (str): The model's name.
        record (Dict[str, Any]): The data of the fit.
        table (str): The acceptance before and after.
    """
    reader = CheckpointReader(str(source), None, False)
    config: Config = check_config(reader.config, name)
    fetched = model.fetched_head
    own = {"source": name, "revision": reader.revision}
    origin = config.get("mlx_mtp") or (own if fetched is None else fetched.record)
    parameters: Any = tree_flatten(model.mtp.parameters())
    head = {model.head_prefix + path: w for path, w in parameters}
    with atomic_directory(target) as folder:
        write_weights(folder, reader, head)
        config["mlx_mtp_fit"] = record
        write_config(folder, config, head, origin)
        with (folder / "README.md").open("a", encoding="utf-8") as card:
            card.write(
                USAGE.format(
                    model=name,
                    name=target,
                    original=origin.get("source") or name,
                    table=table,
                    adapter="" if adapter_path is None else WITH_ADAPTER.format(adapter=adapter_path),
                    **record,
                )
            )


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
