"""The model's MTP head as a source of drafts."""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from ..layers.draft_lm_head import draft_logits
from ..models.protocol import MTPModel
from ..sampling.acceptance import n_leading
from ..sampling.processors import for_drafts
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

    def propose(self, sequences: list[Sequence], limits: list[int], p_min: float) -> tuple[mx.array, Records]:
        """
        Args:
            sequences (List[Sequence]): The sequences to draft for.
            limits (List[int]): The number of drafts of each. Set to 0 where a sequence's logits processor fails.
            p_min (float): For one sequence, drop the drafts from the first position on where the head gives no token this
              probability. Costs a synchronization with the host; ``0`` keeps all.

        Returns:
            Tuple[mx.array, List[List[Any]]]: Drafts [B, k], and the records of each sequence's drafts.
        """
        head = self.head
        assert isinstance(head, HeadCache)  # ``resolve`` refuses drafts of the head for a model without one
        k, choosers = max(limits), self._choosers(sequences, limits, p_min)
        drafts: list[mx.array] = []  # each [B, 1]
        out = head.catch_up()  # [B, 1, H]
        for i in range(k):
            if i > 0:
                out = head.run(out, drafts[-1])
            logits = draft_logits(self.model, self.lm_head, out)  # [B, V]
            drafts.append(_choose(logits, drafts, {b: c for b, c in choosers.items() if i < limits[b]}))
        head.cache.trim(k - 1)
        for b, chooser in choosers.items():
            with sequences[b].own_errors():
                chooser.roll_back()
        if p_min > 0:
            sure = choosers[0].sure if choosers else []  # no chooser where a processor has failed
            limits[0] = k = n_leading(mx.concatenate(sure).tolist()) if sure else 0  # type: ignore[arg-type]
        limits[:] = [0 if s.finish_reason == "error" else n for s, n in zip(sequences, limits)]
        tokens = mx.concatenate(drafts, axis=1) if k > 1 else drafts[0]
        return tokens[:, :k] if p_min > 0 else tokens, [
            choosers[b].records[:k] if b in choosers else [] for b in range(len(sequences))
        ]

    def _choosers(self, sequences: list[Sequence], limits: list[int], p_min: float) -> dict[int, "_Chooser"]:
        """A chooser for each sequence whose drafts are not just the likeliest tokens, by index."""
        choosers = {}
        for b, s in enumerate(sequences):
            if limits[b] > 0 and (p_min > 0 or not s.is_greedy):
                with s.own_errors():
                    choosers[b] = _Chooser(s, p_min)
        return choosers

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
        self.processors, self.rolled_back = for_drafts(sequence.logits_processors)

    def choose(self, logits: mx.array, drafts: list[mx.array]) -> mx.array:
        """Logits [1, V] after the drafts before it, each [1] -> a draft, [1]"""
        s = self.sequence
        before = mx.concatenate(drafts) if drafts and self.processors else NO_TOKENS
        logprobs = s.logprobs(logits, before, self.processors)
        token, record = s.acceptance.draft(logprobs, s.n_generated + len(self.records))
        self.records.append(record)
        if self.p_min > 0:
            # By the likeliest token, not by the drafted one: dropping drafts by their own probability would change the
            # distribution of the text.
            self.sure.append(mx.exp(logprobs.max(axis=-1)) >= self.p_min)
        return token.astype(mx.uint32)

    def roll_back(self) -> None:
        """Undo the processors' calls for the drafts, unless the sequence has failed."""
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
