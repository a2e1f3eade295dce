"""Sources of drafts beside the head: what of a text's next tokens is known without a pass of a model.

To add one, write a file with a class like ``Source`` and a function that makes it for a sequence, and put that into
``SOURCES``. Which source drafts, and how much, ``depth.Depth`` decides, by the acceptance that each expects and by the time
that its steps take.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from .copies import CopyDrafter
from .options import DraftOptions


class Source(Protocol):
    """
    Attributes:
        name (str): Of its plans.
        fixed (int, optional): Draft this many tokens wherever there are some; ``None`` has the depth choose.
    """

    name: str
    fixed: int | None

    def read(self, tokens: Sequence[int]) -> None:
        """Take decided tokens as the host learns of them."""
        ...

    def acceptance(self, n_unread: int) -> list[float]:
        """The probability that each draft is accepted given that those before it are; empty where there is none now.

        Args:
            n_unread (int): The number of decided tokens that ``read`` was not given yet.
        """
        ...

    def propose(self, k: int, n_unread: int) -> tuple[mx.array, list[Any]]:
        """k drafts [k] for the tokens after the unread ones; and ``None`` for each, which is proposed with probability one."""
        ...


def copies(options: DraftOptions, text: Sequence[int]) -> Source | None:
    n = options.copy_drafts
    return None if n == "off" else CopyDrafter(text, None if n == "auto" else n)


SOURCES: list[Callable[[DraftOptions, Sequence[int]], Source | None]] = [
    copies
]  # each by what a text asks, and its text


def make_sources(options: DraftOptions, text: Sequence[int]) -> dict[str, Source]:
    """The sources of a sequence whose prompt is read, by name."""
    made = [make(options, text) for make in SOURCES]
    return {source.name: source for source in made if source is not None}
