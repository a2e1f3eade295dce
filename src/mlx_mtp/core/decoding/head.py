"""The MTP head: its keys and values, its pending inputs, and its drafts.

Input i of the head is the verified hidden state h_i and the token t_i+1, of which it drafts t_i+2. An input is pending until
the head drafts again. After a step each sequence has as many new inputs as committed tokens, here four and two:

    added to keys and values     a0 a1 a2                       b0
    through the whole layer               a3                       b1
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..caches.prompt_cache import PromptCache, empty_head
from ..caches.rows import Ends, KVRows
from ..layers.attention import append_to_cache
from ..layers.compiled import Compiler
from ..layers.mtp import has_head, run_head
from ..models.mixin import MTPModel
from ..sampling.acceptance import Drafted, n_leading
from ..sampling.processors import restoring_random_state
from .sequence import TextSequence
from .window import NO_TOKENS, groups_of, normalized, of_members, with_rows

MAX_PENDING = 512  # inputs that steps without the head's drafts leave pending

# Hidden states [B, T, H], tokens [B, T], and the number of columns that count
Pending = list[tuple[mx.array, mx.array, int]]


@dataclass(frozen=True)
class HeadState:
    """The head's caches of B sequences, without the drafts in flight."""

    # The ends of keys and values from verified hidden states; drafts' come after them
    ends: Ends = field(default_factory=Ends)
    firsts: tuple[int, ...] = ()  # the index of each first input: 0, unless mlx-lm filled the caches without the head
    counts: tuple[int, ...] = ()  # the numbers of pending inputs
    # The arrays of a step are not cut to the columns that count: a slice is lazy, and another thread that closes the generator
    # could not evaluate it.
    pending: Pending = field(default_factory=list)

    @property
    def is_ragged(self) -> bool:
        """Whether sequences differ in their number of pending inputs."""
        return len(self.counts) > 1 and min(self.counts) < sum(n for *_, n in self.pending)

    def joined_inputs(self) -> tuple[mx.array, mx.array]:
        """The pending hidden states [B, t, H] and tokens [B, t]"""
        hidden = mx.concatenate([h[:, :n] for h, _, n in self.pending], axis=1)
        return hidden, mx.concatenate([t[:, :n] for _, t, n in self.pending], axis=1)


class HeadDrafter:
    """Drafts by the head, with its keys and values, and its pending inputs. An interrupt at any line leaves the state before.

    It stays empty for a model without a head, whose sequences have free drafts alone.
    """

    def __init__(self, model: MTPModel, compiler: Compiler):
        self.model = model
        self.compiler = compiler
        self.has_head = has_head(model)
        self.cache = KVRows(empty_head(model))
        self.state = HeadState()
        self.lm_head = model.draft_settings.lm_head

    @property
    def states(self) -> list[Any]:
        """The arrays of earlier steps that the last one may have left unevaluated."""
        return [*self.cache.arrays, *((hidden, tokens) for hidden, tokens, _ in self.state.pending[-1:])]

    def extend(self, hidden: mx.array, tokens: mx.array, counts: list[int]) -> None:
        """Add pending inputs: the first ``counts[b]`` of tokens [B, T], and the hidden states before, [B, T, H]."""
        if not self.has_head:
            return
        if self.state.pending and (self.state.is_ragged or max(self.state.counts) >= MAX_PENDING):
            self.catch_up()
        pending = [*self.state.pending, (hidden, tokens, max(counts))]
        counts = [n + count for n, count in zip(self.state.counts, counts)]
        self.state = replace(self.state, counts=tuple(counts), pending=pending)

    def run(self, hidden: mx.array, tokens: mx.array, ends: Ends) -> mx.array:
        """A pass over hidden states [B, t, H] and tokens [B, t], written after these ends -> the last output, [B, 1, H]"""
        self.cache.ends = ends
        return run_head(self.model, hidden, tokens, self.cache, compiler=self.compiler)

    def catch_up(self) -> mx.array:
        """Run the head over the pending inputs -> its output for the last one of each sequence, [B, 1, H]"""
        if self.state.is_ragged:
            self._keep_last_input()
        state = self.state
        out = self.run(*state.joined_inputs(), state.ends)
        self.state = HeadState(state.ends.plus(state.counts), state.firsts, (0,) * len(state.counts))
        return out

    def _append(self, hidden: mx.array, tokens: mx.array) -> None:
        """Append the keys and values of inputs, [B, t, H] and [B, t], which may be none."""
        self.cache.ends = self.state.ends
        if tokens.shape[1] > 0:
            inputs = self.model.mtp.combine(self.model.model.embed_tokens(tokens), hidden)
            append_to_cache(self.model.head_layer, inputs, self.cache)

    def _keep_last_input(self) -> None:
        """Leave at most one input pending for each sequence, in one column: for sequences to join and leave, or for drafts."""
        state = self.state
        if not state.pending:
            return
        hidden, tokens = state.joined_inputs()
        before = [max(n - 1, 0) for n in state.counts]
        if hidden.shape[1] > 1:
            self._append(hidden[:, :-1], tokens[:, :-1])
            hidden, tokens = columns_of(hidden, before), columns_of(tokens, before)
        elif hidden.shape[1] == 0:
            hidden, tokens = (x[:, :1] for x in state.pending[0][:2])
        counts = tuple(min(n, 1) for n in state.counts)
        self.state = HeadState(state.ends.plus(before), state.firsts, counts, [(hidden, tokens, max(counts))])

    def join(self, caches: list[PromptCache], tokens: mx.array) -> None:
        """Add a sequence for each prompt cache, with its next token [B, 1]."""
        if not self.has_head:
            return
        self._keep_last_input()
        state = self.state
        firsts = [c.first_position for c in caches]
        counts, shifts = list[int](), list[int]()
        for c, first, token in zip(caches, firsts, tokens):
            positions = c.positions(first)
            hidden = c.last_hidden
            shifts.append(0 if positions is None else positions.shift)
            if hidden is not None and positions is not None and not positions.are_plain(c.head.offset):
                # Rows have no positions in three axes, so the head runs over this input now.
                run_head(self.model, hidden, token[None], c.head, None, positions)
                hidden = None
            counts.append(int(hidden is not None))
        none = mx.zeros((1, 1, self.model.hidden_size), self.model.model.embed_tokens(tokens[:1]).dtype)
        hidden = mx.concatenate([none if c.last_hidden is None else c.last_hidden for c in caches])
        for hidden_before, tokens_before, _ in state.pending:
            hidden = mx.concatenate([hidden_before, hidden])
            tokens = mx.concatenate([tokens_before, tokens])
        all_counts = (*state.counts, *counts)
        self.cache.join([c.head for c in caches], state.ends)
        ends = state.ends.joined(Ends(tuple(c.head.offset for c in caches), tuple(shifts)))
        self.state = HeadState(ends, (*state.firsts, *firsts), all_counts, [(hidden, tokens, max(all_counts))])

    def filter(self, keep: list[int]) -> None:
        if not self.has_head:
            return
        self._keep_last_input()
        state = self.state
        rows = mx.array(keep)
        ends = state.ends.of(keep)
        self.cache.filter(keep, ends.longest)
        firsts, counts = (tuple(numbers[b] for b in keep) for numbers in (state.firsts, state.counts))
        pending = [(hidden[rows], tokens[rows], n) for hidden, tokens, n in state.pending]
        self.state = HeadState(ends, firsts, counts, pending)

    def extract(self, b: int, n: int) -> KVCache:
        """The keys and values of sequence b's first n - 1 inputs, pending ones included."""
        if not self.has_head:
            return empty_head(self.model)
        n_inputs = max(n - 1 - self.state.firsts[b], 0)
        if n_inputs > self.state.ends.lengths[b]:
            # The inputs stay pending: the next drafts begin with them.
            self._append(*self.state.joined_inputs())
        return self.cache.extract(b, n_inputs)

    def propose(self, sequences: list[TextSequence], limits: list[int]) -> tuple[mx.array, list[list[Any]], list[int]]:
        """Draft up to a limit for each sequence -> drafts [B, k], the proposals of ``groups_of``, numbers of drafts [B].

        Fewer after an error of a sampler or processor, which ends a text only if a token comes there, or below ``draft_p_min``.
        """
        B = len(sequences)
        groups = groups_of(sequences)
        proposals = [list[Any]() for _ in groups]
        counts = [*limits]
        p_min = [s.task.options.draft_p_min or 0.0 for s in sequences]
        drafts = list[mx.array]()  # tokens, each [B, 1]
        likeliest = list[mx.array]()  # the probabilities of the likeliest tokens, each [B, 1]
        out = self.catch_up()  # [B, 1, H]
        for i in range(max(limits)):
            if i > 0:
                out = self.run(out, drafts[-1], self.state.ends.plus([i - 1] * B))
            logits = self.model.draft_logits(out, self.lm_head)[:, -1]  # [B, V]
            tokens, highest = mx.zeros((B, 1), mx.uint32), mx.zeros((B, 1))
            for members, of_group in zip(groups, proposals):
                if max(counts[b] for b in members) <= i:
                    continue
                try:
                    with restoring_random_state():
                        chosen, proposal, processed = _draft(sequences, members, of_members(logits, members), drafts)
                except Exception:  # The sampler or processor is called again for the target model's choice.
                    for b in members:
                        counts[b] = min(counts[b], i)
                    continue
                of_group.append(proposal)
                tokens = with_rows(tokens, members, chosen)
                if max(p_min) > 0:
                    highest = with_rows(highest, members, mx.exp(normalized(processed)[0].max(axis=-1, keepdims=True)))
            drafts.append(tokens)
            likeliest.append(highest)
        if max(p_min) > 0:
            # A draft is dropped by the likeliest token's probability: its own would change the distribution of the text.
            is_sure: Any = (mx.concatenate(likeliest, axis=1) >= mx.array(p_min)[:, None]).tolist()
            counts = [min(n, n_leading(of_one)) for n, of_one in zip(counts, is_sure)]
        tokens = drafts[0] if len(drafts) == 1 else mx.concatenate(drafts, axis=1)
        return tokens[:, : max(counts)], proposals, counts

    def observe(self, tokens: Iterable[int]) -> None:
        if self.lm_head is not None:
            self.lm_head = self.lm_head.with_tokens(tokens)

    def forget(self, tokens: Iterable[int]) -> None:
        """Reduce the draft vocabulary to the loaded one and these tokens, after sequences have left."""
        self.lm_head = self.model.draft_settings.lm_head
        self.observe(tokens)


def columns_of(x: mx.array, columns: list[int]) -> mx.array:
    """One column of x [B, t, ...] for each sequence -> [B, 1, ...]"""
    if len(set(columns)) == 1:
        return x[:, columns[0] : columns[0] + 1]
    index = mx.array(columns).reshape(-1, *[1] * (x.ndim - 1))
    return mx.take_along_axis(x, index, axis=1)


def _draft(
    sequences: list[TextSequence], members: list[int], logits: mx.array, before: list[mx.array]
) -> tuple[mx.array, Any, mx.array]:
    """Draft for a group, by logits [G, V] and earlier drafts -> drafts [G, 1], proposal, processed logits [G, V]"""
    first, *_ = members
    s = sequences[first]
    if s.task.options.logits_processors:
        logits = s.process(logits, mx.concatenate([d[first] for d in before]) if before else NO_TOKENS)
    texts = [Drafted(sequences[b].drafting.acceptance, sequences[b].n_generated + len(before)) for b in members]
    drafts, proposal = s.drafting.acceptance.draft(texts, logits)
    return drafts.astype(mx.uint32)[:, None], proposal, logits
