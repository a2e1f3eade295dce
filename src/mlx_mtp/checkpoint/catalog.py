"""The published models: their names for ``--model``, originals, conversions and sizes."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from ..errors import MTPFileNotFoundError
from ..memory import GB, Needs, Sizes
from .config import Config, text_config_of

TABLE = Path(__file__).with_name("catalog.toml")


@dataclass(frozen=True)
class Published:
    """A published model; sizes are in GB of 10^9 bytes."""

    name: str  # for --model, such as qwen3.6-27b-4bit
    original: str  # the repository with its weights, head and tower; for a model without a head, the one with its head
    conversion: str  # a repository with its weights for MLX, quantized to the bits of the name
    disk_gb: float  # these weights with the head
    head_gb: float  # in 16 bits
    memory_gb: int  # of the smallest Mac to run it
    layers: int
    hidden_size: int
    attention_layers: int  # of the backbone
    row_values: int  # numbers of a token in the cache of an attention layer
    ngrams_gb: float = 0.0  # of disk_gb, the n-gram table, which stays in its files
    takes_images: bool = True  # whether the original has a vision encoder that its family takes
    others: Sequence[str] = ()  # replacements of 4bit in the names of conversions with more bits

    @property
    def base(self) -> str:
        return self.name.rpartition("-")[0]

    @property
    def conversions(self) -> dict[str, str]:
        """The repositories of the conversions, by their names for ``--model``."""
        others = {f"{self.base}-{bits}": self.conversion.removesuffix("4bit") + bits for bits in self.others}
        return {self.base: self.conversion, self.name: self.conversion, **others}

    def has_sizes_of(self, config: Config) -> bool:
        text = text_config_of(config)
        return (text.get("num_hidden_layers"), text.get("hidden_size")) == (self.layers, self.hidden_size)

    def needs(self, n_tokens: int) -> Needs:
        """The memory of the model with a text: its files, and 16-bit keys and values."""
        n = self.row_values
        sizes = Sizes(value_bytes=2, backbone_values=self.attention_layers * n, head_values=n)
        head = int(self.head_gb * GB)
        return Needs(weights=int((self.disk_gb - self.ngrams_gb) * GB) - head, head=head, caches=sizes.caches(n_tokens))


@cache
def published() -> dict[str, Published]:
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {name: Published(name, **row) for name, row in rows.items()}


def originals_like(name: str, config: Config) -> list[str]:
    """The originals of published models of a config's sizes whose name is part of a checkpoint's, the longest name first."""
    key = _key(name)
    fitting = [m for m in published().values() if m.has_sizes_of(config) and _key(m.base) in key]
    return [m.original for m in sorted(fitting, key=lambda m: len(m.base), reverse=True)]


def conversion_like(name: str) -> str | None:
    """The published conversion for MLX whose name is part of a checkpoint's, by its name for ``--model``."""
    fitting = [m.base for m in published().values() if _key(m.base) in _key(name)]
    return max(fitting, key=len, default=None)


def resolve(name: str) -> str:
    """The repository of a published model, such as ``qwen3.6-27b-8bit``; names of folders and repositories as they are."""
    if "/" in name or name in (".", "..") or Path(name).exists():
        return name
    by_name = {short: repository for m in published().values() for short, repository in m.conversions.items()}
    if (repository := by_name.get(name.lower())) is not None:
        return repository
    same = [short for m in published().values() if name.lower().startswith(m.base) for short in m.conversions]
    near = same or get_close_matches(name.lower(), by_name, 3)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise MTPFileNotFoundError(
        f"{name} is neither a folder nor the name of a repository, nor a published model. {hint}`mlx_mtp models` lists them."
    )


def _key(name: str) -> str:
    """A name in lower case without separators, which differ between conversions."""
    return "".join(c for c in name.lower() if c.isalnum())
