"""The MTP head: its keys and values, the pairs that are pending for it, and the drafts that it makes.

The head has keys and values for each token of a sequence but the last, each made from a verified hidden state:

    pair i     hidden h_i, token t_i+1  ->  a draft of t_i+2
    further drafts feed the head's own output, and their keys and values are trimmed

A pair of a hidden state and the token after it is pending until the head drafts again: a step without drafts leaves its pair
for later. After a step with drafts each sequence has as many pairs as tokens that it has decided on:

    pairs of a window            a0 a1 a2 a3      of which the first sequence has four,
                                 b0 b1  .  .      the second two
    added to keys and values     a0 a1 a2
                                 b0
    through the whole layer               a3
                                    b1
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..caches.positions import Positions, rope_at
from ..caches.prompt_cache import PromptCache
from ..caches.rows import HeadRows
from ..layers.compiled import Compiler
from ..layers.drafting import draft_logits
from ..layers.mtp import append_keys_and_values, run_head
from ..layers.passes import in_pass, pass_of_head
from ..models.protocol import MTPModel
from ..sampling.acceptance import n_leading
from ..sampling.processors import restoring_random_state
from .sequence import Sequence
from .window import NO_TOKENS, Records

MAX_PENDING = 512  # pairs that steps without the head's drafts leave to it for later

Pending = list[tuple[mx.array, mx.array, int]]  # hidden states [B, T, H], tokens [B, T], and the columns that count


class NoHead:
    """``HeadCache`` of a model without a head: no keys, values or pairs."""

    nbytes = n_verified = 0

    def extend(self, hidden: mx.array, tokens: mx.array, counts: list[int]) -> None:
        pass

    def can_draft(self, b: int) -> bool:
        return True  # drafts of sources that need no head

    def join(self, caches: list[PromptCache], tokens: mx.array | None) -> None:
        pass

    def filter(self, keep: list[int]) -> None:
        pass

    def move_to(self, cache: PromptCache) -> None:
        pass

    def extract(self, b: int) -> KVCache:
        return KVCache()

    def finalize(self, n: int) -> None:
        pass


class HeadCache:
    """The head's keys and values of one sequence or several, with the pairs that are pending.

    One sequence uses the head's ``KVCache`` of its prompt cache in place, several use ``HeadRows``.
    """

    def __init__(self, model: MTPModel, compiler: Compiler):
        self.model, self.compiler = model, compiler
        self.cache: Any = HeadRows()
        # Hidden states [B, T, H] and tokens [B, T], of which the first t columns are pairs of at least one sequence. They are
        # not cut to t here: a slice is lazy, and another thread that closes the generator could not evaluate it.
        self.pending: Pending = []
        self.counts: list[int] = []  # the number of pending pairs of each sequence
        self.positions: list[Positions | None] = []  # of each sequence's pairs, if it has images
        # For one sequence: the index of the first pair that has keys and values, and the number of keys and values made from
        # verified hidden states. Later ones belong to drafts, or to an interrupted pass.
        self.first_position = 0
        self.n_verified: Any = 0

    @property
    def nbytes(self) -> int:
        n: int = self.cache.nbytes
        return n

    def extend(self, hidden: mx.array, tokens: mx.array, counts: list[int]) -> None:
        """Add pending pairs: the first ``counts[b]`` of tokens [B, T], and the hidden states before them, [B, T, H]."""
        if self.pending and (self._is_ragged or max(self.counts) >= MAX_PENDING):
            self.catch_up()
            mx.async_eval(self.cache.state)
        self.pending.append((hidden, tokens, max(counts)))
        self.counts = [n + new for n, new in zip(self.counts, counts)]

    def can_draft(self, b: int) -> bool:
        """Whether sequence b has a pair to draft from, which the first token of a text lacks."""
        return self.counts[b] > 0

    def run(self, hidden: mx.array, tokens: mx.array) -> mx.array:
        """A pass of the head over hidden states [B, t, H] and tokens [B, t] -> its output for the last, [B, 1, H]"""
        return run_head(self.model, hidden, tokens, self.cache, positions=self._own_positions, compiler=self.compiler)

    def catch_up(self, most: int | None = None) -> mx.array:
        """Run the head over the pending pairs, and remove them.

        Args:
            most (int, optional): The number of pairs to run over; the others are dropped. Default: ``None``, all.

        Returns:
            mx.array: The head's output for each sequence's last pair, [B, 1, H].
        """
        hidden, tokens = (x[:, :most] for x in _joined(self.pending))
        with in_pass(pass_of_head(hidden.shape[1], self.model.drafting, self.compiler)):
            out = self._catch_up_ragged(hidden, tokens) if self._is_ragged else self.run(hidden, tokens)
        # In one statement: an interrupt before it leaves all pairs pending.
        self.n_verified, self.pending, self.counts = self.cache.offset, [], [0] * len(self.counts)
        return out

    def _catch_up_ragged(self, hidden: mx.array, tokens: mx.array) -> mx.array:
        mtp, before = self.model.mtp, [max(n - 1, 0) for n in self.counts]
        pairs = mtp.combine(self.model.model.embed_tokens(tokens), hidden)  # [B, t, H]
        if (t := pairs.shape[1]) > 1:
            append_keys_and_values(mtp.layers[0], pairs[:, :-1], self.cache)
            self.cache.trim_each([t - 1 - n for n in before])
        out = mtp.decode(_of_each(pairs, before), self.cache)
        self.cache.trim_each([1 - min(n, 1) for n in self.counts])
        return out

    def _keep_last_pair(self) -> None:
        """Leave at most one pair pending for each sequence, in one column, so that sequences can join and leave."""
        if not self.pending:
            return
        (hidden, tokens), columns = _joined(self.pending), [max(n - 1, 0) for n in self.counts]
        if (t := hidden.shape[1]) > 1:
            pairs = self.model.mtp.combine(self.model.model.embed_tokens(tokens), hidden)[:, :-1]
            with rope_at(self._own_positions):
                append_keys_and_values(self.model.mtp.layers[0], pairs, self.cache)
            if self._is_ragged:
                self.cache.trim_each([t - 1 - n for n in columns])
            hidden, tokens = _of_each(hidden, columns), _of_each(tokens, columns)
        elif t == 0:
            hidden, tokens = (x[:, :1] for x in self.pending[0][:2])
        self.n_verified, self.counts = self.cache.offset, [min(n, 1) for n in self.counts]
        self.pending = [(hidden, tokens, max(self.counts))]

    @property
    def _is_ragged(self) -> bool:
        """Whether sequences differ in the number of pairs that are pending."""
        return len(self.counts) > 1 and min(self.counts) < sum(n for *_, n in self.pending)

    @property
    def _own_positions(self) -> Positions | None:
        """The positions of one sequence; ``HeadRows`` has those of several."""
        return self.positions[0] if isinstance(self.cache, KVCache) else None

    def join(self, caches: list[PromptCache], tokens: mx.array | None) -> None:
        """Add a sequence for each prompt cache.

        Args:
            tokens (mx.array, optional): The next token of each, [B, 1]. ``None`` before the prompt is prefilled.
        """
        positions = [c.head_positions for c in caches]
        if not self.counts and len(caches) == 1:
            self.cache, self.pending = caches[0].head, []
            self.n_verified, self.first_position = self.cache.offset, caches[0].first_position
            if tokens is None:
                self.n_verified = math.inf  # prefill adds keys and values, and removes those of an interrupted chunk
        else:
            self._keep_last_pair()
            if isinstance(self.cache, KVCache):
                self.cache = HeadRows([self.cache], [_shift(self.positions[0])])
            assert tokens is not None
            _append_image_pairs(self.model, caches, tokens)
            self.cache.join([c.head for c in caches], [_shift(p) for p in positions])
        self.positions = [*self.positions, *positions]
        if tokens is None:
            self.counts = [0]
            return
        none = mx.zeros_like(self.model.model.embed_tokens(tokens[:1]))  # [1, 1, H]
        hidden = mx.concatenate([none if c.last_hidden is None else c.last_hidden for c in caches])
        for held, held_tokens, _ in self.pending:
            hidden, tokens = mx.concatenate([held, hidden]), mx.concatenate([held_tokens, tokens])
        self.counts = [*self.counts, *(int(c.last_hidden is not None) for c in caches)]
        self.pending = [(hidden, tokens, max(self.counts))]

    def filter(self, keep: list[int]) -> None:
        """Keep these sequences."""
        self._keep_last_pair()
        if len(keep) == 1:
            self.cache = self.cache.extract(keep[0])
        else:
            self.cache.filter(keep)
        kept = mx.array(keep)
        self.pending = [(hidden[kept], tokens[kept], n) for hidden, tokens, n in self.pending]
        self.counts, self.positions = [self.counts[b] for b in keep], [self.positions[b] for b in keep]
        self.n_verified = self.cache.offset

    def move_to(self, cache: PromptCache) -> None:
        """Put the keys and values of the one sequence that is left into its prompt cache."""
        cache.entries[-2], self.first_position = self.cache, cache.n_tokens - self.cache.offset - self.counts[0]

    def extract(self, b: int) -> KVCache:
        """A copy of sequence b's keys and values, pending pairs included."""
        self._keep_last_pair()
        rows = HeadRows([self.cache]) if isinstance(self.cache, KVCache) else self.cache
        cache = rows.extract(b)
        if self.pending and self.counts[b] > 0:
            hidden, tokens = _joined(self.pending)
            run_head(self.model, hidden[b : b + 1], tokens[b : b + 1], cache, positions=self.positions[b])
        return cache

    def finalize(self, n: int) -> None:
        """Leave one sequence with the keys and values of its first n pairs, after an interrupt at any line of a move."""
        n_verified = min(self.n_verified, self.cache.offset)  # fewer where ``SingleCache.restore`` undid a pass
        wanted = max(n - self.first_position, 0)
        self.cache.trim(self.cache.offset - min(n_verified, wanted))
        if wanted > n_verified:
            self.catch_up(wanted - n_verified)


def _joined(pending: Pending) -> tuple[mx.array, mx.array]:
    """The pending hidden states [B, t, H] and tokens [B, t]"""
    hidden = mx.concatenate([h[:, :n] for h, _, n in pending], axis=1)
    return hidden, mx.concatenate([t[:, :n] for _, t, n in pending], axis=1)


def _append_image_pairs(model: MTPModel, caches: list[PromptCache], tokens: mx.array) -> None:
    """Run the head over the pending pair of an image's last token and the next token, of [B, 1].

    ``HeadRows`` takes plain positions only, so such a pair cannot join it.
    """
    for cache, token in zip(caches, tokens):
        positions, hidden = cache.head_positions, cache.last_hidden
        if positions is not None and hidden is not None and not positions.are_plain(cache.head.offset):
            run_head(model, hidden, token[None], cache.head, positions=positions)
            cache.last_hidden = None


def _shift(positions: Positions | None) -> int:
    return 0 if positions is None else positions.shift


def _of_each(x: mx.array, columns: list[int]) -> mx.array:
    """One column of x [B, t, ...] for each sequence -> [B, 1, ...]"""
    if len(set(columns)) == 1:
        return x[:, columns[0] : columns[0] + 1]
    index = mx.array(columns).reshape(-1, *[1] * (x.ndim - 1))
    return mx.take_along_axis(x, index, axis=1)


class HeadDrafter:
    """
    Args:
        model (MTPModel): The model, with its output layer of drafts.
        head (HeadCache): The head's keys and values of the sequences to draft for.
    """

    def __init__(self, model: MTPModel, head: HeadCache | NoHead):
        self.model, self.head = model, head
        self.lm_head = model.drafting.lm_head

    def propose(self, sequences: list[Sequence], limits: list[int]) -> tuple[mx.array, Records]:
        """
        Args:
            sequences (List[Sequence]): The sequences to draft for.
            limits (List[int]): The number of drafts of each; fewer where a sequence's sampler or logits processor raises, which
              ends its text only if a token comes there.

        Returns:
            Tuple[mx.array, List[List[Any]]]: Drafts [B, k], and the records of each sequence's drafts.
        """
        head = self.head
        assert isinstance(head, HeadCache)  # ``resolve`` refuses drafts of the head for a model without one
        # Of one sequence, drafts are dropped from the first position on where the head gives no token this probability.
        p_min = (sequences[0].options.draft_p_min or 0.0) if len(sequences) == 1 else 0.0
        own = [b for b, s in enumerate(sequences) if limits[b] > 0 and (p_min > 0 or not s.is_greedy)]
        records, sure, drafts = (
            Records([] for _ in sequences),
            list[mx.array](),
            list[mx.array](),
        )  # drafts are each [B, 1]
        k, out = max(limits), head.catch_up()  # [B, 1, H]
        for i in range(k):
            if i > 0:
                out = head.run(out, drafts[-1])
            logits = draft_logits(self.model, self.lm_head, out)  # [B, V]
            tokens = mx.argmax(logits, axis=-1, keepdims=True)
            for b in (b for b in own if len(records[b]) == i < limits[b]):
                with suppress(Exception), restoring_random_state():  # no draft, and the target calls them again
                    s, before = sequences[b], mx.concatenate([d[b] for d in drafts]) if drafts else NO_TOKENS
                    logprobs = s.logprobs(logits[b : b + 1], before)
                    token, record = s.acceptance.draft(logprobs, s.n_generated + i)
                    tokens = with_drafts(tokens, b, token.astype(mx.uint32))
                    records[b].append(record)
                    # By the likeliest token, not by the drafted one: dropping drafts by their own probability would change
                    # the distribution of the text.
                    sure.append(mx.exp(logprobs.max(axis=-1)) >= p_min)
            drafts.append(tokens)
        head.cache.trim(k - 1)
        for b in own:
            limits[b] = len(records[b])
        if p_min > 0 and limits[0] > 0:
            is_sure: Any = mx.concatenate(sure).tolist()
            limits[0] = n_leading(is_sure)
        tokens = mx.concatenate(drafts, axis=1) if k > 1 else drafts[0]
        return tokens[:, : max(limits)], [of_one[:n] for of_one, n in zip(records, limits)]

    def observe(self, tokens: Iterable[int]) -> None:
        """Add tokens of the texts to the draft vocabulary, so that any of them can be drafted."""
        if self.lm_head is not None:
            self.lm_head = self.lm_head.with_tokens(tokens)

    def forget(self, tokens: Iterable[int]) -> None:
        """Reduce the draft vocabulary to the loaded one and these tokens, after sequences have left."""
        self.lm_head = self.model.drafting.lm_head
        self.observe(tokens)


def with_drafts(tokens: mx.array, b: int, own: mx.array) -> mx.array:
    """Put the drafts [n] of sequence b into those of all, [B, k] -> [B, max(k, n)]"""
    if len(tokens) == 1:
        return own[None]
    if (n := len(own)) > tokens.shape[1]:
        tokens = mx.pad(tokens, [(0, 0), (0, n - tokens.shape[1])])
    tokens[b, :n] = own
    return tokens
