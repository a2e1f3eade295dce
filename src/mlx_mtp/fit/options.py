"""The options of a fit, their defaults and their limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cli.flags import check_limits
from ..core.pacing.depth import MAX_DRAFT_TOKENS
from ..errors import MTPError
from ..files import check_source

SHORTEST = 32  # tokens of a text: half of it is the prompt of a measurement
LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("iters", "batch_size", "steps_per_eval", "answers", "max_tokens"), (1, math.inf)),
    **dict.fromkeys(("temp", "seed"), (0, math.inf)),
    "max_seq_length": (SHORTEST, math.inf),
    "drafts": (1, MAX_DRAFT_TOKENS),
}


@dataclass(frozen=True)
class FitOptions:
    corpus: Sequence[str | Path] | None = None  # files of text like the future output, also of ``mlx_lm.lora``
    prompts: str | Path | None = None  # a file of prompts, without a corpus; None: built-in ones
    drafts: int = 4  # to train and measure at each position
    iters: int = 500
    batch_size: int = 4  # texts in an iteration
    learning_rate: float = 1e-4  # AdamW's highest
    max_seq_length: int = 512  # tokens to cut texts into; of longer answers the end is used
    steps_per_eval: int = 50  # iterations between validations
    answers: int = 8  # to each prompt
    max_tokens: int = 256  # of an answer, and of a measured continuation
    temp: float = 0.7  # of the answers
    seed: int = 0  # for dividing and ordering the texts

    def check(self) -> None:
        if self.corpus is not None and self.prompts is not None:
            raise MTPError("Choose either --corpus or --prompts, not both.")
        check_limits(vars(self), LIMITS)
        if self.learning_rate <= 0:
            raise MTPError(f"--learning-rate must be more than 0, not {self.learning_rate}.")
        for file in self.corpus or ():
            check_source(Path(file), "--corpus")
        if self.prompts is not None:
            check_source(Path(self.prompts), "--prompts")
