"""The published models: their originals, conversions and sizes, by the names that people type."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .config import Config, text_config_of

TABLE = Path(__file__).with_name("catalog.toml")


@dataclass(frozen=True)
class Published:
    """A published model.

    Args:
        name (str): As people type it, such as ``qwen3.6-27b-4bit``.
        original (str): The repository with its weights, head and tower.
        conversion (str): A repository with its 4-bit weights for MLX.
        disk_gb (float): The size of a conversion with the head, in GB of 10^9 bytes.
        memory_gb (int): The memory of the smallest Mac to run it, in GB.
        layers (int): The number of the backbone's layers.
        hidden_size (int): H.
    """

    name: str
    original: str
    conversion: str
    disk_gb: float
    memory_gb: int
    layers: int
    hidden_size: int


@cache
def published() -> dict[str, Published]:
    """All of catalog.toml, by name."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {name: Published(name, **row) for name, row in rows.items()}


def originals_like(name: str, config: Config) -> list[str]:
    """The originals with the sizes of a config whose name is part of a checkpoint's, the longest name first."""
    text, key = text_config_of(config), _key(name)
    sizes = text.get("num_hidden_layers"), text.get("hidden_size")
    fitting = {m.original for m in published().values() if (m.layers, m.hidden_size) == sizes}
    named = [original for original in fitting if _key(original.rpartition("/")[2]) in key]
    return sorted(named, key=len, reverse=True)


def _key(name: str) -> str:
    """A name without case and separators, which conversions write differently."""
    return "".join(c for c in name.lower() if c.isalnum())
