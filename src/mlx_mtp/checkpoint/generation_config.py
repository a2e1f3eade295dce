"""generation_config.json: a model's default sampling parameters."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..distributed.ranks import Ranks, from_rank_0
from .config import read_json
from .storage.hub import fetch

FILE = "generation_config.json"
# The lowest and the highest value of each field.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "top_k": (0, math.inf),
    "min_p": (0, 1),
}


@dataclass(frozen=True)
class Sampling:
    """Default sampling parameters. Without values they are mlx-lm's: the most likely token."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __str__(self) -> str:
        values = {name: value for name, value in asdict(self).items() if value != getattr(Sampling, name)}
        return ", ".join(f"{name} {value}" for name, value in values.items()) or "temperature 0"


def sampling_defaults(name: str, given: Mapping[str, float | None], ranks: Ranks | None = None) -> Sampling:
    """The sampling of a model: the given values, then its generation_config.json, then mlx-lm's defaults.

    Args:
        name (str): The model's path or repository.
        given (Mapping[str, float]): The user's values, by the names of ``Sampling``.
        ranks (Ranks, optional): The ranks that run the model; rank 0 reads the file for all.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: A value from the file is out of range.
    """
    own = {field: value for field, value in given.items() if value is not None}
    if own.keys() == RANGES.keys():
        return Sampling(**own)  # type: ignore[arg-type]
    return from_rank_0(ranks, lambda: Sampling(**{**_read(fetch(name, None, weights=()) / FILE, own), **own}))


def _read(file: Path, own: Mapping[str, float]) -> dict[str, Any]:
    """The file's values of parameters that the user has not set. As in transformers, ``do_sample`` implies temperature 1."""
    content = read_json(file) if file.exists() else {}
    if content.get("do_sample") is False:
        return {}
    values: dict[str, Any] = {"temperature": 1.0} if content.get("do_sample") else {}
    values |= {field: content[field] for field in RANGES.keys() - own.keys() if content.get(field) is not None}
    for field, value in values.items():
        low, high = RANGES[field]
        kinds = (int,) if field == "top_k" else (int, float)
        if type(value) not in kinds or not (low <= value <= high and value < math.inf):
            flag = "--temp" if field == "temperature" else f"--{field.replace('_', '-')}"
            allowed = f"a number of {low} or more" if high == math.inf else f"a number from {low} to {high}"
            raise ValueError(f"{file}: {field} must be {allowed}, not {value!r}: correct it, or give {flag}.")
    return values
