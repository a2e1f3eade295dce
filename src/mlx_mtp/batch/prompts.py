"""The waiting sequences of a batch, whose prompts are prefilled."""

import copy
import math
import time
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import mlx.core as mx

from ..caches.single import KVOptions, SingleCache
from ..decoding.prefill import prefill_chunk
from ..decoding.sequence import Sequence
from ..models.protocol import MTPModel
from ..pacing.prefill_budget import PrefillBudget
from .responses import PromptResponse


class Prompts:
    """Prefills prompts one after the other, without their last tokens.

    Args:
        model (MTPModel): The model to prefill with.
        kv (KVOptions): The quantization of keys and values.

    Attributes:
        n_prefilled (int): The number of tokens prefilled so far, of all prompts.
        seconds (float): The time of this prefill.
    """

    def __init__(self, model: MTPModel, kv: KVOptions):
        self.model, self.kv = model, kv
        self.sequences: deque[Sequence] = deque()
        self.n_prefilled, self.seconds = 0, 0.0

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def remove(self, uids: Collection[int]) -> None:
        self.sequences = deque(s for s in self.sequences if s.uid not in uids)

    def caches(self, uids: Collection[int], copied: bool) -> dict[int, tuple[list[Any], list[int]]]:
        """The prompt caches of waiting sequences at this moment, or copies of them, and the tokens in each."""
        found = {s.uid: (s.cache.entries, s.tokens) for s in self.sequences if s.uid in uids}
        return copy.deepcopy(found) if copied else found

    def ready(self, most: int) -> list[Sequence]:
        """The first sequences, up to a number, whose prompts are prefilled except for the last token."""
        return [s for s in self.sequences if _is_prefilled(s)][: max(most, 0)]

    def take(self, ready: list[Sequence]) -> None:
        """Remove sequences, which begin to generate from the last token of their prompts."""
        for s in ready:
            self.sequences.remove(s)
            s.tokens += s.segments.pop()

    def prefill(self, budget: PrefillBudget, is_running: bool) -> list[PromptResponse]:
        """Prefill as many tokens between two steps as the budget allows.

        Args:
            budget (PrefillBudget): Gives the number of tokens to prefill, and observes their time.
            is_running (bool): Whether other sequences generate.
        """
        waiting = [s for s in self.sequences if not _is_prefilled(s)]
        if not waiting:
            return []
        if waiting[0].pending is not None:
            return self._embed(waiting[0], budget, is_running)
        n_cached = waiting[0].cache.n_tokens
        n_left = n = budget.next(n_cached, is_running)
        start = time.perf_counter()
        responses: list[PromptResponse] = []
        for s in waiting:
            if n_left > 0 and s.pending is None:
                n_before = s.n_prefilled
                responses.append(self._prefill(s, n_left))
                n_left -= s.n_prefilled - n_before
        if responses:
            seconds = time.perf_counter() - start
            budget.record_chunk(n - n_left, n_cached, seconds)
            self.n_prefilled, self.seconds = self.n_prefilled + n - n_left, self.seconds + seconds
        return responses

    def next_chunk(self, most: int) -> tuple[int, int]:
        """The largest of the next chunks of up to ``most`` tokens: its length, and the length of its text up to its end."""
        chunks = [(min(len(s.segments[0]), most), s.cache.n_tokens) for s in self.sequences if not _is_prefilled(s)]
        return max(((n, n_cached + n) for n, n_cached in chunks), key=math.prod, default=(0, 0))

    def _embed(self, s: Sequence, budget: PrefillBudget, is_running: bool) -> list[PromptResponse]:
        """Compute the pending embeddings of a prompt for as long as the budget allows before the next step."""
        assert s.pending is not None
        if (seconds := budget.seconds(is_running)) <= 0:
            return []
        start = time.perf_counter()
        if s.pending.advance(seconds):
            s.embeddings, s.pending = s.pending.array, None
        budget.record(time.perf_counter() - start)
        return [PromptResponse(s.uid, (s.n_prefilled, s.n_prompt), False, False)]

    def _prefill(self, s: Sequence, most: int) -> PromptResponse:
        """Prefill up to ``most`` tokens of a prompt, at most to the end of a segment."""
        segment, cache = s.segments[0], s.cache
        tokens, s.segments[0] = segment[:most], segment[most:]
        n_cached, embeddings = cache.n_tokens, s.embeddings
        if embeddings is not None:
            embeddings, s.embeddings = embeddings[: len(tokens)], embeddings[len(tokens) :]
        cache.images = s.images
        prefill_chunk(self.model, SingleCache(cache, self.kv), mx.array(tokens, mx.uint32), embeddings)
        s.tokens += tokens
        s.n_prefilled += len(tokens)
        cache.record(n_cached + len(tokens), s.text_of(n_cached + len(tokens)))
        is_end = not s.segments[0]
        if is_end:
            s.segments.pop(0)
        return PromptResponse(s.uid, (s.n_prefilled, s.n_prompt), is_end, False)


def _is_prefilled(s: Sequence) -> bool:
    """Whether a sequence's prompt is prefilled except for the last token."""
    return len(s.segments) == 1 and s.pending is None
