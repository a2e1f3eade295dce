"""The model's MTP head as a source of drafts: it proposes tokens, and is told what was accepted.

The head's cache has a row for each of the backbone's tokens but the last, each made from a verified hidden state:

    row i      hidden h_i, token t_i+1  ->  a draft of t_i+2
    further drafts feed the head's own output, and their rows are trimmed
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor

from ..models.draft_lm_head import draft_logits
from ..models.mtp import run_head
from ..models.prompt_cache import PromptCache
from ..models.protocol import MTPModel
from .acceptance import Acceptance, n_leading
from .processors import for_drafts

MAX_PENDING = 512  # positions that steps without the head's drafts leave to it for later


class Drafts(NamedTuple):
    """k drafts for the positions after the last token that was decided."""

    tokens: mx.array  # [k]
    records: list[
        Any
    ]  # what ``Acceptance.draft`` returned with each; ``None`` for a copy, proposed with probability one

    def __len__(self) -> int:
        return len(self.records)


NO_DRAFTS = Drafts(mx.array([], mx.uint32), [])


class Drafter(Protocol):
    """Drafts from the backbone's hidden states. The decoder tells it of the prompt, of decided tokens, and of the end."""

    def prefill(self, hidden: mx.array | None, tokens: mx.array, embeddings: mx.array | None) -> None:
        """
        Args:
            hidden (mx.array, optional): The backbone's at the positions before the last t tokens, [1, t, H], with t = T, or
              T - 1 at the beginning of a text.
            tokens (mx.array): A chunk of the prompt, [T].
            embeddings (mx.array, optional): In place of the tokens', [T, H].
        """
        ...

    def extend(self, hidden: mx.array, tokens: mx.array) -> None:
        """Take n decided tokens [n], and the backbone's hidden states [1, T, H], the first n of them of the tokens before."""
        ...

    def propose(self, k: int, position: int) -> Drafts:
        """Up to k drafts, the first for this position of the generated text."""
        ...

    def read(self, tokens: Iterable[int]) -> None:
        """Take the tokens as the host learns of them: the prompt, then those decided."""
        ...

    def finalize(self, n_tokens: int) -> None:
        """Leave the prompt cache as that of its first ``n_tokens`` tokens. May come at any point, also of itself."""
        ...


class NoHead:
    """In place of the head of a model that has none."""

    def prefill(self, hidden: mx.array | None, tokens: mx.array, embeddings: mx.array | None) -> None:
        pass

    def extend(self, hidden: mx.array, tokens: mx.array) -> None:
        pass

    def propose(self, k: int, position: int) -> Drafts:
        return NO_DRAFTS

    def read(self, tokens: Iterable[int]) -> None:
        pass

    def finalize(self, n_tokens: int) -> None:
        pass


class HeadDrafter:
    """The MTP head as a source of drafts.

    Args:
        model (MTPModel): Its head, embedding and output layer.
        cache (PromptCache): Has the head's keys and values.
        acceptance (Acceptance): Draws drafts from the head's distribution.
        logits_processors (List[LogitsProcessor]): Applied to the head's logits where they can be.
        p_min (float): Drop drafts from the first on where the head gives no token this probability. It costs a
          synchronization with the host; ``0`` keeps all.
    """

    def __init__(
        self,
        model: MTPModel,
        cache: PromptCache,
        acceptance: Acceptance,
        logits_processors: list[LogitsProcessor],
        p_min: float = 0.0,
    ):
        self.model, self.cache = model, cache
        self.acceptance, self.logits_processors, self.p_min = acceptance, logits_processors, p_min
        self.lm_head = model.drafting.lm_head
        self.first_row = cache.first_row
        self.context = NO_DRAFTS.tokens  # [N], for the logits processors
        self.n_rows = cache.head.offset  # rows that are done; those after them are of drafts, or of a pass not done
        # Positions without a row yet: hidden states [1, T, H], and the t <= T tokens [t] after the first of them. They are not
        # cut to t here: a slice is lazy, and who closes the generator in another thread could not evaluate it.
        self.pending: list[tuple[mx.array, mx.array]] = []
        self.n_pending = 0

    def prefill(self, hidden: mx.array | None, tokens: mx.array, embeddings: mx.array | None) -> None:
        self._note(tokens)
        if hidden is not None and (t := hidden.shape[1]) > 0:
            run_head(self.model, hidden, tokens[-t:], self.cache.head, None if embeddings is None else embeddings[-t:])
            self.n_rows += t

    def extend(self, hidden: mx.array, tokens: mx.array) -> None:
        self._note(tokens)
        self.pending.append((hidden, tokens))
        self.n_pending += len(tokens)

    def propose(self, k: int, position: int) -> Drafts:
        if k == 0:
            if self.n_pending >= MAX_PENDING:
                self._catch_up()
                mx.async_eval(self.cache.head.state)
            return NO_DRAFTS
        processors, rolled_back = for_drafts(self.logits_processors)
        drafts: list[mx.array] = []
        sure: list[mx.array] = []
        records: list[Any] = []
        out = self._catch_up()  # [1, 1, H]
        for i in range(k):
            if i > 0:
                out = run_head(self.model, out, drafts[-1], self.cache.head)
            logits = draft_logits(self.model, self.lm_head, out)  # [1, V]
            for processor in processors:
                logits = processor(mx.concatenate([self.context, *drafts]), logits)
            logprobs = logits - mx.logsumexp(logits, keepdims=True)
            token, record = self.acceptance.draft(logprobs, position + i)
            drafts.append(token)  # [1]
            records.append(record)
            # By the likeliest token, not by the one drafted: to drop a draft for what it is would change the distribution.
            sure.append(mx.exp(logprobs.max(axis=-1)) >= self.p_min)
        for processor in rolled_back:
            processor.rollback(k)
        self.cache.head.trim(k - 1)
        n = n_leading(mx.concatenate(sure).tolist()) if self.p_min > 0 else k  # type: ignore[arg-type]
        return Drafts(mx.concatenate(drafts[:n]), records[:n]) if n > 0 else NO_DRAFTS

    def read(self, tokens: Iterable[int]) -> None:
        """Drafts can be any token of the text, whatever the draft vocabulary."""
        if self.lm_head is not None:
            self.lm_head = self.lm_head.with_tokens(tokens)

    def finalize(self, n_tokens: int) -> None:
        """A row for each token but the last: whatever part of a move was done, the number of rows tells what is missing."""
        head, wanted = self.cache.head, max(n_tokens - 1 - self.first_row, 0)
        n_rows = min(self.n_rows, head.offset)  # less where an interrupted chunk of the prompt was taken back
        head.trim(head.offset - min(n_rows, wanted))
        if wanted > n_rows:
            self._catch_up(wanted - n_rows)

    def _note(self, tokens: mx.array) -> None:
        if self.logits_processors:
            self.context = mx.concatenate([self.context, tokens])

    def _catch_up(self, n: int | None = None) -> mx.array:
        """Make rows of the first n pending positions, and forget the others -> the head's output for the last, [1, 1, H]"""
        hidden = mx.concatenate([h[:, : len(t)] for h, t in self.pending], axis=1)[:, :n]
        tokens = mx.concatenate([t for _, t in self.pending])[:n]
        out = run_head(self.model, hidden, tokens, self.cache.head)
        # At once: until here an interrupt leaves it to be done again.
        self.n_rows, self.pending, self.n_pending = self.cache.head.offset, [], 0
        return out
