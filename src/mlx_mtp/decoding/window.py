"""A draft and its outcome: ``Drafts``, the ``Window`` that verifies them, and the ``Step`` with the chosen tokens."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..pacing.depth import Depth
from ..pacing.step_times import Plan
from ..sampling.acceptance import Drafted
from ..sampling.processors import until_error
from .sequence import Sequence, own_errors

Token = tuple[int, mx.array, bool]  # a token, its log probabilities [V], and whether it was drafted
Stepped = tuple[Sequence, list[Token]]  # a sequence, and its tokens of a step

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
        proposals (List[List[Any]]): The proposals of the head's drafts for the texts of each of ``groups_of``, until they are
          accepted or rejected.

    Attributes:
        planned (List[Plan]): The plan of each before it is reduced.
    """

    sequences: list[Sequence]
    plans: list[Plan]
    plan: Plan
    depth: Depth | None
    tokens: mx.array = NO_DRAFTS
    proposals: list[list[Any]] = field(default_factory=list)

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
        logprobs (mx.array): Log probabilities of the sequences without logits processors, [B, T, V].
        own_logprobs (Dict[int, mx.array]): Log probabilities of the other sequences, by index, each [1, n, V].
        has_ended (List[bool]): Whether each sequence had ended before, or has failed.
        n_accepted (List[int]): The number of drafts that each accepted, once the host knows it.
        tokens (List[List[int]]): The tokens of each sequence, once the host knows them.
    """

    window: Window
    choices: mx.array
    accepted: mx.array
    logprobs: mx.array
    own_logprobs: dict[int, mx.array] = field(default_factory=dict)
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
        return self.own_logprobs[b][0, t] if b in self.own_logprobs else self.logprobs[b, t]

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
    """Choose a token at every position of every sequence, in one call for all positions of sequences with equal samplers."""
    (B, T), sequences = window.tokens.shape, window.drafts.sequences
    choices, accepted = mx.zeros((B, T), mx.uint32), mx.zeros((B, T - 1), mx.bool_)
    step = Step(window, choices, accepted, normalized(window.logits), n_accepted=[0] * B)
    groups = groups_of(sequences)
    for members, proposals in zip(groups, window.drafts.proposals or [[]] * len(groups)):
        running = [sequences[b] for b in members if sequences[b].end is None]
        with own_errors(running):
            if running:
                _choose(step, members, proposals)
    step.has_ended = [s.end is not None for s in sequences]
    return step


def _choose(step: Step, members: list[int], proposals: list[Any]) -> None:
    """Choose the tokens of sequences with equal samplers, or of one with logits processors."""
    (first, *_), drafts, plans = members, step.drafts.tokens, step.drafts.plans
    s, n = step.sequences[first], max(plans[b].k for b in members) + 1
    drafts = rows_of(drafts, members)[:, : n - 1] if n > 1 else mx.zeros((len(members), 0), mx.uint32)
    if s.logits_processors:
        # [1, V], as mlx-lm hands it to processors, and an array of its own, since penalties write into it.
        logits = step.window.logits[first : first + 1]
        processed = until_error(lambda t: s.process(logits[:, t], drafts[0, :t]), range(n))
        step.own_logprobs[first] = logprobs = normalized(mx.stack(processed, axis=1))
        drafts = drafts[:, : len(processed) - 1]
    else:
        logprobs = rows_of(step.logprobs, members)[:, :n]
    own = [(step.sequences[b], plans[b]) for b in members]
    texts = [Drafted(s.acceptance, s.n_generated, plan.k, plan.skips_head) for s, plan in own]
    tokens, accepted = s.acceptance.accept(texts, logprobs, drafts, proposals)
    if tokens.shape == step.choices.shape:
        step.choices, step.accepted = tokens.astype(mx.uint32), accepted
    else:
        rows, n = mx.array(members), tokens.shape[1]
        step.choices[rows, :n] = tokens
        if n > 1:
            step.accepted[rows, : n - 1] = accepted


def groups_of(sequences: list[Sequence]) -> list[list[int]]:
    """The sequences that are drafted for and accepted together: with equal samplers, and without logits processors."""
    groups: dict[Any, list[int]] = {}
    for b, s in enumerate(sequences):
        groups.setdefault((s.acceptance, b if s.logits_processors else None), []).append(b)
    return list(groups.values())


def rows_of(x: mx.array, members: list[int]) -> mx.array:
    return x if len(members) == len(x) else x[mx.array(members)]


def normalized(logits: mx.array) -> mx.array:
    """Logits [..., V] -> log probabilities, as in mlx-lm."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
