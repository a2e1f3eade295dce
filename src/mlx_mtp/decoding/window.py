"""What a pass of the backbone verifies, and what comes of it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from .sequence import Sequence
from .step_times import Plan

Token = tuple[int, mx.array, bool]  # a token, its log probabilities [V], and whether it was drafted
Records = list[list[Any]]  # what ``Acceptance.draft`` returned with each draft of each sequence

NO_TOKENS = mx.array([], mx.uint32)
NO_DRAFTS = mx.array([[]], mx.uint32)  # [1, 0], for any number of sequences


class Drafts(NamedTuple):
    """For the next window.

    Args:
        tokens (mx.array): [B, k]; ``NO_DRAFTS`` if there are none.
        records (List[List[Any]]): What ``Acceptance.draft`` returned with each; ``None`` for a copy.
        plans (List[Plan]): What was drafted for each sequence.
    """

    tokens: mx.array
    records: Records
    plans: list[Plan]


@dataclass
class Window:
    """What a pass verifies.

    Args:
        tokens (mx.array): The last decided token of each sequence, and drafts, [B, T].
        drafts (mx.array): [B, T - 1]
        records (List[List[Any]]): As in ``Drafts``.
        plans (List[Plan]): As in ``Drafts``.
        logits (mx.array): [B, T, V]
        hidden (mx.array): [B, T, H]
        kept (List[int]): How many of its tokens are final in each sequence: 0 until the first was handed over.
    """

    tokens: mx.array
    drafts: mx.array
    records: Records
    plans: list[Plan]
    logits: mx.array
    hidden: mx.array
    kept: list[int]

    @property
    def n_drafts(self) -> int:
        """The most drafts of any sequence."""
        return self.drafts.shape[1]


@dataclass
class Step:
    """What a window yielded.

    Args:
        sequences (List[Sequence]): Those of the window.
        window (Window): The window.
        choices (mx.array): The tokens that each sequence has decided on, [B, T]; the host may not know them yet.
        logprobs (mx.array, optional): Of sequences that are chosen together, [B, T, V].
        own_logprobs (Dict[int, List[mx.array]]): Of the others, by index, each [1, V].
        has_ended (List[bool]): Which sequences had ended before.
        n_accepted (List[int]): Drafts that each accepted.
        tokens (List[List[int]]): Of each sequence, once the host knows them.
    """

    sequences: list[Sequence]
    window: Window
    choices: mx.array
    logprobs: mx.array | None
    own_logprobs: dict[int, list[mx.array]]
    has_ended: list[bool]
    n_accepted: list[int]
    tokens: list[list[int]] | None = None

    def logprobs_of(self, b: int, t: int) -> mx.array:
        """Of sequence b's token t, [V]."""
        if b in self.own_logprobs:
            return self.own_logprobs[b][t].squeeze(0)
        assert self.logprobs is not None
        return self.logprobs[b, t]

    def n_decided(self, b: int) -> int:
        """The number of tokens that it decides of sequence b, none behind its end, from 1 on."""
        return 1 if self.tokens is None else max(len(self.tokens[b]), 1)
