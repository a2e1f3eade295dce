"""The options of a fit, their defaults and their limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cli.flags import check_limits
from ..errors import MTPError
from ..files import check_source
from ..pacing.depth import MAX_DRAFT_TOKENS

SHORTEST = 32  # tokens of a text: half of it is the prompt of a measurement
LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("iters", "batch_size", "steps_per_eval", "answers", "max_tokens"), (1, math.inf)),
    **dict.fromkeys(("temp", "seed"), (0, math.inf)),
    "max_seq_length": (SHORTEST, math.inf),
    "drafts": (1, MAX_DRAFT_TOKENS),
}


@dataclass(frozen=True)
class FitOptions:
    """
    Args:
        corpus: Files of text like the future output, or ``.jsonl`` files of ``mlx_lm.lora``. Default: ``None``, prompts.
        prompts: A file of prompts between lines of three dashes, which the model answers first. Default: ``None``, built-in.
        drafts: The number of drafts to train and measure at each position. Default: ``4``.
        iters: Iterations to train for. Default: ``500``.
        batch_size: Texts in an iteration. Default: ``4``.
        learning_rate: AdamW's highest learning rate. Default: ``1e-4``.
        max_seq_length: Cut texts into pieces of this many tokens; use the end of longer answers. Default: ``512``.
        steps_per_eval: Iterations between validations; the best head is kept. Default: ``50``.
        answers: Answers to each prompt. Default: ``8``.
        max_tokens: The length of an answer, and of a measured continuation. Default: ``256``.
        temp: The temperature of the answers. Default: ``0.7``.
        seed: The seed for dividing and ordering the texts. Default: ``0``.
    """

    corpus: Sequence[str | Path] | None = None
    prompts: str | Path | None = None
    drafts: int = 4
    iters: int = 500
    batch_size: int = 4
    learning_rate: float = 1e-4
    max_seq_length: int = 512
    steps_per_eval: int = 50
    answers: int = 8
    max_tokens: int = 256
    temp: float = 0.7
    seed: int = 0

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
