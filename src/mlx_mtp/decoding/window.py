"""The records of a draft: ``Drafts``, the ``Window`` that verifies them, and the ``Step`` with the decided tokens."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..pacing.depth import Depth
from ..pacing.step_times import Plan
from .sequence import Sequence

Token = tuple[int, mx.array, bool]  # a token, its log probabilities [V], and whether it was drafted
Records = list[list[Any]]  # the record that ``Acceptance.draft`` returned with each draft of each sequence

NO_TOKENS = mx.array([], mx.uint32)
NO_DRAFTS = mx.array([[]], mx.uint32)  # [1, 0], for any number of sequences


@dataclass
class Drafts:
    """The drafts of a window. ``Planner`` plans their number and source, and ``Decoder.draft`` makes them.

    Args:
        sequences (List[Sequence]): The sequences of the window.
        plans (List[Plan]): The plan of each. ``Decoder.draft`` reduces it where a source or the head gives fewer drafts.
        plan (Plan): The plan that was chosen: of one sequence its own, of several the number of drafts that they share.
        depth (Depth, optional): The depth that has chosen it, which observes the step; ``None`` for a given number.
        tokens (mx.array): [B, k]; ``NO_DRAFTS`` if there are none.
        records (List[List[Any]]): The record that ``Acceptance.draft`` returned with each draft, until it is accepted or
          rejected; ``None`` for a draft that has no distribution.
    """

    sequences: list[Sequence]
    plans: list[Plan]
    plan: Plan
    depth: Depth | None
    tokens: mx.array = NO_DRAFTS
    records: Records = field(default_factory=list)

    def __len__(self) -> int:
        """The most drafts of any sequence."""
        return self.tokens.shape[1]


@dataclass
class Window:
    """A verify pass in flight.

    Args:
        drafts (Drafts): The drafts after the last decided token of each sequence.
        tokens (mx.array): The decided tokens and the drafts, [B, T].
        logits (mx.array): [B, T, V]
        hidden (mx.array): [B, T, H]
        kept (List[int]): The number of its tokens that are final in each sequence: 0 until the first was handed over.
    """

    drafts: Drafts
    tokens: mx.array
    logits: mx.array
    hidden: mx.array
    kept: list[int]


@dataclass
class Step:
    """The tokens that the sequences of a window have chosen at its positions.

    Args:
        window (Window): The window.
        choices (mx.array): The tokens that each sequence has decided on, [B, T]; the host may not know them yet.
        accepted (mx.array): Whether each draft is accepted, [B, T - 1], bool; values after the first False mean nothing.
        logprobs (mx.array, optional): Log probabilities of the sequences without a sampler of their own, [B, T, V].
        own_logprobs (Dict[int, List[mx.array]]): Log probabilities of the other sequences, by index, each [1, V].
        has_ended (List[bool]): Whether each sequence had ended before, or has failed.
        n_accepted (List[int]): The number of drafts that each accepted, once the host knows it.
        tokens (List[List[int]]): The tokens of each sequence, once the host knows them.
    """

    window: Window
    choices: mx.array
    accepted: mx.array
    logprobs: mx.array | None = None
    own_logprobs: dict[int, list[mx.array]] = field(default_factory=dict)
    has_ended: list[bool] = field(default_factory=list)
    n_accepted: list[int] = field(default_factory=list)
    tokens: list[list[int]] | None = None

    @property
    def drafts(self) -> Drafts:
        return self.window.drafts

    @property
    def sequences(self) -> list[Sequence]:
        return self.window.drafts.sequences

    def token(self, i: int, stream: mx.Stream | mx.ThreadLocalStream) -> tuple[int, mx.array]:
        """Token i of a single sequence, and its log probabilities, [V]."""
        assert self.tokens is not None
        with mx.stream(stream):
            return self.tokens[0][i], self.logprobs_of(0, i)

    def logprobs_of(self, b: int, t: int) -> mx.array:
        """The log probabilities of sequence b's token t, [V]."""
        if b in self.own_logprobs:
            return self.own_logprobs[b][t].squeeze(0)
        assert self.logprobs is not None
        return self.logprobs[b, t]

    def n_decided(self, b: int) -> int:
        """The number of tokens that sequence b decides on, up to the one that ends it; at least 1."""
        return 1 if self.tokens is None else max(len(self.tokens[b]), 1)

    def last_tokens(self) -> mx.array:
        """The last decided token of each sequence, [B, 1]."""
        if self.choices.shape[1] == 1:
            return self.choices
        counts = [self.n_decided(b) for b in range(len(self.sequences))]
        if len(counts) == 1:
            return self.choices[:, counts[0] - 1 : counts[0]]
        return mx.take_along_axis(self.choices, mx.array(counts)[:, None] - 1, axis=1)
