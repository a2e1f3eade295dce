"""What runs next, a step or a chunk of a prompt: for the sequences of a ``BatchGenerator``, and for one text alone.

Prefill and decoding share one device. While answers run, the target for the gap between two of their tokens limits the length
of a chunk, and steps follow each chunk until decoding has had its share of the time. Without running answers, a prompt is
prefilled at full speed, in chunks short enough to notice a disconnect within a second. Sizes are a power of two apart, so that
shapes repeat. The budget reads no clock.
"""

import math
import time
from collections import deque
from itertools import chain, islice
from typing import TypeAlias

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.generate_utils import BatchCounters

from ...errors import MTPError
from ..caches.rows import KVOptions
from ..decoding.decoder import Decoder
from ..decoding.loop import step
from ..decoding.planner import Planner
from ..decoding.prefill import ends_with_token, prefill_part
from ..decoding.sequence import TextSequence
from ..decoding.window import Stepped
from ..distributed import Ranks, synchronize
from ..layers.passes import on_metal
from ..models.mixin import MTPModel
from ..pacing.depth import Depth
from . import MAX_TOKEN_GAP, MIN_DECODE_SHARE

PromptResponse: TypeAlias = PromptProcessingBatch.Response  # the progress of a prompt's prefill


class PrefillBudget:
    """Chooses the number of prompt tokens to prefill before each step, by the times of the chunks and steps so far.

    A size fits if its tokens, at the speed of the last chunk, take no longer than allowed. Longer chunks are faster per token,
    never slower, so the size may grow until it no longer fits. A speed is valid for texts up to twice as long as the measured
    one. Without a measured speed the chunk is short. On Metal, no chunk is to take longer than ``LONGEST``. Of several ranks,
    rank 0 chooses.
    """

    SHORTEST, UNMEASURED = 16, 64  # tokens of a chunk, unless the step size is less
    IDLE_CHUNK = 0.7  # seconds of a chunk while no answer runs, so that a disconnect is noticed within a second
    LONGEST = 2.0  # seconds of a chunk on Metal, where macOS stops passes that take long
    CHOOSE_EVERY = 8  # steps between two choices on several ranks, which wait for each other to choose
    FADING = 0.8  # the decay of the mean time of a step

    def __init__(
        self,
        prefill_step_size: int,
        max_token_gap: float = MAX_TOKEN_GAP,
        min_decode_share: float = MIN_DECODE_SHARE,
        ranks: Ranks | None = None,
    ):
        if not max_token_gap > 0:
            raise MTPError(f"max_token_gap must be more than 0 seconds, not {max_token_gap}.")
        if not 0 <= min_decode_share < 1:
            raise MTPError(f"min_decode_share must be from 0 to below 1, not {min_decode_share}.")
        self.longest = self.LONGEST if on_metal() else math.inf
        self.max_token_gap = max_token_gap
        self.ranks = ranks
        self.decode_per_prefill = min_decode_share / (1 - min_decode_share)  # seconds of decoding for one of prefill
        sizes = [prefill_step_size >> i for i in range(prefill_step_size.bit_length())]
        self.sizes = [n for n in sizes if n >= min(self.SHORTEST, prefill_step_size)]  # the greatest first
        self.chunk = 0  # the size chosen last
        self.seconds_per_token: float | None = None
        self.n_measured = 0  # tokens of the text up to the chunk that showed the speed
        self.step_seconds = 0.0  # the mean time of a step
        self.owed = 0.0  # seconds of decoding due before the next chunk
        self.n_steps = 0  # steps before the next choice

    def next(self, n_cached: int, is_running: bool) -> int:
        """The number of prompt tokens to prefill before the next step, after ``n_cached`` others; 0 if a step is due."""
        if is_running and self.n_steps > 0:
            self.n_steps -= 1
            return 0
        choice = self._choose(n_cached, is_running)
        self.chunk, self.n_steps = choice if self.ranks is None else self.ranks.broadcast(choice)
        return self.chunk

    def _choose(self, n_cached: int, is_running: bool) -> tuple[int, int]:
        """(tokens to prefill, steps until the next choice)"""
        seconds = self.seconds(is_running)  # It forgets what is owed if nothing runs.
        speed = self.seconds_per_token
        if self.owed > 0:
            n = 1 if self.ranks is None else min(self.owed / max(self.step_seconds, 1e-6), self.CHOOSE_EVERY)
            return 0, math.ceil(n) - 1
        if seconds < math.inf and (speed is None or n_cached > 2 * max(self.n_measured, self.sizes[0])):
            fitting = [n for n in self.sizes if n <= self.UNMEASURED]
        else:
            fitting = [n for n in self.sizes if n * (speed or 0.0) <= min(seconds, self.longest)]
        return [*fitting, self.sizes[-1]][0], 0

    def seconds(self, is_running: bool) -> float:
        """The seconds that work on a prompt may take before the next step; 0 if a step is due."""
        if not is_running:
            self.owed = 0.0
            return max(self.IDLE_CHUNK, self.max_token_gap)
        return 0.0 if self.owed > 0 else self.max_token_gap - self.step_seconds

    def record_chunk(self, n: int, n_cached: int, seconds: float) -> None:
        """Count a chunk of prefill: its tokens, after ``n_cached`` others, and its seconds."""
        self.record(seconds)
        # The short rest of a prompt takes longer per token than a full chunk.
        if 2 * n > self.chunk or (self.seconds_per_token is not None and seconds < n * self.seconds_per_token):
            self.seconds_per_token, self.n_measured = seconds / n, n_cached + n

    def record(self, seconds: float) -> None:
        """Count the seconds of other work on a prompt."""
        self.owed = seconds * self.decode_per_prefill

    def record_step(self, seconds: float) -> None:
        self.owed -= seconds
        is_first = self.step_seconds == 0
        self.step_seconds = seconds if is_first else self.FADING * self.step_seconds + (1 - self.FADING) * seconds


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
        self.model = model
        self.prefill_budget = prefill_budget
        self.stream = stream
        self.completion_batch_size = completion_batch_size
        self.keeps_ended = keeps_ended
        self.prompts: deque[TextSequence] = deque()  # the sequences that wait
        self.planner = Planner(model, depth)
        self.decoder = Decoder(model, kv, self.planner.exchange)
        self.at_work: TextSequence | None = None  # the prompt whose chunk is being prefilled
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
    def n_waiting(self) -> int:
        """The number of sequences of whose prompts nothing is prefilled yet, in any thread."""
        return sum(s.n_prefilled == 0 for s in tuple(self.prompts))

    @property
    def growing(self) -> list[tuple[int, KVOptions]]:
        """The number of tokens in the caches of each sequence that the next step may extend, and its quantization."""
        waiting = islice(self.prompts, self._n_free)
        running = zip(self.decoder.cache.n_tokens, self.decoder.sequences)
        return [(n, s.kv) for n, s in (*running, *((s.cache.n_tokens, s) for s in waiting))]

    @property
    def _n_free(self) -> int:
        """The number of sequences that could generate in addition to the running ones."""
        return self.completion_batch_size - sum(s.end is None for s in self.decoder.sequences)

    def _waiting(self, is_prefilled: bool) -> list[TextSequence]:
        """Those whose prompts are prefilled except for the last token, or not, of the waiting sequences that can generate."""
        return [s for s in islice(self.prompts, self._n_free) if s.is_prefilled is is_prefilled]

    def step(self) -> tuple[list[TextSequence], list[Stepped]]:
        """Make a step of the sequences that generate -> those that joined before it, and the tokens of each."""
        start = time.perf_counter()
        ready = self._waiting(is_prefilled=True)
        running = [s for s in self.decoder.sequences if s.end is None]

        def move() -> None:
            # Without ``keeps_ended``, a sequence leaves as soon as its last token is committed.
            self.decoder.filter([s for s in running if self.keeps_ended or (s.end is None and not s.is_complete)])
            if ready:
                self.decoder.join(ready)
                self.prompts = deque(s for s in self.prompts if s not in ready)

        with mx.stream(self.stream):
            first = [self.decoder.begin(s) for s in ready if not ends_with_token(self.model, s)]
            stepped = [*chain(*first), *step(self.decoder, self.planner, move)]
        seconds = time.perf_counter() - start
        n_tokens = sum(len(tokens) for _, tokens in stepped)
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
        waiting = self._waiting(is_prefilled=False)
        if not waiting:
            return []
        is_running = self._n_free < self.completion_batch_size
        work = self._prefill if waiting[0].pending is None else self._embed
        with mx.stream(self.stream):
            responses = work(waiting, is_running)
        if responses:
            self.planner.is_interrupted = True
        return responses

    def _embed(self, waiting: list[TextSequence], is_running: bool) -> list[PromptResponse]:
        """Compute a part of the embeddings of the first prompt."""
        start = time.perf_counter()
        s = self.at_work = waiting[0]
        assert s.pending is not None
        if (seconds := self.prefill_budget.seconds(is_running)) <= 0:
            return []
        if s.pending.advance(seconds):
            s.embeddings, s.pending = s.pending.array, None
        self.prefill_budget.record(time.perf_counter() - start)
        return [PromptResponse(s.task.uid, (s.n_prefilled, s.n_prompt), False, False)]

    def _prefill(self, waiting: list[TextSequence], is_running: bool) -> list[PromptResponse]:
        """Prefill a chunk, of more than one prompt if they are short."""
        responses = list[PromptResponse]()
        n_cached = waiting[0].cache.n_tokens
        n = n_left = self.prefill_budget.next(n_cached, is_running)
        start = time.perf_counter()  # once all ranks know the number
        for s in waiting:
            if n_left > 0 and s.pending is None:
                self.at_work = s
                n_before, n_segments = s.n_prefilled, len(s.segments)
                prefill_part(self.model, s, n_left)
                n_left -= s.n_prefilled - n_before
                ends_segment = len(s.segments) < n_segments
                responses.append(PromptResponse(s.task.uid, (s.n_prefilled, s.n_prompt), ends_segment, False))
        if responses:
            seconds = time.perf_counter() - start
            self.prefill_budget.record_chunk(n - n_left, n_cached, seconds)
            self._counters.prompt_tokens += n - n_left
            self._counters.prompt_time += seconds
        return responses
