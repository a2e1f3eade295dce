"""What runs next, a step or a chunk of a prompt: for the sequences of a ``BatchGenerator``, and for one text alone."""

import math
import time
from collections import deque
from itertools import chain, islice
from typing import TypeAlias

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.generate_utils import BatchCounters

from ..caches.rows import KVOptions
from ..decoding.decoder import Decoder
from ..decoding.loop import step
from ..decoding.planner import Planner
from ..decoding.prefill import ends_with_token, prefill_part
from ..decoding.sequence import PendingEmbeddings, Sequence
from ..decoding.window import Stepped
from ..distributed.ranks import synchronize
from ..models.mixin import MTPModel
from ..pacing.depth import Depth
from .prefill_budget import PrefillBudget

PromptResponse: TypeAlias = PromptProcessingBatch.Response  # the progress of a prompt's prefill


class Scheduler:
    """Sequences that wait, are prefilled one after the other, and generate together.

    With ``keeps_ended``, a sequence that has ended takes part in one more step, so that its prompt cache can be extracted.
    """

    def __init__(
        self,
        model: MTPModel,
        kv: KVOptions,
        prefill_budget: PrefillBudget,
        stream: mx.Stream | mx.ThreadLocalStream,
        completion_batch_size: int = 1,
        keeps_ended: bool = True,
        depth: Depth | None = None,
    ):
        self.model, self.prefill_budget, self.stream = model, prefill_budget, stream
        self.completion_batch_size, self.keeps_ended = completion_batch_size, keeps_ended
        self.prompts: deque[Sequence] = deque()  # that wait
        self.planner = Planner(model, depth)
        self.decoder = Decoder(model, kv, self.planner.exchange)
        self.at_work: Sequence | None = None  # the prompt whose chunk is being prefilled
        self._counters = BatchCounters()

    def close(self) -> None:
        """Remove all sequences."""
        self.prompts.clear()
        self.decoder.clear()
        if self.planner.exchange is not None:
            synchronize(self.stream)  # collectives of the pass in flight must not mix with those of another stream

    @property
    def next_chunk(self) -> tuple[int, int]:
        """The maximum number of tokens of the next prompt chunk, and of its text up to its end; (0, 0) for none."""
        size = self.prefill_budget.sizes[0]
        chunks = [(min(len(s.segments[0]), size), s.cache.n_tokens) for s in self._waiting(is_prefilled=False)]
        return max(((n, n_cached + n) for n, n_cached in chunks), key=math.prod, default=(0, 0))

    @property
    def growing(self) -> list[tuple[int, KVOptions]]:
        """The number of tokens in the caches of each sequence that the next step may extend, and its quantization."""
        waiting = islice(self.prompts, self._n_free)
        texts = [*zip(self.decoder.sequences, self.decoder.cache.n_tokens), *((s, s.cache.n_tokens) for s in waiting)]
        return [(n, s.kv) for s, n in texts]

    @property
    def _n_free(self) -> int:
        """The number of sequences that could generate in addition to the running ones."""
        return self.completion_batch_size - sum(s.end is None for s in self.decoder.sequences)

    def _waiting(self, is_prefilled: bool) -> list[Sequence]:
        """Those whose prompts are prefilled except for the last token, or not, of the waiting sequences that can generate."""
        return [s for s in islice(self.prompts, self._n_free) if s.is_prefilled is is_prefilled]

    def step(self) -> tuple[list[Sequence], list[Stepped]]:
        """Make a step of the sequences that generate -> those that joined before it, and the tokens of each."""
        start, decoder, ready = time.perf_counter(), self.decoder, self._waiting(is_prefilled=True)
        running = [s for s in decoder.sequences if s.end is None]

        def move() -> None:
            decoder.filter([s for s in running if self.keeps_ended or _has_more(s)])
            if ready:
                decoder.join(ready)
                self.prompts = deque(s for s in self.prompts if s not in ready)

        with mx.stream(self.stream):
            first = [decoder.begin(s) for s in ready if not ends_with_token(self.model, s)]
            stepped = [*chain(*first), *step(decoder, self.planner, move)]
        seconds, n_tokens = time.perf_counter() - start, sum(len(tokens) for _, tokens in stepped)
        self._counters.generation_tokens += n_tokens
        self._counters.decode_time += seconds
        self._counters.generation_steps += n_tokens > 0
        if stepped:
            self.prefill_budget.record_step(seconds)
        return ready, stepped

    def drop_ended(self) -> None:
        """Free the caches once all sequences have ended."""
        if all(s.end is not None for s in self.decoder.sequences):
            with mx.stream(self.stream):
                self.decoder.clear()
            self.planner.clear()

    def prefill(self) -> list[PromptResponse]:
        """Prefill as many tokens of the waiting prompts as the budget allows between two steps."""
        waiting, budget = self._waiting(is_prefilled=False), self.prefill_budget
        if not waiting:
            return []
        is_running = self._n_free < self.completion_batch_size
        with mx.stream(self.stream):
            if (pending := waiting[0].pending) is not None:
                responses = self._embed(waiting[0], pending, budget.seconds(is_running))
            else:
                n_cached = waiting[0].cache.n_tokens
                n = budget.next(n_cached, is_running)
                responses = self._prefill(waiting, n, n_cached)
        if responses:
            self.planner.is_interrupted = True
        return responses

    def _prefill(self, waiting: list[Sequence], n: int, n_cached: int) -> list[PromptResponse]:
        n_left, start, responses = n, time.perf_counter(), list[PromptResponse]()
        for s in waiting:
            if n_left > 0 and s.pending is None:
                self.at_work, n_before, n_segments = s, s.n_prefilled, len(s.segments)
                prefill_part(self.model, s, n_left)
                n_left -= s.n_prefilled - n_before
                ends_segment = len(s.segments) < n_segments
                responses.append(PromptResponse(s.uid, (s.n_prefilled, s.n_prompt), ends_segment, False))
        if responses:
            seconds = time.perf_counter() - start
            self.prefill_budget.record_chunk(n - n_left, n_cached, seconds)
            self._counters.prompt_tokens += n - n_left
            self._counters.prompt_time += seconds
        return responses

    def _embed(self, s: Sequence, pending: PendingEmbeddings, seconds: float) -> list[PromptResponse]:
        """Compute the embeddings of a prompt for so many seconds, if any."""
        if seconds <= 0:
            return []
        self.at_work, start = s, time.perf_counter()
        if pending.advance(seconds):
            s.embeddings, s.pending = pending.array, None
        self.prefill_budget.record(time.perf_counter() - start)
        return [PromptResponse(s.uid, (s.n_prefilled, s.n_prompt), False, False)]


def _has_more(s: Sequence) -> bool:
    """Whether tokens follow those that are committed."""
    return s.end is None and not 0 <= s.max_tokens <= s.n_generated
