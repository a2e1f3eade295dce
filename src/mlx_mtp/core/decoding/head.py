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
from ..layers.drafting import draft_logits
from ..layers.mtp import has_head, run_head
from ..layers.passes import in_pass, pass_of_head
from ..models.mixin import MTPModel
from ..sampling.acceptance import Drafted, n_leading
from ..sampling.processors import restoring_random_state
from .sequence import Sequence
from .window import NO_TOKENS, groups_of, normalized, of_members, with_rows

MAX_PENDING = 512  # inputs that steps without the head's drafts leave pending

Pending = list[tuple[mx.array, mx.array, int]]  # hidden states [B, T, H], tokens [B, T], and the columns that count


@dataclass(frozen=True)
class HeadState:
    """The head's caches of B sequences, without the drafts in flight."""

    ends: Ends = field(default_factory=Ends)  # of keys and values from verified hidden states; drafts' come after them
    firsts: tuple[int, ...] = ()  # the index of each first input: 0, unless mlx-lm filled the caches without the head
    counts: tuple[int, ...] = ()  # of pending inputs
    # Of which the first t columns are inputs of at least one sequence. They are not cut to t here: a slice is lazy, and another
    # thread that closes the generator could not evaluate it.
    pending: Pending = field(default_factory=list)

    @property
    def is_ragged(self) -> bool:
        """Whether sequences differ in their number of pending inputs."""
        return len(self.counts) > 1 and min(self.counts) < sum(n for *_, n in self.pending)

    def joined_inputs(self) -> tuple[mx.array, mx.array]:
        """The pending hidden states [B, t, H] and tokens [B, t]"""
        hidden = mx.concatenate([h[:, :n] for h, _, n in self.pending], axis=1)
        return hidden, mx.concatenate([t[:, :n] for _, t, n in self.pending], axis=1)


class HeadCache:
    """The head's keys and values, and its pending inputs. An interrupt at any line leaves the state before.

    It stays empty for a model without a head, whose sequences have free drafts alone.
    """

    def __init__(self, model: MTPModel, compiler: Compiler):
        self.model, self.compiler, self.has_head = model, compiler, has_head(model)
        self.cache, self.state = KVRows(empty_head(model)), HeadState()

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
        held = self.state
        pending = [*held.pending, (hidden, tokens, max(counts))]
        self.state = replace(held, counts=tuple(map(sum, zip(held.counts, counts))), pending=pending)

    def run(self, hidden: mx.array, tokens: mx.array, ends: Ends) -> mx.array:
        """A pass over hidden states [B, t, H] and tokens [B, t], written after these ends -> the last output, [B, 1, H]"""
        self.cache.ends = ends
        return run_head(self.model, hidden, tokens, self.cache, compiler=self.compiler)

    def catch_up(self) -> mx.array:
        """Run the head over the pending inputs -> its output for the last one of each sequence, [B, 1, H]"""
        held = self.state
        hidden, tokens = held.joined_inputs()
        if held.is_ragged:
            before = [max(n - 1, 0) for n in held.counts]
            with in_pass(pass_of_head(hidden.shape[1], self.model.drafting, self.compiler)):
                inputs = self._inputs(hidden, tokens)
                self._append(inputs[:, :-1])
                self.cache.ends = held.ends.plus(before)
                out = self.model.mtp.decode(columns_of(inputs, before), self.cache)
        else:
            out = self.run(hidden, tokens, held.ends)
        self.state = HeadState(held.ends.plus(held.counts), held.firsts, (0,) * len(held.counts))
        return out

    def _inputs(self, hidden: mx.array, tokens: mx.array) -> mx.array:
        """The layer's inputs, [B, t, H]."""
        return self.model.mtp.combine(self.model.model.embed_tokens(tokens), hidden)

    def _append(self, inputs: mx.array) -> None:
        """Append the keys and values of the layer's inputs, [B, t, H], which may be none."""
        self.cache.ends = self.state.ends
        if inputs.shape[1] > 0:
            append_to_cache(self.model.mtp.layers[0], inputs, self.cache)

    def _keep_last_input(self) -> None:
        """Leave at most one input pending for each sequence, in one column, for sequences to join and leave."""
        held = self.state
        if not held.pending:
            return
        (hidden, tokens), before = held.joined_inputs(), [max(n - 1, 0) for n in held.counts]
        if hidden.shape[1] > 1:
            self._append(self._inputs(hidden, tokens)[:, :-1])
            hidden, tokens = columns_of(hidden, before), columns_of(tokens, before)
        elif hidden.shape[1] == 0:
            hidden, tokens = (x[:, :1] for x in held.pending[0][:2])
        counts = tuple(min(n, 1) for n in held.counts)
        self.state = HeadState(held.ends.plus(before), held.firsts, counts, [(hidden, tokens, max(counts))])

    def join(self, caches: list[PromptCache], tokens: mx.array) -> None:
        """Add a sequence for each prompt cache, with its next token [B, 1]."""
        if not self.has_head:
            return
        self._keep_last_input()
        held, firsts, counts, shifts = self.state, [c.first_position for c in caches], list[int](), list[int]()
        for c, first, token in zip(caches, firsts, tokens):
            positions, waiting = c.positions(first), c.last_hidden
            if waiting is not None and positions is not None and not positions.are_plain(c.head.offset):
                # A position in three axes, which rows do not have: run the head over this input now.
                run_head(self.model, waiting, token[None], c.head, None, positions)
                waiting = None
            counts.append(int(waiting is not None))
            shifts.append(0 if positions is None else positions.shift)
        none = mx.zeros((1, 1, self.model.hidden_size), self.model.model.embed_tokens(tokens[:1]).dtype)
        hidden = mx.concatenate([none if c.last_hidden is None else c.last_hidden for c in caches])
        for held_hidden, held_tokens, _ in held.pending:
            hidden, tokens = mx.concatenate([held_hidden, hidden]), mx.concatenate([held_tokens, tokens])
        pending = [(hidden, tokens, max([*held.counts, *counts]))]
        self.cache.join([c.head for c in caches], held.ends)
        ends = held.ends.joined(Ends(tuple(c.head.offset for c in caches), tuple(shifts)))
        self.state = HeadState(ends, (*held.firsts, *firsts), (*held.counts, *counts), pending)

    def filter(self, keep: list[int]) -> None:
        if not self.has_head:
            return
        self._keep_last_input()
        held, rows = self.state, mx.array(keep)
        ends = held.ends.of(keep)
        self.cache.filter(keep, ends.longest)
        pending = [(hidden[rows], tokens[rows], n) for hidden, tokens, n in held.pending]
        self.state = HeadState(ends, tuple(held.firsts[b] for b in keep), tuple(held.counts[b] for b in keep), pending)

    def extract(self, b: int, n: int) -> KVCache:
        """The keys and values of sequence b's first n - 1 inputs, pending ones included."""
        if not self.has_head:
            return empty_head(self.model)
        held, n_inputs = self.state, max(n - 1 - self.state.firsts[b], 0)
        if n_inputs > held.ends.lengths[b]:
            self._append(self._inputs(*held.joined_inputs()))  # which stay pending: the next drafts begin with them
        return self.cache.extract(b, n_inputs)


def columns_of(x: mx.array, columns: list[int]) -> mx.array:
    """One column of x [B, t, ...] for each sequence -> [B, 1, ...]"""
    if len(set(columns)) == 1:
        return x[:, columns[0] : columns[0] + 1]
    index = mx.array(columns).reshape(-1, *[1] * (x.ndim - 1))
    return mx.take_along_axis(x, index, axis=1)


class HeadDrafter:
    def __init__(self, model: MTPModel, head: HeadCache):
        self.model, self.head = model, head
        self.lm_head = model.drafting.lm_head

    def propose(self, sequences: list[Sequence], limits: list[int]) -> tuple[mx.array, list[list[Any]], list[int]]:
        """Draft up to a limit for each sequence -> drafts [B, k], the proposals of ``groups_of``, numbers of drafts [B].

        Fewer after an error of a sampler or processor, which ends a text only if a token comes there, or below ``draft_p_min``.
        """
        head, k, groups, counts = self.head, max(limits), groups_of(sequences), [*limits]
        proposals, drafts = [list[Any]() for _ in groups], list[mx.array]()  # drafts are each [B, 1]
        p_min, sure = [s.options.draft_p_min or 0.0 for s in sequences], [list[mx.array]() for _ in sequences]
        out = head.catch_up()  # [B, 1, H]
        for i in range(k):
            if i > 0:
                out = head.run(out, drafts[-1], head.state.ends.plus([i - 1] * len(sequences)))
            logits = draft_logits(self.model, self.lm_head, out)  # [B, V]
            tokens = mx.zeros((len(sequences), 1), mx.uint32)
            for members, own in zip(groups, proposals):
                if max(counts[b] for b in members) <= i:
                    continue
                try:
                    with restoring_random_state():
                        chosen, proposal, processed = _draft(sequences, members, of_members(logits, members), drafts)
                except Exception:  # no draft, and the target calls them again
                    for b in members:
                        counts[b] = min(counts[b], i)
                    continue
                own.append(proposal)
                tokens = with_rows(tokens, members, chosen)
                if any(p_min[b] > 0 for b in members):
                    # By the likeliest token, not by the drafted one: dropping drafts by their own probability would change
                    # the distribution of the text.
                    for b, p in zip(members, mx.exp(normalized(processed).max(axis=-1))):
                        sure[b].append(p >= p_min[b])
            drafts.append(tokens)
        for b, of_one in enumerate(sure):
            if p_min[b] > 0 and counts[b] > 0:
                is_sure: Any = mx.stack(of_one[: counts[b]]).tolist()
                counts[b] = n_leading(is_sure)
        tokens = mx.concatenate(drafts, axis=1) if k > 1 else drafts[0]
        return tokens[:, : max(counts)], proposals, counts

    def observe(self, tokens: Iterable[int]) -> None:
        if self.lm_head is not None:
            self.lm_head = self.lm_head.with_tokens(tokens)

    def forget(self, tokens: Iterable[int]) -> None:
        """Reduce the draft vocabulary to the loaded one and these tokens, after sequences have left."""
        self.lm_head = self.model.drafting.lm_head
        self.observe(tokens)


def _draft(
    sequences: list[Sequence], members: list[int], logits: mx.array, before: list[mx.array]
) -> tuple[mx.array, Any, mx.array]:
    """Draft for a group, by logits [G, V] and earlier drafts -> drafts [G, 1], proposal, processed logits [G, V]"""
    s = sequences[members[0]]
    if s.options.logits_processors:
        logits = s.process(logits, mx.concatenate([d[members[0]] for d in before]) if before else NO_TOKENS)
    texts = [Drafted(sequences[b].acceptance, sequences[b].n_generated + len(before)) for b in members]
    drafts, proposal = s.acceptance.draft(texts, logits)
    return drafts.astype(mx.uint32)[:, None], proposal, logits
