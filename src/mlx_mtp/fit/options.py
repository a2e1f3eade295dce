"""The options of ``mlx_mtp fit``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..cli.parser import check_limits
from ..core.pacing import MAX_DRAFT_TOKENS
from ..errors import MTPError
from ..files import check_source

SHORTEST = 32  # tokens of a text: half of it is the prompt of a measurement


def option(default: float, help: str, low: float, high: float = math.inf) -> Any:
    """A field with a flag, whose values are from low to high."""
    return field(default=default, metadata={"help": help, "limits": (low, high)})


@dataclass(frozen=True)
class FitOptions:
    corpus: Sequence[str | Path] | None = None  # files of text like the future output, also of ``mlx_lm.lora``
    prompts: str | Path | None = None  # a file of prompts, without a corpus; None: built-in ones
    answers: int = option(8, "Number of answers to each prompt.", 1)
    max_tokens: int = option(256, "Maximum number of tokens of an answer, and of a measured text.", 1)
    temp: float = option(0.7, "Sampling temperature of the answers.", 0)
    # Of longer answers the end is used.
    max_seq_length: int = option(512, "Cut texts into pieces of this many tokens.", SHORTEST)
    drafts: int = option(4, "Number of drafts to train and measure at each position.", 1, MAX_DRAFT_TOKENS)
    iters: int = option(500, "Iterations to train for.", 1)
    batch_size: int = option(4, "Minibatch size.", 1)
    learning_rate: float = option(1e-4, "AdamW's highest learning rate.", 0)
    steps_per_eval: int = option(50, "Number of training steps between validations.", 1)
    seed: int = option(0, "The PRNG seed, for dividing and ordering the texts.", 0)

    def check(self) -> None:
        if self.corpus is not None and self.prompts is not None:
            raise MTPError("Choose either --corpus or --prompts, not both.")
        check_limits(vars(self), {f.name: f.metadata["limits"] for f in fields(self) if f.metadata})
        if self.learning_rate <= 0:
            raise MTPError(f"--learning-rate must be more than 0, not {self.learning_rate}.")
        for file in self.corpus or ():
            check_source(Path(file), "--corpus")
        if self.prompts is not None:
            check_source(Path(self.prompts), "--prompts")
