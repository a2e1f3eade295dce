"""Sources of drafts other than the head, which need no pass of a model.

To add a source, write a file with a class like ``Source`` and a function that makes it for a sequence, and add the function to
``SOURCES``. ``depth.Depth`` chooses the source and the number of drafts, by the acceptance rates of each source and by the
times of its steps.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from ..text.grammar import ForcedTokens, Grammar
from .draft_options import TextOptions
from .prompt_lookup import PromptLookup


class Source(Protocol):
    """
    Attributes:
        name (str): The name in ``Plan.source``.
        fixed (int, optional): The number of tokens to draft whenever it has drafts; ``None`` lets the depth choose.
    """

    name: str
    fixed: int | None

    def observe(self, tokens: Sequence[int]) -> None:
        """Observe decided tokens when the host learns them."""
        ...

    def acceptance(self, n_unobserved: int) -> list[float]:
        """The probability that each draft is accepted, given that the drafts before it are; empty without drafts.

        Args:
            n_unobserved (int): The number of decided tokens that ``observe`` has not received yet.
        """
        ...

    def propose(self, k: int, n_unobserved: int) -> tuple[mx.array, list[Any]]:
        """
        Args:
            k (int): The most drafts to make.
            n_unobserved (int): As for ``acceptance``.

        Returns:
            Tuple[mx.array, List[None]]: Up to k drafts for the tokens after the unobserved ones; and a record of ``None`` for
            each, for a proposal with probability one.
        """
        ...


def prompt_lookup(options: TextOptions, text: Sequence[int]) -> Source | None:
    n = options.copy_drafts
    return None if n == "off" else PromptLookup(text, None if n == "auto" else n)


def grammar(options: TextOptions, text: Sequence[int]) -> Source | None:
    return next((ForcedTokens(p) for p in options.logits_processors or () if isinstance(p, Grammar)), None)


# Makes a source from the options and the prompt of a text; ``None`` if it does not apply.
MakeSource = Callable[[TextOptions, Sequence[int]], Source | None]
SOURCES: list[MakeSource] = [prompt_lookup, grammar]


def make_sources(options: TextOptions, text: Sequence[int]) -> dict[str, Source]:
    """Make the sources of a text whose prompt is prefilled, by name."""
    if options.keeps_state:
        return {}
    made = [make(options, text) for make in SOURCES]
    return {source.name: source for source in made if source is not None}
