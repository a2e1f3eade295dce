"""Sources of drafts beside the head: what of a text's next tokens is known without a pass of a model.

To add one, write a file with a class like ``Source`` and a function that makes it for a sequence, and put that into
``SOURCES``. Which source drafts, and how much, ``depth.Depth`` decides, by the acceptance that each expects and by the time
that its steps take.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor

from ..text.grammar import ForcedTokens, Grammar
from .options import DraftOptions
from .prompt_lookup import PromptLookup


class Source(Protocol):
    """
    Attributes:
        name (str): Of its plans.
        fixed (int, optional): Draft this many tokens wherever there are some; ``None`` has the depth choose.
    """

    name: str
    fixed: int | None

    def observe(self, tokens: Sequence[int]) -> None:
        """Take decided tokens as the host learns of them."""
        ...

    def acceptance(self, n_unobserved: int) -> list[float]:
        """The probability that each draft is accepted given that those before it are; empty where there is none now.

        Args:
            n_unobserved (int): The number of decided tokens that ``observe`` was not given yet.
        """
        ...

    def propose(self, k: int, n_unobserved: int) -> tuple[mx.array, list[Any]]:
        """
        Args:
            k (int): The number of drafts that the step has room for.
            n_unobserved (int): As for ``acceptance``.

        Returns:
            Tuple[mx.array, List[None]]: Up to k drafts for the tokens after the unread ones; and ``None`` for each, which is
            proposed with probability one.
        """
        ...


def prompt_lookup(options: DraftOptions, text: Sequence[int], processors: Sequence[LogitsProcessor]) -> Source | None:
    n = options.copy_drafts
    return None if n == "off" else PromptLookup(text, None if n == "auto" else n)


def grammar(options: DraftOptions, text: Sequence[int], processors: Sequence[LogitsProcessor]) -> Source | None:
    return next((ForcedTokens(p) for p in processors if isinstance(p, Grammar)), None)


# Each by what a text asks, its prompt, and its logits processors.
MakeSource = Callable[[DraftOptions, Sequence[int], Sequence[LogitsProcessor]], Source | None]
SOURCES: list[MakeSource] = [prompt_lookup, grammar]


def make_sources(
    options: DraftOptions, text: Sequence[int], processors: Sequence[LogitsProcessor] = ()
) -> dict[str, Source]:
    """The sources of a sequence whose prompt is read, by name."""
    made = [make(options, text, processors) for make in SOURCES]
    return {source.name: source for source in made if source is not None}
