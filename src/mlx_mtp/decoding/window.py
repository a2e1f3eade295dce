"""A draft and its outcome: ``Drafts``, the ``Window`` that verifies them, and the ``Step`` with the chosen tokens."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..pacing.depth import Depth
from ..pacing.step_times import Plan
from ..sampling.acceptance import Verdict
from ..sampling.processors import until_error
from .sequence import Sequence

Token = tuple[int, mx.array, bool]  # a token, its log probabilities [V], and whether it was drafted
Stepped = tuple[Sequence, list[Token]]  # a sequence, and its tokens of a step
Records = list[list[Any]]  # the record that ``Acceptance.draft`` returned with each draft of each sequence

NO_TOKENS = mx.array([], mx.uint32)
NO_DRAFTS = mx.array([[]], mx.uint32)  # [1, 0], for any number of sequences


@dataclass
class Drafts:
    """The drafts of a window. ``Planner`` plans their number and source, and ``Decoder.draft`` makes them.

    Args:
        sequences (List[Sequence]): The sequences of the window.
        plans (List[Plan]): The plan of each. ``Decoder.draft`` reduces it where a source or the head gives fewer drafts.
        plan (Plan): The most drafts of any sequence as planned, and whether they need the head.
        depth (Depth, optional): The depth that has chosen it, which observes the step; ``None`` for a given number.
        tokens (mx.array): [B, k]; ``NO_DRAFTS`` if there are none.
        records (List[List[Any]]): The record that ``Acceptance.draft`` returned with each draft, until it is accepted or
          rejected; ``None`` for a draft that has no distribution.

    Attributes:
        planned (List[Plan]): The plan of each before it is reduced.
    """

    sequences: list[Sequence]
    plans: list[Plan]
    plan: Plan
    depth: Depth | None
    tokens: mx.array = NO_DRAFTS
    records: Records = field(default_factory=list)

    def __post_init__(self) -> None:
        self.planned = self.plans

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
    """

    drafts: Drafts
    tokens: mx.array
    logits: mx.array
    hidden: mx.array


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

    def logprobs_of(self, b: int, t: int) -> mx.array:
        """The log probabilities of sequence b's token t, [V]."""
        if b in self.own_logprobs:
            return self.own_logprobs[b][t].squeeze(0)
        assert self.logprobs is not None
        return self.logprobs[b, t]

    def tokens_of_each(self) -> list[Stepped]:
        """The tokens of each sequence, once the host knows them."""
        return [
            (s, [(token, self.logprobs_of(b, t), t < self.n_accepted[b]) for t, token in enumerate(tokens)])
            for b, (s, tokens) in enumerate(zip(self.sequences, self.tokens or []))
        ]

    @property
    def counts(self) -> list[int]:
        """The number of tokens that each sequence decides on, up to the one that ends it; at least 1, [B]."""
        return [1] * len(self.sequences) if self.tokens is None else [max(len(own), 1) for own in self.tokens]

    def last_tokens(self) -> mx.array:
        """The last decided token of each sequence, [B, 1]."""
        if self.choices.shape[1] == 1:
            return self.choices
        counts = self.counts
        if len(counts) == 1:
            return self.choices[:, counts[0] - 1 : counts[0]]
        return mx.take_along_axis(self.choices, mx.array(counts)[:, None] - 1, axis=1)


def choose(window: Window) -> Step:
    """Choose a token at every position of every sequence; greedy sequences share one argmax over the batch."""
    sequences, drafts = window.drafts.sequences, window.drafts.tokens
    step = Step(window, window.tokens, drafts, n_accepted=[0] * len(sequences))
    own = [b for b, s in enumerate(sequences) if s.end is None and not s.is_greedy]
    k = len(window.drafts)
    if len(sequences) > 1 or not own:
        step.logprobs = window.logits - mx.logsumexp(window.logits, axis=-1, keepdims=True)
        step.choices = mx.argmax(step.logprobs, axis=-1)  # [B, T]
        if k > 0:
            step.accepted = step.choices[:, :-1] == drafts
    elif k > 0:
        step.accepted = mx.zeros(drafts.shape, mx.bool_)
    if len(sequences) > 1 and k == 0:
        own = _draw_in_groups(sequences, own, step)
    for b in own:
        with sequences[b].own_errors():
            (tokens, accepted), step.own_logprobs[b] = _verdict(sequences[b], b, window)
            if len(sequences) == 1:
                step.choices, step.accepted = tokens[None].astype(mx.uint32), accepted[None]
            else:
                step.choices[b, : len(tokens)] = tokens
                step.accepted[b] = mx.pad(accepted, (0, k - len(accepted)))
    step.has_ended = [s.end is not None for s in sequences]
    return step


def _draw_in_groups(sequences: list[Sequence], own: list[int], step: Step) -> list[int]:
    """Call each distinct sampler once for all sequences that share it, as mlx-lm does.

    Returns:
        List[int]: The sequences that have no shared sampler, whose tokens are still to be chosen.
    """
    groups: dict[Any, list[int]] = {}
    for b in own:
        if (key := sequences[b].shared_sampler) is not None:
            groups.setdefault(key, []).append(b)
    assert step.logprobs is not None
    for sampler, members in groups.items():
        index, first = mx.array(members), sequences[members[0]]
        with first.own_errors():
            step.choices[index] = sampler(step.logprobs[index, 0])[:, None]
        for b in members:
            sequences[b].end = first.end
    return [b for b in own if sequences[b].shared_sampler is None]


def _verdict(s: Sequence, b: int, window: Window) -> tuple[Verdict, list[mx.array]]:
    """The verdict on sequence b, which has its own sampler or processors, and the log probabilities, each [1, V]."""
    own, k = window.drafts, window.drafts.plans[b].k
    drafts, records = (own.tokens[b, :k], own.records[b]) if len(own) > 0 else (NO_TOKENS, [])
    # [1, V], as mlx-lm hands it to samplers and processors, and an array of its own, since penalties write into it.
    logprobs = until_error(lambda t: s.logprobs(window.logits[b : b + 1, t], drafts[:t]), range(k + 1))
    n = len(logprobs) - 1
    return s.acceptance.accept(logprobs, drafts[:n], records[:n], s.n_generated), logprobs
