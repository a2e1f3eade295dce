"""The moves of speculative decoding on several rows: draft, verify, accept, roll back. Each row accepts by itself.

A window is the rows' decided tokens with k drafts behind each, [B, k + 1]. It stays in flight until the next step: only
``accept`` waits for the device, and without drafts nothing does, so that the next pass is built while the last one runs.

A row joins with a prompt cache of all its tokens but the last, which is the decided one. It ends at a decided token as well:
while the pass over that token is in flight, the row's prompt cache is that after the window's first token. So rows come and go
between two steps, whatever the others do.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..decoding.acceptance import n_leading
from ..decoding.exchange import Exchange
from ..models.prompt_cache import PromptCache, make_head_cache
from ..models.protocol import MTPModel
from ..models.rows import RowsCache
from .drafter import RowsDrafter
from .row import Row


@dataclass
class Step:
    """What a window yielded.

    Args:
        rows (List[Row]): Those of the window.
        choices (mx.array): The tokens that each row has decided on, [B, T]; the host may not know them yet.
        logprobs (mx.array): Of rows that are chosen together, [B, T, V].
        own_logprobs (Dict[int, List[mx.array]]): Of the other rows, by index, each [1, V].
        n_drafted (List[int]): Drafts that each row took.
        n_accepted (List[int]): Those of them that it accepted.
    """

    rows: list[Row]
    choices: mx.array
    logprobs: mx.array
    own_logprobs: dict[int, list[mx.array]]
    n_drafted: list[int]
    n_accepted: list[int]

    @property
    def n_drafts(self) -> int:
        """The number of drafts in the window."""
        return self.choices.shape[1] - 1

    @property
    def is_plain(self) -> bool:
        """Whether the window had no drafts."""
        return self.n_drafts == 0

    def take(self) -> None:
        """Hand each row its tokens, up to the one that ends it. This waits for the device."""
        choices: Any = self.choices.tolist()
        self.tokens = [
            [] if row.finish_reason is not None else row.take(chosen[: n_accepted + 1], n_drafted, n_accepted)
            for row, chosen, n_drafted, n_accepted in zip(self.rows, choices, self.n_drafted, self.n_accepted)
        ]

    def logprobs_of(self, b: int, t: int) -> mx.array:
        """Of row b's token t, [V]."""
        return self.own_logprobs[b][t].squeeze(0) if b in self.own_logprobs else self.logprobs[b, t]


class Batch:
    """The rows that generate, and their caches, between two moves.

    Args:
        model (MTPModel): Its backbone verifies, its head drafts.
        return_prompt_caches (bool): Whether a row that ends is given its prompt cache.
        exchange (Exchange, optional): Goes with each pass where several ranks run the model.
    """

    def __init__(self, model: MTPModel, return_prompt_caches: bool, exchange: Exchange | None = None):
        self.model, self.return_prompt_caches, self.exchange = model, return_prompt_caches, exchange
        self.window: mx.array | None = None
        self.kept: list[int] | None = None
        self.rows: list[Row] = []
        self.clear()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """The size of the caches."""
        return self.cache.nbytes + self.drafter.cache.nbytes

    def clear(self) -> None:
        """Let go of all rows."""
        if self.exchange is not None and self.window is not None and self.kept is None:
            self.exchange.receive([])  # what went with the window in flight
        self.rows = []
        self.cache, self.drafter = RowsCache(self.model), RowsDrafter(self.model)
        self.decided = mx.zeros((0, 1), mx.uint32)  # each row's next token, [B, 1]
        self.plain_step: Step | None = None  # whose tokens the rows have not taken yet
        # The window in flight: its tokens [B, T], what came of them, and the drafts in it.
        self.window = None
        self.hidden = self.logits = self.drafts = self.decided  # [B, T, H], [B, T, V], [B, T - 1]
        self.records: list[list[Any]] = []
        self.limits: list[int] = []  # the number of drafts that each row takes
        self.kept = None  # after ``accept``: how many of the window's tokens stay

    # Draft

    @property
    def max_drafts(self) -> int:
        """The most drafts that the next window can use, but for copies of which a row has a number of its own."""
        return max(min(row.most_drafts, self._room(b, row)) for b, row in enumerate(self.rows))

    def _room(self, b: int, row: Row) -> int:
        """The most drafts that row b can take: a window yields one more token than it accepts."""
        is_waiting = self.plain_step is not None and row in self.plain_step.rows
        if row.finish_reason is not None or row.error is not None or not self.drafter.can_draft(b):
            return 0
        return max(row.max_tokens - is_waiting - 1, 0)

    def draft(self, k: int) -> int:
        """
        Draft for each row: up to k tokens with the head, or copies where these are likelier.

        Args:
            k (int): What the rows share. A row with a number of copies of its own takes as many.

        Returns:
            int: The most drafts of any row, which is what the window has.
        """
        copies: dict[int, int] = {}
        self.limits = []
        for b, row in enumerate(self.rows):
            room = self._room(b, row)
            n_drafts = min(k, row.max_drafts, room)
            n_copies = min(row.copy_drafts if isinstance(row.copy_drafts, int) else k, room)
            row.is_copying = n_copies > 0 and row.copies_better(n_copies, n_drafts)
            if row.is_copying:
                copies[b] = n_copies
            self.limits.append(0 if row.is_copying else n_drafts)
        self.drafts, self.records = mx.zeros((len(self), 0), mx.uint32), [[] for _ in self.rows]
        if (n_head := max(self.limits)) > 0:
            self.drafts, self.records = self.drafter.propose(n_head, self.rows, self.limits)
        n = max(n_head, *copies.values(), 0)
        self.drafts = mx.pad(self.drafts, [(0, 0), (0, n - n_head)])  # [B, n]
        for b, n_copies in copies.items():
            self._copy(b, n_copies)
        if n > 0:
            mx.async_eval(self.drafts)
        return n

    def _copy(self, b: int, n: int) -> None:
        row = self.rows[b]
        assert row.copies is not None
        self.limits[b] = n
        self.drafts[b, :n], self.records[b] = row.copies.propose(n, row.n_unread)

    # Verify

    def verify(self) -> None:
        """Start a pass over the rows' decided tokens and drafts."""
        self._settle()
        window = mx.concatenate([self.decided, self.drafts], axis=1)
        caches: Any = self.cache.entries
        n_confirmed = int(window.shape[1] > 1)
        self.logits, self.hidden = self.model(window, cache=caches, return_hidden=True, n_confirmed=n_confirmed)
        self.window = window
        told = [] if self.exchange is None else self.exchange.send(self.hidden)
        mx.async_eval(self.logits, self.hidden, self.cache.states, told)

    # Accept

    def accept(self) -> Step | None:
        """Each row accepts or rejects its drafts. Without drafts this does not wait for the device."""
        if self.window is None:
            return None
        T = self.window.shape[1]
        step, accepted = self._verdict()
        if T > 1:
            mx.eval(step.choices, accepted)
            leading: Any = accepted.tolist()
            step.n_accepted = [n_leading(row[:n]) for row, n in zip(leading, self.limits)]
            self._take(step)
            self.kept = [max(len(tokens), 1) for tokens in step.tokens]
            self.decided = mx.take_along_axis(step.choices, mx.array(self.kept)[:, None] - 1, axis=1)
            self.plain_step = None
        else:
            mx.async_eval(step.choices)
            self.kept, self.decided, self.plain_step = [1] * len(self), step.choices, step
        self.drafter.extend(self.hidden, step.choices, self.kept)
        for b, row in enumerate(self.rows):
            row.decide(step.choices[b, : self.kept[b]])
        return step

    def wait(self, step: Step) -> None:
        """Hand over the tokens of a step without drafts, while the device runs the next pass."""
        if step.is_plain:
            self._take(step)
            self.plain_step = None

    def _take(self, step: Step) -> None:
        step.take()
        if self.exchange is not None:
            self.exchange.receive([token for tokens in step.tokens for token in tokens])
        self.drafter.read(token for tokens in step.tokens for token in tokens)

    def _verdict(self) -> tuple[Step, mx.array]:
        """(the step, which of the drafts each row accepts [B, T - 1])"""
        logprobs = self.logits - mx.logsumexp(self.logits, axis=-1, keepdims=True)  # [B, T, V]
        choices = mx.argmax(logprobs, axis=-1)  # [B, T]
        accepted = choices[:, :-1] == self.drafts
        own_logprobs = {}
        own = [b for b, row in enumerate(self.rows) if row.finish_reason is None and not row.is_plain]
        if choices.shape[1] == 1:
            own = self._draw_together(own, logprobs, choices)
        for b in own:
            with self.rows[b].own_errors():
                own_logprobs[b], tokens, stand = self._verdict_of(b, self.rows[b])
                choices[b, : len(tokens)] = tokens
                accepted[b, : len(stand)] = stand
        for row in self.rows:
            if row.error is not None and row.finish_reason is None:
                row.finish_reason = "error"
                row.prompt_cache = self.extract(row) if self.return_prompt_caches else None
        return Step(self.rows[:], choices, logprobs, own_logprobs, self.limits, [0] * len(self)), accepted

    def _draw_together(self, rows: list[int], logprobs: mx.array, choices: mx.array) -> list[int]:
        """Choose the tokens [B, 1] of rows with equal samplers in one call of each, as mlx-lm does -> the other rows."""
        groups: dict[Any, list[int]] = {}
        for b in rows:
            if (key := self.rows[b].drawn_with) is not None:
                groups.setdefault(key, []).append(b)
        for members in groups.values():
            index, first = mx.array(members), self.rows[members[0]]
            with first.own_errors():
                choices[index] = first.sampler(logprobs[index, 0])[:, None]
            for b in members:
                self.rows[b].error = first.error
        return [b for b in rows if self.rows[b].drawn_with is None]

    def _verdict_of(self, b: int, row: Row) -> tuple[list[mx.array], mx.array, mx.array]:
        """Of a row with a sampler or processors of its own: (log probabilities, choices [t], accepted [t - 1 or t])"""
        k, records = self.limits[b], self.records[b]
        drafts = self.drafts[b, :k]
        logprobs: list[mx.array] = []
        choices: list[mx.array] = []
        accepted: list[mx.array] = []
        # One position after the other where a processor keeps state, all at once elsewhere.
        for i, j in [(i, i + 1) for i in range(k + 1)] if row.in_order else [(0, k + 1)]:
            logprobs += [row.logprobs(self.logits[b : b + 1, t], drafts[:t]) for t in range(i, j)]
            verdict = row.acceptance.accept(logprobs[i:], drafts[i:j], records[i:j], row.n_decided + i)
            choices.append(verdict.tokens.astype(mx.uint32))
            accepted.append(verdict.accepted)
            if row.in_order and i < k and not verdict.accepted.item():
                break
        return logprobs, mx.concatenate(choices), mx.concatenate(accepted)

    # Roll back

    def _settle(self) -> None:
        """Take what was rejected out of the caches."""
        if self.kept is not None:
            self.cache.roll_back(self.kept)
            self.window, self.kept = None, None

    # Rows come and go

    def join(self, rows: list[Row], caches: list[PromptCache]) -> None:
        """Add rows, each with the prompt cache of its tokens but the last."""
        self._settle()
        tokens = mx.array([row.tokens[-1:] for row in rows], mx.uint32)
        self.drafter.join(caches, tokens)
        self.cache.join([c.backbone for c in caches], [c.n_tokens for c in caches])
        self.decided = mx.concatenate([self.decided, tokens])
        self.rows = [*self.rows, *rows]
        for row in rows:
            row.begin()
            self.drafter.read(row.tokens)

    def filter(self, rows: list[Row]) -> None:
        """Keep these rows."""
        keep = [b for b, row in enumerate(self.rows) if row in rows]
        if len(keep) == len(self):
            return
        if not keep:
            self.clear()
            return
        self._settle()
        self.drafter.filter(keep)
        self.cache.filter(keep)
        self.decided = self.decided[mx.array(keep)]
        self.rows = [self.rows[b] for b in keep]
        self.drafter.forget(token for row in self.rows for token in row.tokens)

    def goes_on(self, row: Row) -> bool:
        """Whether a row has tokens to come, or is still to be given its prompt cache."""
        if row.is_out or self.return_prompt_caches:
            return not row.is_out
        is_last = self.plain_step is not None and row in self.plain_step.rows and row.max_tokens == 1
        return row.finish_reason is None and not is_last

    def extract(self, row: Row) -> list[Any]:
        """While a window is in flight: the prompt cache of a row's tokens."""
        b = self.rows.index(row)
        _, last = make_head_cache(self.model)
        entries = [*self.cache.extract(b), self.drafter.extract(b), last]
        cache = PromptCache(entries, len(self.model.layers))
        cache.last_hidden = mx.contiguous(self.hidden[b : b + 1, :1])
        cache.record(self.cache.rows.lengths[b] + 1, [*row.before, *row.tokens])
        mx.async_eval([c.state for c in entries])  # at once: they refer to the caches of all rows
        return entries
