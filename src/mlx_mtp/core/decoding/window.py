"""The records of a step, each made once: a plan, its drafts, the window that verifies them, the target's choice, tokens."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..pacing.step_times import Plan
from ..sampling.acceptance import Drafted
from ..sampling.processors import restoring_random_state, until_error
from .sequence import TextSequence

Token = tuple[int, mx.array, bool]  # a token, its log probabilities [V], and whether it was drafted
Stepped = tuple[TextSequence, list[Token]]  # a sequence, and its tokens of a step

NO_NUMBER = 1 << 31  # stands for a token where the logits are no distribution
NO_TOKENS = mx.array([], mx.uint32)
NO_DRAFTS = mx.array([[]], mx.uint32)  # [1, 0], for any number of sequences


@dataclass(frozen=True)
class WindowPlan:
    sequences: list[TextSequence]  # [B]
    of_each: tuple[Plan, ...]  # [B]
    whole: Plan  # the largest draft length of any sequence, and whether the drafts need the head
    is_chosen: bool  # whether ``Depth`` has chosen it, and observes the step
    n_tokens: int = 0  # the tokens of the longest sequence before the window


@dataclass(frozen=True)
class Drafts:
    made: tuple[Plan, ...]  # the plans as carried out: the head may give fewer drafts
    tokens: mx.array = NO_DRAFTS  # [B, k]
    proposals: list[list[Any]] = field(default_factory=list)  # those of the head's drafts, for each of ``groups_of``

    def __len__(self) -> int:
        return self.tokens.shape[1]


@dataclass(frozen=True)
class Window:
    """A verify pass in flight."""

    plan: WindowPlan
    drafts: Drafts
    logits: mx.array  # [B, T, V]
    hidden: mx.array  # [B, T, H]


@dataclass(frozen=True)
class Choice:
    """The target model's tokens at the positions of a window, which the host does not know yet."""

    window: Window
    chosen: mx.array  # [B, T]: also tokens of a caller's sampler that the model does not have, and ``NO_NUMBER``
    tokens: mx.array  # [B, T], those that the model can read
    accepted: mx.array  # whether each draft is accepted, given those before it, [B, k]
    logprobs: mx.array  # those of the sequences without logits processors, [B, T, V]
    own_logprobs: dict[int, mx.array]  # those of the other sequences, by index, each [1, n, V]
    is_running: list[bool]  # whether each sequence had not ended before

    def logprobs_of(self, b: int, t: int) -> mx.array:
        return self.own_logprobs[b][0, t] if b in self.own_logprobs else self.logprobs[b, t]


@dataclass(frozen=True)
class Step:
    choice: Choice
    n_accepted: list[int]  # drafts, [B]
    tokens: list[list[int]]  # the tokens of each sequence, up to the one that ends it

    @property
    def counts(self) -> list[int]:
        """The number of tokens that each sequence commits; at least 1, [B]."""
        return [max(len(tokens), 1) for tokens in self.tokens]

    def tokens_of_each(self) -> list[Stepped]:
        """The tokens of each sequence that had not ended before; none of one that has failed."""
        return [
            (s, [(token, self.choice.logprobs_of(b, t), t < self.n_accepted[b]) for t, token in enumerate(tokens)])
            for b, (s, tokens) in enumerate(zip(self.choice.window.plan.sequences, self.tokens))
            if self.choice.is_running[b]
        ]


def choose(window: Window) -> Choice:
    """Choose a token at every position of every sequence, in one call for all positions of sequences with equal samplers."""
    sequences, made = window.plan.sequences, window.drafts.made
    B, T, V = window.logits.shape
    is_running = [s.end is None for s in sequences]
    tokens, accepted = mx.zeros((B, T), mx.uint32), mx.zeros((B, T - 1), mx.bool_)
    logprobs, are_numbers = normalized(window.logits)
    groups = groups_of(sequences)
    own_logprobs: dict[int, mx.array] = {}
    for members, proposals in zip(groups, window.drafts.proposals or [[]] * len(groups)):
        running = [sequences[b] for b in members if sequences[b].end is None]
        if not running:
            continue
        try:
            with restoring_random_state():
                first, *_ = members
                of_group = of_members(logprobs, members)
                if sequences[first].task.options.logits_processors:
                    of_group, of_group_are_numbers = _processed(window, first)
                    own_logprobs[first] = of_group
                    are_numbers = with_rows(are_numbers, members, of_group_are_numbers)
                n = min(max(made[b].k for b in members) + 1, of_group.shape[1])
                none = mx.zeros((len(members), 0), mx.uint32)
                drafts = of_members(window.drafts.tokens, members)[:, : n - 1] if n > 1 else none
                each = [(sequences[b], made[b]) for b in members]
                texts = [Drafted(s.drafting.acceptance, s.n_generated, plan.k, plan.skips_head) for s, plan in each]
                verdict = sequences[first].drafting.acceptance.accept(texts, of_group[:, :n], drafts, proposals)
                tokens = with_rows(tokens, members, verdict.tokens)
                accepted = with_rows(accepted, members, verdict.accepted)
        except Exception as e:  # An error of a sampler or processor ends these sequences, and no other.
            for s in running:
                s.end = e
    chosen = mx.where(are_numbers, tokens, NO_NUMBER)
    # A draft is not accepted before a position without a token: the next window begins with that.
    if T > 1:
        accepted = accepted & (chosen[:, 1:] < V)
    return Choice(window, chosen, mx.minimum(chosen, V - 1), accepted, logprobs, own_logprobs, is_running)


def _processed(window: Window, b: int) -> tuple[mx.array, mx.array]:
    """As ``normalized`` of a sequence with logits processors, [1, n, V] and [1, n]: up to a position where one raises."""
    s = window.plan.sequences[b]
    drafts = window.drafts.tokens

    def process(t: int) -> mx.array:
        # The logits are [1, V], as mlx-lm hands them to processors, and an array of their own: penalties write into it.
        return s.process(window.logits[b : b + 1, t], drafts[b, :t] if t > 0 else NO_TOKENS)

    return normalized(mx.stack(until_error(process, range(window.drafts.made[b].k + 1)), axis=1))


def groups_of(sequences: list[TextSequence]) -> list[list[int]]:
    """The sequences that are drafted for and accepted together: with equal samplers, and without logits processors."""
    groups: dict[Any, list[int]] = {}
    for b, s in enumerate(sequences):
        groups.setdefault((s.drafting.acceptance, b if s.task.options.logits_processors else None), []).append(b)
    return list(groups.values())


def of_members(x: mx.array, members: list[int]) -> mx.array:
    return x if len(members) == len(x) else x[mx.array(members)]


def with_rows(x: mx.array, members: list[int], columns: mx.array) -> mx.array:
    """Put the first columns of some rows, [G, n], into x, [B, T]."""
    if columns.shape == x.shape:
        return columns.astype(x.dtype)
    if (n := columns.shape[1]) > 0:
        x[mx.array(members), :n] = columns
    return x


def normalized(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Logits [..., V] -> log probabilities, as in mlx-lm, and whether these are numbers, [...]."""
    total = mx.logsumexp(logits, axis=-1, keepdims=True)  # not finite if a logit is NaN or infinite, or all are -inf
    return logits - total, (mx.abs(total) < mx.inf).squeeze(-1)
