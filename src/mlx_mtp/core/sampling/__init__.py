"""Samplers, noise by position, logits processors, and the acceptance of drafts."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

AcceptanceName = Literal["rejection", "coupled", "match"]


def _parameter(
    default: float,
    text: str,
    high: float = math.inf,
    argument: str | None = None,
    requested: tuple[float, float] | None = None,
) -> Any:
    """A field of ``Sampling`` with the help text of its flag and its highest value; the lowest is 0.

    Args:
        argument (str, optional): Its name in ``make_sampler`` and mlx-lm's flags. Default: the field's.
        requested (tuple, optional): The limits of requests. A number below 0 means 0 there. Default: those of all.
    """
    return field(
        default=default,
        metadata={"text": text, "high": high, "argument": argument, "requested": requested or (0, high)},
    )


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters, by their names in generation_config.json and in requests. This is the table of them: flags,
    the fields of both, ``make_sampler`` and the checks of their values follow it. The defaults are mlx-lm's: the most likely
    token.
    """

    temperature: float = _parameter(
        0.0, "Sampling temperature; 0 chooses the most likely token", argument="temp", requested=(0, 2)
    )
    top_p: float = _parameter(1.0, "Sampling top-p", 1)
    top_k: int = _parameter(0, "Sampling top-k; 0 is all tokens", requested=(-1, 2**31))
    min_p: float = _parameter(0.0, "Sampling min-p", 1)
    xtc_probability: float = _parameter(0.0, "Probability of XTC sampling to happen each next token", 1)
    xtc_threshold: float = _parameter(0.1, "Threshold the probs of each next token candidate to be sampled by XTC", 0.5)
    top_n_sigma: float = _parameter(
        0.0,
        "Sampling top-n-sigma, the deviations that a logit may be below the largest; 0 is off",
        requested=(-1, math.inf),
    )

    def __str__(self) -> str:
        values = {name: value for name, value in asdict(self).items() if value != getattr(Sampling, name)}
        return ", ".join(f"{name} {value}" for name, value in values.items()) or "temperature 0"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``make_sampler``."""
        return {argument: getattr(self, parameter.name) for argument, parameter in PARAMETERS.items()}


# The parameters by the arguments of ``make_sampler``, which are also mlx-lm's flags.
PARAMETERS = {parameter.metadata["argument"] or parameter.name: parameter for parameter in fields(Sampling)}


def fits(parameter: Any, value: float) -> bool:
    """Whether a field of ``Sampling`` may have this value."""
    return 0 <= value <= parameter.metadata["high"] and value < math.inf  # not nan


def limits_of(parameter: Any) -> str:
    high = parameter.metadata["high"]
    return "a number of 0 or more" if high == math.inf else f"a number from 0 to {high}"
