"""The MTP head as a source of drafts for several rows.

As for one sequence (``decoding/drafter.py``), the head has a row of keys and values for each pair of a hidden state h_i and the
token after it, t_i+1. A step adds as many pairs as a sequence has accepted, and the last of them gives the first draft:

    pairs of a window            a0 a1 a2 a3      of which the first sequence has accepted four,
                                 b0 b1  .  .      the second two
    added to keys and values     a0 a1 a2
                                 b0
    through the whole layer               a3
                                    b1
"""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..decoding.drafter import MAX_PENDING
from ..decoding.processors import for_drafts
from ..models.draft_lm_head import draft_logits
from ..models.mtp import append_rows
from ..models.prompt_cache import PromptCache
from ..models.protocol import MTPModel
from ..models.rows import Rows, RowsKVCache
from .row import Row


class RowsDrafter:
    """
    Args:
        model (MTPModel): Its head, embedding and output layer.
    """

    def __init__(self, model: MTPModel):
        self.model = model
        (self.layer,) = model.mtp.layers
        self.rows = Rows()
        self.cache = RowsKVCache(self.rows)
        self.lm_head = model.drafting.lm_head
        # Pairs that the head has no keys and values of: hidden states [B, t, H] and tokens [B, t], and how many of them each
        # sequence has. They differ after a window with drafts, and where a text begins, whose first token has none.
        self.pending: list[tuple[mx.array, mx.array]] = []
        self.counts: list[int] = []

    def extend(self, hidden: mx.array, tokens: mx.array, counts: list[int]) -> None:
        """Take the first ``counts[b]`` decided tokens of tokens [B, T], and the hidden states before them, [B, T, H]."""
        T, n = tokens.shape[1], sum(t.shape[1] for _, t in self.pending)
        are_all = all(c == n for c in self.counts) and all(c == T for c in counts)
        if self.pending and not (are_all and n < MAX_PENDING):
            self._append(self._pairs(), self.counts)
            mx.async_eval(self.cache.keys, self.cache.values)
            self.pending, self.counts = [], [0] * len(counts)
        self.pending.append((hidden, tokens))
        self.counts = [c + new for c, new in zip(self.counts or [0] * len(counts), counts)]

    def can_draft(self, b: int) -> bool:
        """Whether row b has a pair to draft from: not the first token of a text."""
        return self.counts[b] > 0

    def propose(self, k: int, rows: list[Row], limits: list[int]) -> tuple[mx.array, list[list[Any]]]:
        """
        Args:
            k (int): The number of drafts, from 1 on.
            rows (List[Row]): What each is drafted for.
            limits (List[int]): How many of the drafts each takes. Set to 0 where a row's logits processor fails.

        Returns:
            Tuple[mx.array, List[List[Any]]]: Drafts [B, k], and what each row's ``Acceptance.draft`` returned with its own.
        """
        choosers: dict[int, _Chooser] = {}
        for b, row in enumerate(rows):
            if limits[b] > 0 and not row.is_plain:
                with row.own_errors():
                    choosers[b] = _Chooser(row)
        out = self.model.mtp.decode(self._last_pair(), self.cache)  # [B, 1, H]
        self.rows.add([min(c, 1) for c in self.counts])
        self.pending, self.counts = [], []
        lengths, drafts = self.rows.lengths, mx.zeros((len(rows), 0), mx.uint32)
        for i in range(k):
            if i > 0:
                embeddings = self.model.model.embed_tokens(drafts[:, -1:])
                out = self.model.mtp.decode(self.model.mtp.combine(embeddings, out), self.cache)
                self.rows.add([1] * len(rows))
            logits = draft_logits(self.model, self.lm_head, out)  # [B, V]
            tokens = mx.argmax(logits, axis=-1, keepdims=True)  # [B, 1]
            for b, chooser in choosers.items():
                if i < limits[b] and rows[b].error is None:
                    with rows[b].own_errors():
                        tokens[b] = chooser.choose(logits[b : b + 1], drafts[b])
            drafts = mx.concatenate([drafts, tokens.astype(mx.uint32)], axis=1)
        for b, chooser in choosers.items():
            with rows[b].own_errors():
                chooser.roll_back()
        self.rows.set(lengths)  # further drafts were made from the head's own output
        limits[:] = [0 if row.error is not None else n for row, n in zip(rows, limits)]
        return drafts, [choosers[b].records if b in choosers else [] for b in range(len(rows))]

    def read(self, tokens: Iterable[int]) -> None:
        """Drafts can be any token of the texts, whatever the draft vocabulary."""
        if self.lm_head is not None:
            self.lm_head = self.lm_head.with_tokens(tokens)

    def forget(self, tokens: Iterable[int]) -> None:
        """Of the texts, only these tokens are left."""
        self.lm_head = self.model.drafting.lm_head
        self.read(tokens)

    def join(self, caches: list[PromptCache], tokens: mx.array) -> None:
        """Add a row for each sequence, whose next tokens [B, 1] are decided."""
        self._keep_last_pair()
        self.cache.join([c.head for c in caches])
        self.rows.set([*self.rows.lengths, *(c.head.offset for c in caches)])
        none = mx.zeros_like(self.model.model.embed_tokens(tokens[:1]))  # [1, 1, H]
        hidden = mx.concatenate([none if c.last_hidden is None else c.last_hidden for c in caches])
        for held in self.pending:
            hidden, tokens = mx.concatenate([held[0], hidden]), mx.concatenate([held[1], tokens])
        self.pending = [(hidden, tokens)]
        self.counts += [int(c.last_hidden is not None) for c in caches]

    def filter(self, keep: list[int]) -> None:
        """Keep these rows."""
        self._keep_last_pair()
        self.rows.set([self.rows.lengths[b] for b in keep])
        self.cache.filter(keep)
        rows = mx.array(keep)
        self.pending = [(hidden[rows], tokens[rows]) for hidden, tokens in self.pending]
        self.counts = [self.counts[b] for b in keep]

    def extract(self, b: int) -> KVCache:
        """The keys and values of row b's pairs, pending ones included."""
        self._keep_last_pair()
        cache = self.cache.extract(b, self.rows.lengths[b])
        if self.pending and self.counts[b] > 0:
            append_rows(self.layer, self._pairs()[b : b + 1], cache)
        return cache

    def _pairs(self) -> mx.array:
        """What the layer takes for the pending pairs, [B, t, H]"""
        hidden, tokens = self._joined()
        return self.model.mtp.combine(self.model.model.embed_tokens(tokens), hidden)

    def _joined(self) -> tuple[mx.array, mx.array]:
        """All pending hidden states [B, t, H] and tokens [B, t]"""
        return mx.concatenate([h for h, _ in self.pending], axis=1), mx.concatenate(
            [t for _, t in self.pending], axis=1
        )

    def _append(self, pairs: mx.array, counts: list[int]) -> None:
        append_rows(self.layer, pairs, self.cache)
        self.rows.add(counts)

    def _last_pair(self) -> mx.array:
        """Add all pending pairs but each sequence's last -> the last ones, [B, 1, H]"""
        pairs, before = self._pairs(), [max(c - 1, 0) for c in self.counts]
        if pairs.shape[1] > 1:
            self._append(pairs[:, :-1], before)
        return _of_each(pairs, before)

    def _keep_last_pair(self) -> None:
        """Leave one pair pending for each sequence, so that rows can be taken out and put in."""
        if sum(t.shape[1] for _, t in self.pending) > 1:
            hidden, tokens = self._joined()
            before = [max(c - 1, 0) for c in self.counts]
            self._last_pair()
            self.pending = [(_of_each(hidden, before), _of_each(tokens, before))]
            self.counts = [min(c, 1) for c in self.counts]


class _Chooser:
    """Draws a row's drafts, one after the other."""

    def __init__(self, row: Row):
        self.row, self.records = row, []  # type: tuple[Row, list[Any]]
        self.processors, self.rolled_back = for_drafts(row.logits_processors)  # type: tuple[list[Any], list[Any]]

    def choose(self, logits: mx.array, drafts: mx.array) -> mx.array:
        """Logits [1, V] after the drafts before it [i] -> a draft, [1]"""
        logprobs = self.row.logprobs(logits, drafts, self.processors)
        token, record = self.row.acceptance.draft(logprobs, self.row.n_decided + len(self.records))
        self.records.append(record)
        return token

    def roll_back(self) -> None:
        """Take the calls for the drafts back; those of a row that has failed no longer matter."""
        for processor in self.rolled_back if self.row.error is None else []:
            processor.rollback(len(self.records))


def _of_each(x: mx.array, columns: list[int]) -> mx.array:
    """Each row's own column of x [B, t, ...] -> [B, 1, ...]"""
    if len(set(columns)) == 1:
        return x[:, columns[0] : columns[0] + 1]
    index = mx.array(columns).reshape(-1, *[1] * (x.ndim - 1))
    return mx.take_along_axis(x, index, axis=1)
