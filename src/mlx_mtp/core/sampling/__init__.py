"""Samplers, noise by position, logits processors, and the acceptance of drafts."""

from dataclasses import asdict, dataclass
from typing import Literal

AcceptanceName = Literal["rejection", "coupled", "match"]


@dataclass(frozen=True)
class Sampling:
    """Default sampling parameters, of generation_config.json. Without values they are mlx-lm's: the most likely token."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __str__(self) -> str:
        values = {name: value for name, value in asdict(self).items() if value != getattr(Sampling, name)}
        return ", ".join(f"{name} {value}" for name, value in values.items()) or "temperature 0"
