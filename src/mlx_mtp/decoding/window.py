"""The records of a step, each made once: plan, drafts, the window that verifies them, the target's choice, tokens."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..pacing.step_times import Plan
from ..sampling.acceptance import Verdict
from ..sampling.processors import until_error
from .sequence import Sequence

Token = tuple[int, mx.array, bool]  # a token, its log probabilities [V], and whether it was drafted
Stepped = tuple[Sequence, list[Token]]  # a sequence, and its tokens of a step
Records = list[list[Any]]  # the record that ``Acceptance.draft`` returned with each draft of each sequence

NO_TOKENS = mx.array([], mx.uint32)
NO_DRAFTS = mx.array([[]], mx.uint32)  # [1, 0], for any number of sequences


@dataclass(frozen=True)
class WindowPlan:
    """The drafts that ``Planner`` plans for a window.

    Args:
        sequences (List[Sequence]): The sequences of the window, [B].
        plans (Tuple[Plan]): The plan of each, [B].
        plan (Plan): The most drafts of any sequence, and whether they need the head.
        is_chosen (bool): Whether the depth has chosen ``plan``, and observes the step.
    """

    sequences: list[Sequence]
    plans: tuple[Plan, ...]
    plan: Plan
    is_chosen: bool


@dataclass(frozen=True)
class Drafts:
    """The drafts of a window.

    Args:
        plans (Tuple[Plan]): The number and the source of each sequence's drafts: a source may give fewer than planned, [B].
        tokens (mx.array): [B, k]; ``NO_DRAFTS`` if there are none.
        records (List[List[Any]]): The record that ``Acceptance.draft`` returned with each draft of each sequence;
          ``None`` for a draft that has no distribution.
    """

    plans: tuple[Plan, ...]
    tokens: mx.array = NO_DRAFTS
    records: Records = field(default_factory=list)

    def __len__(self) -> int:
        """The most drafts of any sequence."""
        return self.tokens.shape[1]


@dataclass(frozen=True)
class Window:
    """A verify pass in flight.

    Args:
        planned (WindowPlan): The plan of its drafts.
        drafts (Drafts): The drafts after the last committed token of each sequence.
        logits (mx.array): [B, T, V]
        hidden (mx.array): [B, T, H]
    """

    planned: WindowPlan
    drafts: Drafts
    logits: mx.array
    hidden: mx.array

    @property
    def sequences(self) -> list[Sequence]:
        return self.planned.sequences


@dataclass(frozen=True)
class Choice:
    """The tokens that the target model chooses at the positions of a window. The host does not know them yet.

    Args:
        window (Window): The window.
        tokens (mx.array): [B, T]
        accepted (mx.array): Whether each draft is accepted, given those before it, [B, k].
        logprobs (mx.array, optional): Log probabilities of greedy sequences, [B, T, V].
        own_logprobs (Dict[int, List[mx.array]]): Log probabilities of the other sequences, by index, each [1, V].
        has_ended (List[bool]): Whether each sequence had ended before, or has failed.
    """

    window: Window
    tokens: mx.array
    accepted: mx.array
    logprobs: mx.array | None
    own_logprobs: dict[int, list[mx.array]]
    has_ended: list[bool]

    def logprobs_of(self, b: int, t: int) -> mx.array:
        """The log probabilities of sequence b's token t, [V]."""
        if b in self.own_logprobs:
            return self.own_logprobs[b][t].squeeze(0)
        assert self.logprobs is not None
        return self.logprobs[b, t]


@dataclass(frozen=True)
class Step:
    """The tokens of a window that each sequence keeps, as the host knows them.

    Args:
        choice (Choice): The target model's.
        n_accepted (List[int]): The number of drafts that each sequence accepted, [B].
        tokens (List[List[int]]): The tokens of each sequence, up to the one that ends it.
    """

    choice: Choice
    n_accepted: list[int]
    tokens: list[list[int]]

    @property
    def window(self) -> Window:
        return self.choice.window

    @property
    def counts(self) -> list[int]:
        """The number of tokens that each sequence commits; at least 1, [B]."""
        return [max(len(own), 1) for own in self.tokens]

    def tokens_of_each(self) -> list[Stepped]:
        return [
            (s, [(token, self.choice.logprobs_of(b, t), t < self.n_accepted[b]) for t, token in enumerate(tokens)])
            for b, (s, tokens) in enumerate(zip(self.window.sequences, self.tokens))
        ]


def choose(window: Window) -> Choice:
    """Choose a token at every position of every sequence; greedy sequences share one argmax over the batch."""
    sequences, drafts = window.sequences, window.drafts.tokens
    own, k = [b for b, s in enumerate(sequences) if s.end is None and not s.is_greedy], len(window.drafts)
    logprobs, own_logprobs = None, dict[int, list[mx.array]]()
    tokens, accepted = mx.zeros(window.logits.shape[:2], mx.uint32), mx.zeros((len(sequences), k), mx.bool_)
    if len(sequences) > 1 or not own:
        logprobs = window.logits - mx.logsumexp(window.logits, axis=-1, keepdims=True)
        tokens = mx.argmax(logprobs, axis=-1)  # [B, T]
        if k > 0:
            accepted = tokens[:, :-1] == drafts
    if logprobs is not None and k == 0:
        own = _draw_in_groups(sequences, own, logprobs, tokens)
    for b in own:
        with sequences[b].own_errors():
            verdict, own_logprobs[b] = _verdict(sequences[b], b, window)
            tokens[b, : len(verdict.tokens)] = verdict.tokens
            if k > 0:
                accepted[b] = mx.pad(verdict.accepted, (0, k - len(verdict.accepted)))
    return Choice(window, tokens, accepted, logprobs, own_logprobs, [s.end is not None for s in sequences])


def _draw_in_groups(sequences: list[Sequence], own: list[int], logprobs: mx.array, tokens: mx.array) -> list[int]:
    """Call each distinct sampler once for all sequences that share it, as mlx-lm does.

    Args:
        logprobs (mx.array): [B, 1, V]
        tokens (mx.array): The tokens to draw, [B, 1].

    Returns:
        List[int]: The sequences that have no shared sampler, whose tokens are still to be chosen.
    """
    groups: dict[Any, list[int]] = {}
    for b in own:
        if (key := sequences[b].shared_sampler) is not None:
            groups.setdefault(key, []).append(b)
    for sampler, members in groups.items():
        index, first = mx.array(members), sequences[members[0]]
        with first.own_errors():
            tokens[index] = sampler(logprobs[index, 0])[:, None]
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
