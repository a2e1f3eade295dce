"""The model's MTP head as a source of drafts."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import mlx.core as mx

from ..layers.draft_lm_head import draft_logits
from ..models.protocol import MTPModel
from ..sampling.acceptance import n_leading
from ..sampling.processors import restoring_random_state
from .head_cache import HeadCache, NoHead
from .sequence import Sequence
from .window import NO_TOKENS, Records


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
        own = [n > 0 and (p_min > 0 or not s.is_greedy) for s, n in zip(sequences, limits)]
        choosers = {b: _Chooser(s, p_min) for b, s in enumerate(sequences) if own[b]}
        k, drafts = max(limits), list[mx.array]()  # each [B, 1]
        out = head.catch_up()  # [B, 1, H]
        for i in range(k):
            if i > 0:
                out = head.run(out, drafts[-1])
            logits = draft_logits(self.model, self.lm_head, out)  # [B, V]
            drafts.append(
                _choose(logits, drafts, {b: c for b, c in choosers.items() if len(c.records) == i < limits[b]})
            )
        head.cache.trim(k - 1)
        for b, chooser in choosers.items():
            limits[b] = len(chooser.records)
        if p_min > 0 and limits[0] > 0:
            sure: Any = mx.concatenate(choosers[0].sure).tolist()
            limits[0] = n_leading(sure)
        tokens = mx.concatenate(drafts, axis=1) if k > 1 else drafts[0]
        records = [choosers[b].records[:n] if b in choosers else [] for b, n in enumerate(limits)]
        return tokens[:, : max(limits)], records

    def observe(self, tokens: Iterable[int]) -> None:
        """Add tokens of the texts to the draft vocabulary, so that any of them can be drafted."""
        if self.lm_head is not None:
            self.lm_head = self.lm_head.with_tokens(tokens)

    def forget(self, tokens: Iterable[int]) -> None:
        """Reduce the draft vocabulary to the loaded one and these tokens, after sequences have left."""
        self.lm_head = self.model.drafting.lm_head
        self.observe(tokens)


class _Chooser:
    """Draws a sequence's drafts, one after the other."""

    def __init__(self, sequence: Sequence, p_min: float):
        self.sequence, self.p_min = sequence, p_min
        self.records: list[Any] = []
        self.sure: list[mx.array] = []

    def choose(self, logits: mx.array, drafts: list[mx.array]) -> mx.array:
        """Logits [1, V] after the drafts before it, each [1] -> a draft, [1]"""
        s = self.sequence
        logprobs = s.logprobs(logits, mx.concatenate(drafts) if drafts else NO_TOKENS)
        token, record = s.acceptance.draft(logprobs, s.n_generated + len(self.records))
        self.records.append(record)
        if self.p_min > 0:
            # By the likeliest token, not by the drafted one: dropping drafts by their own probability would change the
            # distribution of the text.
            self.sure.append(mx.exp(logprobs.max(axis=-1)) >= self.p_min)
        return token.astype(mx.uint32)


def _choose(logits: mx.array, drafts: list[mx.array], choosers: dict[int, _Chooser]) -> mx.array:
    """Logits [B, V] after the drafts before, each [B, 1] -> the next ones, [B, 1]"""
    tokens = mx.argmax(logits, axis=-1, keepdims=True)
    for b, chooser in choosers.items():
        with suppress(Exception), restoring_random_state():  # no draft, and the target calls them again
            token = chooser.choose(logits[b : b + 1], [d[b] for d in drafts])
            if len(logits) == 1:
                return token[:, None]
            tokens[b] = token
    return tokens
