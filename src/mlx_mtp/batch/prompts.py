"""The prompts of a batch, until their sequences generate."""

import copy
import time
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import mlx.core as mx

from ..caches.single import KVOptions, SingleCache
from ..decoding.prefill import prefill_chunk
from ..decoding.sequence import Sequence
from ..models.protocol import MTPModel
from ..pacing.prefill import PrefillPace
from .responses import PromptResponse


class Prompts:
    """They are read one after the other, as far as the last token of each.

    Args:
        model (MTPModel): Reads them.
        kv (KVOptions): When and how to quantize keys and values.

    Attributes:
        n_read (int): Tokens read so far, of all prompts.
        seconds (float): What that took.
    """

    def __init__(self, model: MTPModel, kv: KVOptions):
        self.model, self.kv = model, kv
        self.sequences: deque[Sequence] = deque()
        self.n_read, self.seconds = 0, 0.0

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def remove(self, uids: Collection[int]) -> None:
        self.sequences = deque(s for s in self.sequences if s.uid not in uids)

    def caches(self, uids: Collection[int], copied: bool) -> dict[int, tuple[list[Any], list[int]]]:
        """The prompt caches of sequences at this moment, and the tokens in them; themselves, or copies."""
        found = {s.uid: (s.cache.entries, s.tokens) for s in self.sequences if s.uid in uids}
        return copy.deepcopy(found) if copied else found

    def ready(self, most: int) -> list[Sequence]:
        """The first sequences whose prompts are read but for the last token."""
        return [s for s in self.sequences if _is_read(s)][: max(most, 0)]

    def take(self, ready: list[Sequence]) -> None:
        """These begin to generate, from the last token of their prompts."""
        for s in ready:
            self.sequences.remove(s)
            s.read(s.segments.pop())

    def read(self, pace: PrefillPace, is_running: bool) -> list[PromptResponse]:
        """Read as much as the pace says between two steps, with sequences that generate meanwhile or not."""
        waiting = [s for s in self.sequences if not _is_read(s)]
        if not waiting:
            return []
        if waiting[0].pending is not None:
            return self._embed(waiting[0], pace, is_running)
        n_cached = waiting[0].cache.n_tokens
        n_left = n = pace.next(n_cached, is_running)
        start = time.perf_counter()
        responses: list[PromptResponse] = []
        for s in waiting:
            if n_left > 0 and s.pending is None:
                n_before = s.n_read
                responses.append(self._read(s, n_left))
                n_left -= s.n_read - n_before
        if responses:
            seconds = time.perf_counter() - start
            pace.record_chunk(n - n_left, n_cached, seconds)
            self.n_read, self.seconds = self.n_read + n - n_left, self.seconds + seconds
        return responses

    def _embed(self, s: Sequence, pace: PrefillPace, is_running: bool) -> list[PromptResponse]:
        """Go on with the embeddings of a prompt, for as long as the pace allows before the next step."""
        assert s.pending is not None
        if (seconds := pace.seconds(is_running)) <= 0:
            return []
        start = time.perf_counter()
        if s.pending.advance(seconds):
            s.embeddings, s.pending = s.pending.array, None
        pace.record(time.perf_counter() - start)
        return [PromptResponse(s.uid, (s.n_read, s.n_prompt), False, False)]

    def _read(self, s: Sequence, most: int) -> PromptResponse:
        """Read up to ``most`` tokens of a prompt, at most to the end of a segment."""
        segment, cache = s.segments[0], s.cache
        tokens, s.segments[0] = segment[:most], segment[most:]
        n_cached, embeddings = cache.n_tokens, s.embeddings
        if embeddings is not None:
            embeddings, s.embeddings = embeddings[: len(tokens)], embeddings[len(tokens) :]
        cache.images = s.images
        prefill_chunk(self.model, SingleCache(cache, self.kv), mx.array(tokens, mx.uint32), embeddings)
        s.read(tokens)
        s.n_read += len(tokens)
        cache.record(n_cached + len(tokens), s.text_of(n_cached + len(tokens)))
        is_end = not s.segments[0]
        if is_end:
            s.segments.pop(0)
        return PromptResponse(s.uid, (s.n_read, s.n_prompt), is_end, False)


def _is_read(s: Sequence) -> bool:
    """Whether its prompt is read, but for the last token."""
    return len(s.segments) == 1 and s.pending is None
