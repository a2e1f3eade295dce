"""Continuous batching as in mlx-lm's ``BatchGenerator``, with drafts: sequences come and go between two steps."""

import contextlib
import copy
import time
from collections import deque
from collections.abc import Generator
from collections.abc import Sequence as ListOf
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import StopSequences, generation_stream
from mlx_lm.generate_utils import BatchCounters, BatchCountersSnapshot, BatchStats
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.sample_utils import LogitsProcessor, Sampler
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..decoding.counts import DraftCounts
from ..decoding.decoder import Decoder
from ..decoding.depth import MAX_DRAFT_TOKENS, Depth
from ..decoding.loop import check_embeddings, make_step
from ..decoding.options import CopyDrafts, DraftOptions, NumDraftTokens, check_model, resolve
from ..decoding.planner import Planner
from ..decoding.prefill import prefill_chunk
from ..decoding.sequence import Sequence
from ..decoding.timing import timing_of
from ..decoding.window import Step, Token
from ..models.positions import ImageSpan
from ..models.prompt_cache import open_prompt_cache, place_images
from ..models.single import KVOptions, SingleCache
from .prefill import MAX_TOKEN_GAP, MIN_DECODE_SHARE, PrefillPace

T = TypeVar("T")


@dataclass
class PromptResponse:
    """mlx-lm's ``PromptProcessingBatch.Response``: how far a prompt is read."""

    uid: int
    progress: tuple[int, int]  # tokens read, and all
    end_of_segment: bool
    end_of_prompt: bool


@dataclass
class Response:
    """mlx-lm's ``GenerationBatch.Response``: a token of a sequence. A step may yield several of the same one.

    Args:
        uid (int): Of the sequence.
        token (int): The token; of an error, the last one before it.
        logprobs (mx.array, optional): A vector of log probabilities, [V]; ``None`` with an error.
        finish_reason (str, optional): With the last token ``"stop"`` or ``"length"``. ``"error"`` comes without a token, where
          a sampler or a logits processor of the sequence raised.
        prompt_cache (List[Any], optional): With the last token, the prompt cache of ``all_tokens``.
        all_tokens (List[int], optional): With the last token, the prompt and the generated tokens.
        from_draft (bool): Whether the token was drafted by the head.
        counts (DraftCounts): Drafts made and accepted for the sequence so far.
        error (Exception, optional): What was raised.
    """

    uid: int
    token: int
    logprobs: mx.array | None
    finish_reason: str | None
    prompt_cache: list[Any] | None
    all_tokens: list[int] | None
    from_draft: bool
    counts: DraftCounts
    error: Exception | None = None


def _check_count(name: str, value: Any) -> int:
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be an integer of 1 or more, not {value}.")
    return int(value)


class BatchGenerator:
    """
    A batch generator implements continuous batching, as mlx-lm's ``BatchGenerator``, with drafts by the model's MTP head.

    Each sequence has its own prompt, cache, sampler, logits processors and end, and accepts or rejects its own drafts. Prompts
    are read one after the other, in chunks between two steps.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``.
        max_tokens (int): The maximum number of tokens of a sequence that does not say it. Default: ``128``.
        stop_tokens (Sequence[Sequence[int]], optional): Token sequences that end a sequence that does not say them.
        sampler (Sampler, optional): Of sequences that have none of their own. Default: ``None``, the most likely token.
        logits_processors (List[LogitsProcessor], optional): Of sequences that have none of their own. An object that keeps
          state from token to token belongs to one sequence.
        num_draft_tokens (Union[int, str], optional): The number of tokens to draft in a step, 0 to 8, or ``"auto"``, chosen at
          every step for speed. Default: ``None``, which is that of the settings, or ``"auto"``.
        copy_drafts (Union[int, str], optional): Copy the drafts of a sequence that repeats itself, where copies are likelier
          accepted than the head's drafts: up to this many in a step, 1 to 16, ``"auto"``, as many as the window of the other
          drafts has room for, or where there are none, chosen for speed, or ``"off"``. Default: ``None``, ``"auto"`` unless
          ``num_draft_tokens`` is given as a number.
        completion_batch_size (int): The most sequences that generate at once. Default: ``32``.
        prefill_step_size (int): The most prompt tokens to read between two steps. Default: ``2048``.
        max_token_gap (float): The target for the time between two tokens of a sequence while prompts are read, in seconds:
          fewer are read between two steps where it would be longer. Default: ``0.5``.
        min_decode_share (float): The share of the time that steps get while prompts are read, from 0 to below 1.
          Default: ``0.33``.
        return_prompt_caches (bool): Return a prompt cache with the last token of a sequence. Default: ``True``.
        kv (KVOptions): When and how to quantize keys and values; sequences then generate one after the other. Default: never.
        stream (mx.Stream, optional): Where to run. Default: ``None``, mlx-lm's generation stream.

    Raises:
        ValueError: The model has no MTP head, or an argument is out of range.
    """

    _old_wired_limit: int | None = None

    def __init__(
        self,
        model: nn.Module,
        *,
        max_tokens: int = 128,
        stop_tokens: ListOf[ListOf[int]] | None = None,
        sampler: Sampler | None = None,
        logits_processors: list[LogitsProcessor] | None = None,
        num_draft_tokens: NumDraftTokens | None = None,
        copy_drafts: CopyDrafts | None = None,
        completion_batch_size: int = 32,
        prefill_step_size: int = 2048,
        max_token_gap: float = MAX_TOKEN_GAP,
        min_decode_share: float = MIN_DECODE_SHARE,
        return_prompt_caches: bool = True,
        kv: KVOptions = KVOptions(),  # noqa: B008
        stream: mx.Stream | mx.ThreadLocalStream | None = None,
    ):
        self.model: Any = check_model(model, num_draft_tokens, copy_drafts)
        self.max_tokens = _check_count("max_tokens", max_tokens)
        self.completion_batch_size = _check_count("completion_batch_size", completion_batch_size)
        if kv.kv_bits is not None:
            self.completion_batch_size = 1
        _check_count("prefill_step_size", prefill_step_size)
        self.prefill = PrefillPace(prefill_step_size, max_token_gap, min_decode_share, self.model.ranks)
        self.sampler, self.logits_processors = sampler, logits_processors or []
        self.stop_sequences = StopSequences(stop_tokens or None)
        self.num_draft_tokens, self.copy_drafts = num_draft_tokens, copy_drafts
        self._resolve(num_draft_tokens, copy_drafts)  # checks them
        self.stream = stream or generation_stream
        self.planner = Planner(self.model, timing_of(self.model).of_batches)
        if self.planner.exchange is not None:
            with mx.stream(self.stream):
                self.planner.exchange.align(mx.zeros(0, mx.uint32), 0, None)  # sequences come later
        self.kv, self.return_prompt_caches = kv, return_prompt_caches
        self.prompts: deque[Sequence] = deque()  # that are being read, as far as their last token
        p_min = resolve(self.model).p_min
        self.decoder = Decoder(self.model, p_min=p_min, kv=kv, exchange=self.planner.exchange, stream=self.stream)
        self._uid_count = 0
        self._counters = BatchCounters()
        self._old_wired_limit = maybe_set_recommended_wired_limit()

    def close(self) -> None:
        """Let go of all sequences, and restore the wired limit."""
        self.prompts.clear()
        self.decoder.clear()
        if self.planner.exchange is not None:
            mx.synchronize(self.stream)  # collectives of the pass in flight would corrupt those of another stream
        self._restore_wired_limit()

    def __del__(self) -> None:
        self._restore_wired_limit()

    def _restore_wired_limit(self) -> None:
        if self._old_wired_limit is not None:
            mx.synchronize(self.stream)
            mx.set_wired_limit(self._old_wired_limit)
            self._old_wired_limit = None

    def __len__(self) -> int:
        return len(self.prompts) + sum(s.end is None for s in self.decoder.sequences)

    @contextlib.contextmanager
    def stats(self) -> Generator[BatchStats, None, None]:
        """The work this generator does while the block runs, as in mlx-lm."""
        stats = BatchStats()
        start = BatchCountersSnapshot(**asdict(self._counters))
        try:
            yield stats
        finally:
            end = BatchCountersSnapshot(**asdict(self._counters))
            stats += BatchCountersSnapshot.between(start, end)

    @property
    def prompt_cache_nbytes(self) -> int:
        """The size of the caches in use."""
        prompts = sum(int(c.nbytes) for s in self.prompts for c in s.cache.entries)
        return prompts + self.decoder.cache.nbytes + self.decoder.head.nbytes

    # Sequences come and go

    def insert(self, prompts: list[list[int]], **kwargs: Any) -> list[int]:
        """As ``insert_segments``, for prompts that are not cut in segments."""
        return self.insert_segments([[prompt] for prompt in prompts], **kwargs)

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: list[int] | None = None,
        caches: list[list[Any]] | None = None,
        all_tokens: list[list[int]] | None = None,
        samplers: ListOf[Sampler | None] | None = None,
        logits_processors: ListOf[ListOf[LogitsProcessor] | None] | None = None,
        stop_sequences: list[StopSequences] | None = None,
        num_draft_tokens: ListOf[NumDraftTokens | None] | None = None,
        copy_drafts: ListOf[CopyDrafts | None] | None = None,
        counts: list[DraftCounts] | None = None,
        input_embeddings: ListOf[mx.array | None] | None = None,
        images: ListOf[ListOf[ImageSpan]] | None = None,
    ) -> list[int]:
        """
        Add sequences, which begin with the next step. The options have one entry for each, as in mlx-lm.

        Args:
            segments (List[List[List[int]]]): The prompts, in segments: ``next`` stops at the end of each.
            max_tokens (List[int], optional): The maximum number of tokens of each.
            caches (List[List[Any]], optional): Prompt caches of ``mlx_mtp.make_prompt_cache`` or of mlx-lm, which are copied.
            all_tokens (List[List[int]], optional): The tokens in the caches, which logits processors are shown.
            samplers (List[Sampler], optional): The sampler of each.
            logits_processors (List[List[LogitsProcessor]], optional): The processors of each; ``None`` for none.
            stop_sequences (List[StopSequences], optional): What ends each.
            num_draft_tokens (List[Union[int, str]], optional): The drafts of each in a step, as for the generator, whose own is
              the most of all; ``None`` for the generator's.
            copy_drafts (List[Union[int, str]], optional): The most copies of each in a step, as for the generator; ``None`` for
              the generator's, or ``"off"`` where a number of drafts is given.
            counts (List[DraftCounts], optional): Count the drafts of each as the steps go.
            input_embeddings (List[mx.array], optional): Of each prompt, [T, H]; ``None`` for the tokens'.
            images (List[List[ImageSpan]], optional): The images of each text, as for ``mtp_generate_step``.

        Returns:
            List[int]: Their uids.

        Raises:
            ValueError: A prompt is empty, a cache does not fit, or an option is out of range or has another number of entries.
              No sequence is then added.
        """
        n = len(segments)
        no_entries: list[Any] = [None] * n
        options: dict[str, Any] = {
            "max_tokens": max_tokens or [self.max_tokens] * n,
            "caches": caches or no_entries,
            "all_tokens": all_tokens or [[] for _ in segments],
            "samplers": samplers or no_entries,
            "logits_processors": logits_processors or [self.logits_processors] * n,
            "stop_sequences": stop_sequences or [self.stop_sequences] * n,
            "num_draft_tokens": no_entries if num_draft_tokens is None else num_draft_tokens,
            "copy_drafts": no_entries if copy_drafts is None else copy_drafts,
            "counts": counts or [DraftCounts() for _ in segments],
            "input_embeddings": no_entries if input_embeddings is None else input_embeddings,
            "images": [()] * n if images is None else images,
        }
        for name, values in options.items():
            is_list = isinstance(values, ListOf) and not isinstance(values, str)
            if not is_list or len(values) != n:
                got = len(values) if is_list else values
                raise ValueError(f"{name} must have an entry for each prompt: {n}, not {got}.")
        names = ["segments", *options]
        new = [
            self._sequence_of(i, **dict(zip(names, given))) for i, given in enumerate(zip(segments, *options.values()))
        ]
        self._uid_count += n
        self.prompts.extend(new)
        return [s.uid for s in new]

    def _sequence_of(
        self,
        i: int,
        *,
        segments: list[list[int]],
        max_tokens: int,
        caches: list[Any] | None,
        all_tokens: list[int],
        samplers: Sampler | None,
        logits_processors: ListOf[LogitsProcessor] | None,
        stop_sequences: StopSequences,
        num_draft_tokens: NumDraftTokens | None,
        copy_drafts: CopyDrafts | None,
        counts: DraftCounts,
        input_embeddings: mx.array | None,
        images: ListOf[ImageSpan],
    ) -> Sequence:
        """Prompt i of a call; each argument is its entry of that of ``insert_segments``."""
        segments = [list(segment) for segment in segments if segment]
        if not segments:
            raise ValueError(f"Prompt {i} is empty.")
        _check_count(f"max_tokens of prompt {i}", max_tokens)
        options = self._resolve(num_draft_tokens, copy_drafts)
        if self.kv.kv_bits is None and any(isinstance(c, QuantizedKVCache) for c in caches or []):
            raise ValueError(f"The prompt cache of prompt {i} is quantized: generate with it alone, not in a batch.")
        n_prompt = sum(map(len, segments))
        if input_embeddings is not None:
            check_embeddings(self.model, n_prompt, input_embeddings)
        cache = open_prompt_cache(self.model, copy.deepcopy(caches))
        place_images(self.model, cache, images, input_embeddings)
        if cache.images and (end_of_images := cache.images[-1].end) >= (n := cache.n_tokens + n_prompt):
            raise ValueError(
                f"Prompt {i} ends with token {n}, and its last image with {end_of_images}: text must follow."
            )
        *before, end = segments
        return Sequence(
            cache=cache,
            options=options,
            max_tokens=max_tokens,
            sampler=samplers or self.sampler,
            logits_processors=list(logits_processors or ()),
            stop=stop_sequences.matcher(),
            counts=counts,
            segments=[s for s in (*before, end[:-1]) if s] + [end[-1:]],
            tokens=list(all_tokens),
            embeddings=input_embeddings,
            uid=self._uid_count + i,
        )

    def _resolve(self, num_draft_tokens: NumDraftTokens | None, copy_drafts: CopyDrafts | None) -> DraftOptions:
        """What a sequence drafts: what it asks for, or else what the generator was given, whose number is the most of all."""
        given = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        own = resolve(self.model, given, self.copy_drafts if copy_drafts is None else copy_drafts)
        numbers = [own.num_draft_tokens, self.num_draft_tokens]
        for number in numbers:
            if isinstance(number, Depth):  # it has the times of one sequence
                raise ValueError(f"num_draft_tokens must be auto or from 0 to {MAX_DRAFT_TOKENS}, not {number}.")
        most = min((n for n in numbers if isinstance(n, int)), default=None)
        return own if most is None else replace(own, num_draft_tokens=most)

    def extract_cache(self, uids: list[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """The prompt cache of each sequence at this moment, and the tokens in it."""
        with mx.stream(self.stream):
            prompts = {s.uid: (copy.deepcopy(s.cache.entries), s.tokens[:]) for s in self.prompts if s.uid in uids}
            running = [s for s in self.decoder.sequences if s.uid in uids and s.end is None]
            return prompts | {s.uid: (self.decoder.extract(s), s.tokens[:]) for s in running}

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> dict[int, tuple[list[Any], list[int]]]:
        """Take sequences out -> with ``return_prompt_caches``, the prompt cache of each and the tokens in it."""
        caches = {s.uid: (s.cache.entries, s.tokens) for s in self.prompts if s.uid in uids}
        with mx.stream(self.stream):
            for s in self.decoder.sequences:
                if s.uid in uids and s.end is None:
                    s.end = "removed"
                    if return_prompt_caches:
                        caches[s.uid] = self._cache_of(s), s.tokens
            self.prompts = deque(s for s in self.prompts if s.uid not in uids)
            if all(s.end is not None for s in self.decoder.sequences):
                self._clear()
        return caches if return_prompt_caches else {}

    def _clear(self) -> None:
        self.decoder.clear()
        self.planner.clear()

    def _cache_of(self, s: Sequence) -> list[Any]:
        """The prompt cache of a sequence that ends while a window is in flight."""
        decoder = self.decoder
        if len(decoder) > 1:
            return decoder.extract(s)
        assert decoder.window is not None
        decoder.window.kept = [1]
        decoder.finalize()
        return s.cache.entries

    # Steps

    def next(self) -> tuple[list[PromptResponse], list[Response]]:
        """
        Read a part of the prompts that wait, and do a step of the sequences that generate.

        Returns:
            Tuple of prompt processing responses and generation responses.
        """
        with mx.stream(self.stream):
            ready = self._ready()
            read = [PromptResponse(s.uid, (s.n_prompt,) * 2, True, True) for s in ready]
            read += self._read_prompts(ready)
            return read, self._step(ready)

    def next_generated(self) -> list[Response]:
        """Generated tokens alone: reads prompts until there are some. Empty when no sequence is left."""
        while len(self) > 0:
            if generated := self.next()[1]:
                return generated
        return []

    def _ready(self) -> list[Sequence]:
        """The sequences whose prompts were read before this step, as many as may generate."""
        n_free = self.completion_batch_size - sum(s.end is None for s in self.decoder.sequences)
        return [s for s in self.prompts if s.is_read][: max(n_free, 0)]

    def _read_prompts(self, ready: list[Sequence]) -> list[PromptResponse]:
        waiting = [s for s in self.prompts if not s.is_read]
        if not waiting:
            return []
        is_running = bool(ready) or any(s.end is None for s in self.decoder.sequences)
        n_cached = waiting[0].cache.n_tokens
        n_left = n = self.prefill.next(n_cached, is_running)
        responses: list[PromptResponse] = []
        start = time.perf_counter()
        for s in waiting:
            if n_left > 0:
                n_before = s.n_read
                responses.append(self._read(s, n_left))
                n_left -= s.n_read - n_before
        if responses:
            seconds = time.perf_counter() - start
            self.prefill.record_chunk(n - n_left, n_cached, seconds)
            self.planner.interrupt()
            self._counters.prompt_tokens += n - n_left
            self._counters.prompt_time += seconds
        return responses

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

    def _step(self, ready: list[Sequence]) -> list[Response]:
        start, decoder = time.perf_counter(), self.decoder
        running, failures = [s for s in decoder.sequences if s.end is None], list[Response]()

        def come_and_go(step: Step | None) -> None:
            failures.extend(self._failures(running))
            _drain(decoder.hand_over_accepted(step))
            decoder.filter([s for s in running if self._goes_on(s)])
            self._join(ready)

        step = _drain(make_step(decoder, self.planner, come_and_go))
        responses = [*([] if step is None else self._tokens(step)), *failures, *self._failures(decoder.sequences)]
        if all(s.end is not None for s in decoder.sequences):
            self._clear()
        self._count(len(responses), time.perf_counter() - start)
        return responses

    def _goes_on(self, s: Sequence) -> bool:
        """Whether a sequence has tokens to come, or is still to be given its prompt cache."""
        if s.end is not None or self.return_prompt_caches:
            return self.return_prompt_caches and s.finish_reason != "error"
        return s.max_tokens > s.n_unread

    def _join(self, ready: list[Sequence]) -> None:
        for s in ready:
            self.prompts.remove(s)
            s.read(s.segments.pop())
        if ready:
            self.decoder.join(ready)

    def _count(self, n_tokens: int, seconds: float) -> None:
        self._counters.generation_tokens += n_tokens
        self._counters.decode_time += seconds
        if n_tokens > 0:
            self.prefill.record_step(seconds)
        self._counters.generation_steps += n_tokens > 0

    def _tokens(self, step: Step) -> list[Response]:
        """The tokens of a step; the last of each sequence that ends here with its prompt cache."""
        responses = []
        for b, (s, tokens) in enumerate(zip(step.sequences, step.tokens or [])):
            for t, token in enumerate(tokens):
                logprobs, from_draft = step.logprobs_of(b, t), t < step.n_accepted[b]
                responses.append(Response(s.uid, token, logprobs, None, None, None, from_draft, s.counts))
            if tokens and s.end in ("length", "stop"):
                self._end(s, responses[-1])
        return responses

    def _failures(self, sequences: list[Sequence]) -> list[Response]:
        """The ends of those whose sampler or processor has failed."""
        responses = []
        for s in sequences:
            if isinstance(s.end, Exception):
                responses.append(Response(s.uid, s.tokens[-1], None, None, None, None, False, s.counts, s.end))
                self._end(s, responses[-1])
        return responses

    def _end(self, s: Sequence, last: Response) -> None:
        """A sequence ends with this response."""
        last.finish_reason, last.all_tokens = s.finish_reason, s.tokens
        if self.return_prompt_caches:
            last.prompt_cache = self._cache_of(s)


def _drain(moves: Generator[Token, None, T]) -> T:
    """Make moves that yield tokens in between -> what they return: all tokens of a step are handed over together."""
    while True:
        try:
            next(moves)
        except StopIteration as end:
            result: T = end.value
            return result
