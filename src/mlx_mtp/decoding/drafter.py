"""The model's MTP head as a source of drafts: it proposes tokens, and is told what was decided.

The head has a row of keys and values for each token of a sequence but the last, each made from a verified hidden state:

    row i      hidden h_i, token t_i+1  ->  a draft of t_i+2
    further drafts feed the head's own output, and their rows are trimmed

Such a pair of a hidden state and the token after it is pending until the head drafts again: a step without drafts leaves its
pair for later. After a step with drafts each sequence has as many pairs as it has accepted:

    pairs of a window            a0 a1 a2 a3      of which the first sequence has four,
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

from ..models.draft_lm_head import draft_logits
from ..models.mtp import append_rows, run_head
from ..models.passes import in_pass, pass_of_head
from ..models.positions import Positions, rope_at
from ..models.prompt_cache import PromptCache
from ..models.protocol import MTPModel
from ..models.rows import HeadRows
from .acceptance import n_leading
from .processors import for_drafts
from .sequence import Sequence
from .window import NO_TOKENS, Records

MAX_PENDING = 512  # pairs that steps without the head's drafts leave to it for later


class NoHead:
    """In place of the head of a model that has none."""

    nbytes = n_rows = 0

    def extend(self, hidden: mx.array, tokens: mx.array, counts: list[int]) -> None:
        pass

    def can_draft(self, b: int) -> bool:
        return True  # what needs no head

    def propose(self, sequences: list[Sequence], limits: list[int], p_min: float) -> tuple[mx.array, Records]:
        raise ValueError("The model has no MTP head.")

    def read(self, tokens: Iterable[int]) -> None:
        pass

    def forget(self, tokens: Iterable[int]) -> None:
        pass

    def join(self, caches: list[PromptCache], tokens: mx.array | None) -> None:
        pass

    def filter(self, keep: list[int]) -> None:
        pass

    def extract(self, b: int) -> KVCache:
        return KVCache()

    def finalize(self, n: int) -> None:
        pass


class HeadDrafter:
    """The MTP head as a source of drafts for one sequence or several.

    One sequence keeps the head's ``KVCache`` of its prompt cache, several have theirs in ``HeadRows``.

    Args:
        model (MTPModel): Its head, embedding and output layer.
    """

    def __init__(self, model: MTPModel):
        self.model = model
        self.cache: Any = HeadRows()
        self.lm_head = model.drafting.lm_head
        # Hidden states [B, T, H] and tokens [B, T], of which the first t columns are pairs of a sequence at least. They are not
        # cut to t here: a slice is lazy, and who closes the generator in another thread could not evaluate it.
        self.pending: list[tuple[mx.array, mx.array, int]] = []
        self.counts: list[int] = []  # pending pairs of each sequence
        self.positions: list[Positions | None] = []  # of each sequence's rows, if it has images
        # Of one sequence: the first row's position, and the rows that are done; others are of drafts, or of a pass not done.
        self.n_rows: Any = 0
        self.first_row = 0

    @property
    def nbytes(self) -> int:
        n: int = self.cache.nbytes
        return n

    def extend(self, hidden: mx.array, tokens: mx.array, counts: list[int]) -> None:
        """Take the first ``counts[b]`` decided tokens of tokens [B, T], and the hidden states before them, [B, T, H]."""
        if self.pending and (self._is_ragged or max(self.counts) >= MAX_PENDING):
            self._catch_up()
            mx.async_eval(self.cache.state)
        self.pending.append((hidden, tokens, max(counts)))
        self.counts = [n + new for n, new in zip(self.counts, counts)]

    def can_draft(self, b: int) -> bool:
        """Whether sequence b has a pair to draft from: not the first token of a text."""
        return self.counts[b] > 0

    def propose(self, sequences: list[Sequence], limits: list[int], p_min: float) -> tuple[mx.array, Records]:
        """
        Args:
            sequences (List[Sequence]): What each is drafted for.
            limits (List[int]): How many drafts each takes. Set to 0 where a sequence's logits processor fails.
            p_min (float): With one sequence, drop drafts from the first on where the head gives no token this probability. It
              costs a synchronization with the host; ``0`` keeps all.

        Returns:
            Tuple[mx.array, List[List[Any]]]: Drafts [B, k], and the records of each sequence's own.
        """
        k, choosers = max(limits), self._choosers(sequences, limits, p_min)
        drafts: list[mx.array] = []  # each [B, 1]
        out = self._catch_up()  # [B, 1, H]
        for i in range(k):
            if i > 0:
                out = self._run(out, drafts[-1])
            logits = draft_logits(self.model, self.lm_head, out)  # [B, V]
            drafts.append(_choose(logits, drafts, {b: c for b, c in choosers.items() if i < limits[b]}))
        self.cache.trim(k - 1)
        for b, chooser in choosers.items():
            with sequences[b].own_errors():
                chooser.roll_back()
        if p_min > 0:
            sure = choosers[0].sure if choosers else []  # none where a processor has failed
            limits[0] = k = n_leading(mx.concatenate(sure).tolist()) if sure else 0  # type: ignore[arg-type]
        limits[:] = [0 if s.finish_reason == "error" else n for s, n in zip(sequences, limits)]
        tokens = mx.concatenate(drafts, axis=1) if k > 1 else drafts[0]
        return tokens[:, :k] if p_min > 0 else tokens, [
            choosers[b].records[:k] if b in choosers else [] for b in range(len(sequences))
        ]

    def _choosers(self, sequences: list[Sequence], limits: list[int], p_min: float) -> dict[int, "_Chooser"]:
        """Of the sequences whose drafts are not just the likeliest tokens."""
        choosers = {}
        for b, s in enumerate(sequences):
            if limits[b] > 0 and (p_min > 0 or not s.is_greedy):
                with s.own_errors():
                    choosers[b] = _Chooser(s, p_min)
        return choosers

    def read(self, tokens: Iterable[int]) -> None:
        """Drafts can be any token of the texts, whatever the draft vocabulary."""
        if self.lm_head is not None:
            self.lm_head = self.lm_head.with_tokens(tokens)

    def forget(self, tokens: Iterable[int]) -> None:
        """Of the texts, only these tokens are left."""
        self.lm_head = self.model.drafting.lm_head
        self.read(tokens)

    def _run(self, hidden: mx.array, tokens: mx.array) -> mx.array:
        """A pass of the head over hidden states [B, t, H] and tokens [B, t] -> its output for the last, [B, 1, H]"""
        return run_head(self.model, hidden, tokens, self.cache, positions=self._own_positions)

    @property
    def _own_positions(self) -> Positions | None:
        """Those of one sequence. ``HeadRows`` has the positions of several."""
        return self.positions[0] if isinstance(self.cache, KVCache) else None

    # Pending pairs

    @property
    def _is_ragged(self) -> bool:
        """Whether sequences differ in the number of pairs that are pending."""
        return len(self.counts) > 1 and min(self.counts) < sum(n for *_, n in self.pending)

    def _joined(self, most: int | None = None) -> tuple[mx.array, mx.array]:
        """The first pending hidden states [B, t, H] and tokens [B, t]"""
        hidden = mx.concatenate([h[:, :n] for h, _, n in self.pending], axis=1)
        return hidden[:, :most], mx.concatenate([t[:, :n] for _, t, n in self.pending], axis=1)[:, :most]

    def _catch_up(self, most: int | None = None) -> mx.array:
        """Make rows of the first pending pairs, and forget the others -> the head's output for the last, [B, 1, H]"""
        hidden, tokens = self._joined(most)
        catch_up = self._catch_up_ragged if self._is_ragged else self._run
        with in_pass(pass_of_head(self.model.drafting, hidden.shape[1])):
            out = catch_up(hidden, tokens)
        # At once: until here an interrupt leaves it to be done again.
        self.n_rows, self.pending, self.counts = self.cache.offset, [], [0] * len(self.counts)
        return out

    def _catch_up_ragged(self, hidden: mx.array, tokens: mx.array) -> mx.array:
        mtp, before = self.model.mtp, [max(n - 1, 0) for n in self.counts]
        pairs = mtp.combine(self.model.model.embed_tokens(tokens), hidden)  # [B, t, H]
        if (t := pairs.shape[1]) > 1:
            append_rows(mtp.layers[0], pairs[:, :-1], self.cache)
            self.cache.trim_each([t - 1 - n for n in before])
        out = mtp.decode(_of_each(pairs, before), self.cache)
        self.cache.trim_each([1 - min(n, 1) for n in self.counts])
        return out

    def _keep_last_pair(self) -> None:
        """Leave one pair pending for each sequence, or none, in one column: so they can come and go."""
        if not self.pending:
            return
        (hidden, tokens), columns = self._joined(), [max(n - 1, 0) for n in self.counts]
        if (t := hidden.shape[1]) > 1:
            pairs = self.model.mtp.combine(self.model.model.embed_tokens(tokens), hidden)[:, :-1]
            with rope_at(self._own_positions):
                append_rows(self.model.mtp.layers[0], pairs, self.cache)
            if self._is_ragged:
                self.cache.trim_each([t - 1 - n for n in columns])
            hidden, tokens = _of_each(hidden, columns), _of_each(tokens, columns)
        elif t == 0:
            hidden, tokens = (x[:, :1] for x in self.pending[0][:2])
        self.n_rows, self.counts = self.cache.offset, [min(n, 1) for n in self.counts]
        self.pending = [(hidden, tokens, max(self.counts))]

    # Sequences come and go

    def join(self, caches: list[PromptCache], tokens: mx.array | None) -> None:
        """Add a sequence for each prompt cache.

        Args:
            tokens (mx.array, optional): The next token of each, [B, 1]. ``None`` where it has its row already.
        """
        positions = [c.head_positions for c in caches]
        if not self.counts and len(caches) == 1:
            self.cache, self.pending = caches[0].head, []
            self.n_rows, self.first_row = self.cache.offset, caches[0].first_row
        else:
            self._keep_last_pair()
            if isinstance(self.cache, KVCache):
                self.cache = HeadRows([self.cache], [_shift(self.positions[0])])
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
        rows = mx.array(keep)
        self.pending = [(hidden[rows], tokens[rows], n) for hidden, tokens, n in self.pending]
        self.counts, self.positions = [self.counts[b] for b in keep], [self.positions[b] for b in keep]
        self.n_rows = self.cache.offset

    def extract(self, b: int) -> KVCache:
        """A copy of sequence b's keys and values, pending pairs included."""
        self._keep_last_pair()
        rows = HeadRows([self.cache]) if isinstance(self.cache, KVCache) else self.cache
        cache = rows.extract(b)
        if self.pending and self.counts[b] > 0:
            hidden, tokens = self._joined()
            run_head(self.model, hidden[b : b + 1], tokens[b : b + 1], cache, positions=self.positions[b])
        return cache

    def finalize(self, n: int) -> None:
        """Leave one sequence with the rows of its first n pairs, whatever part of a move was done: their number tells that."""
        n_rows = min(self.n_rows, self.cache.offset)  # less where an interrupted pass was taken back
        wanted = max(n - self.first_row, 0)
        self.cache.trim(self.cache.offset - min(n_rows, wanted))
        if wanted > n_rows:
            self._catch_up(wanted - n_rows)


class _Chooser:
    """Draws a sequence's drafts, one after the other."""

    def __init__(self, sequence: Sequence, p_min: float):
        self.sequence, self.p_min = sequence, p_min
        self.records: list[Any] = []
        self.sure: list[mx.array] = []
        self.processors, self.rolled_back = for_drafts(sequence.logits_processors)

    def choose(self, logits: mx.array, drafts: list[mx.array]) -> mx.array:
        """Logits [1, V] after the drafts before it, each [1] -> a draft, [1]"""
        s = self.sequence
        before = mx.concatenate(drafts) if drafts and self.processors else NO_TOKENS
        logprobs = s.logprobs(logits, before, self.processors)
        token, record = s.acceptance.draft(logprobs, s.n_decided + len(self.records))
        self.records.append(record)
        if self.p_min > 0:
            # By the likeliest token, not by the one drafted: to drop a draft for what it is would change the distribution.
            self.sure.append(mx.exp(logprobs.max(axis=-1)) >= self.p_min)
        return token.astype(mx.uint32)

    def roll_back(self) -> None:
        """Take the calls for the drafts back; those of a sequence that has failed no longer matter."""
        for processor in self.rolled_back if self.sequence.finish_reason != "error" else []:
            processor.rollback(len(self.records))


def _choose(logits: mx.array, drafts: list[mx.array], choosers: dict[int, _Chooser]) -> mx.array:
    """Logits [B, V] after the drafts before, each [B, 1] -> the next ones, [B, 1]"""
    if len(choosers) == len(logits) == 1 and choosers[0].sequence.finish_reason != "error":
        with choosers[0].sequence.own_errors():
            return choosers[0].choose(logits, [d[0] for d in drafts])[:, None]
    tokens = mx.argmax(logits, axis=-1, keepdims=True)
    for b, chooser in choosers.items():
        if chooser.sequence.finish_reason != "error":
            with chooser.sequence.own_errors():
                tokens[b] = chooser.choose(logits[b : b + 1], [d[b] for d in drafts])
    return tokens


def _shift(positions: Positions | None) -> int:
    return 0 if positions is None else positions.shift


def _of_each(x: mx.array, columns: list[int]) -> mx.array:
    """Each row's own column of x [B, t, ...] -> [B, 1, ...]"""
    if len(set(columns)) == 1:
        return x[:, columns[0] : columns[0] + 1]
    index = mx.array(columns).reshape(-1, *[1] * (x.ndim - 1))
    return mx.take_along_axis(x, index, axis=1)
