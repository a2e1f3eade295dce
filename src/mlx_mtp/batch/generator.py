"""Continuous batching as in mlx-lm's ``BatchGenerator``, with drafts: sequences come and go between two steps."""

import contextlib
import copy
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import StopSequences, generation_stream
from mlx_lm.generate_utils import BatchCounters, BatchCountersSnapshot, BatchStats
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..decoding.counts import DraftCounts
from ..decoding.depth import MAX_DRAFT_TOKENS
from ..decoding.options import CopyDrafts, check_model, resolve
from ..models.mtp import run_head
from ..models.prompt_cache import PromptCache, open_prompt_cache
from ..models.protocol import MTPModel
from .decoder import Batch, Step
from .depth import BatchPace, NumDraftTokens, resolve_batch_number, resolve_depth
from .prefill import MAX_TOKEN_GAP, MIN_DECODE_SHARE, PrefillPace
from .row import Row

CLEAR_EVERY = 512  # steps, as mlx-lm


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


@dataclass(eq=False)
class Prompt:
    """A sequence whose prompt is being read, as far as its last token.

    Args:
        row (Row): The sequence; its tokens are those in the cache.
        cache (PromptCache): What is read so far.
        segments (List[List[int]]): What is left; the last one is the prompt's last token.
    """

    row: Row
    cache: PromptCache
    segments: list[list[int]]

    def __post_init__(self) -> None:
        self.n_read, self.n_tokens = 0, sum(map(len, self.segments))

    @property
    def is_read(self) -> bool:
        return len(self.segments) == 1

    def read(self, model: MTPModel, most: int) -> PromptResponse:
        """Read up to ``most`` tokens, at most to the end of a segment."""
        segment = self.segments[0]
        tokens, self.segments[0] = segment[:most], segment[most:]
        n_cached = self.cache.n_tokens
        _read(model, self.cache, mx.array(tokens, mx.uint32))
        self.row.tokens += tokens
        self.cache.record(n_cached + len(tokens), [*self.row.before, *self.row.tokens])
        self.n_read += len(tokens)
        is_end = not self.segments[0]
        if is_end:
            self.segments.pop(0)
        return PromptResponse(self.row.uid, (self.n_read, self.n_tokens), is_end, False)


def _read(model: MTPModel, cache: PromptCache, tokens: mx.array) -> None:
    """Read tokens [T] into all caches. Each pairs with the hidden state before it in the head, where there is one."""
    _, hidden = model(tokens[None], cache=cache.entries, return_hidden=True)
    pairs = hidden[:, :-1] if cache.last_hidden is None else mx.concatenate([cache.last_hidden, hidden[:, :-1]], axis=1)
    if (t := pairs.shape[1]) > 0:
        run_head(model, pairs, tokens[-t:], cache.head)
    cache.last_hidden = mx.contiguous(hidden[:, -1:])
    mx.eval([c.state for c in cache.entries])
    mx.clear_cache()


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
        stop_tokens: Sequence[Sequence[int]] | None = None,
        sampler: Sampler | None = None,
        logits_processors: list[LogitsProcessor] | None = None,
        num_draft_tokens: NumDraftTokens | None = None,
        copy_drafts: CopyDrafts | None = None,
        completion_batch_size: int = 32,
        prefill_step_size: int = 2048,
        max_token_gap: float = MAX_TOKEN_GAP,
        min_decode_share: float = MIN_DECODE_SHARE,
        return_prompt_caches: bool = True,
        stream: mx.Stream | mx.ThreadLocalStream | None = None,
    ):
        self.model: Any = check_model(model)
        self.max_tokens = _check_count("max_tokens", max_tokens)
        self.completion_batch_size = _check_count("completion_batch_size", completion_batch_size)
        _check_count("prefill_step_size", prefill_step_size)
        self.prefill = PrefillPace(prefill_step_size, max_token_gap, min_decode_share, self.model.ranks)
        self.sampler, self.logits_processors = sampler or greedy_sampler, logits_processors or []
        self.stop_sequences = StopSequences(stop_tokens or None)
        self.pace = BatchPace(self.model, resolve_depth(self.model, num_draft_tokens))
        self.num_draft_tokens, self.copy_drafts = num_draft_tokens, copy_drafts
        resolve(self.model, num_draft_tokens, copy_drafts)  # checks them
        self.stream = stream or generation_stream
        self.prompts: deque[Prompt] = deque()
        if self.pace.exchange is not None:
            with mx.stream(self.stream):
                self.pace.exchange.begin(mx.zeros(0, mx.uint32), 0, None)  # sequences come later
        self.batch = Batch(self.model, return_prompt_caches, self.pace.exchange)
        self._uid_count = 0
        self._counters = BatchCounters()
        self._old_wired_limit = maybe_set_recommended_wired_limit()

    def close(self) -> None:
        """Let go of all sequences, and restore the wired limit."""
        self.prompts.clear()
        self.batch.clear()
        if self.pace.exchange is not None:
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
        return len(self.prompts) + sum(row.finish_reason is None for row in self.batch.rows)

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
        prompts = sum(int(c.nbytes) for prompt in self.prompts for c in prompt.cache.entries)
        return prompts + self.batch.nbytes

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
        samplers: Sequence[Sampler | None] | None = None,
        logits_processors: list[list[LogitsProcessor]] | None = None,
        stop_sequences: list[StopSequences] | None = None,
        num_draft_tokens: Sequence[NumDraftTokens | None] | None = None,
        copy_drafts: Sequence[CopyDrafts | None] | None = None,
        counts: list[DraftCounts] | None = None,
    ) -> list[int]:
        """
        Add sequences, which begin with the next step. The options have one entry for each, as in mlx-lm.

        Args:
            segments (List[List[List[int]]]): The prompts, in segments: ``next`` stops at the end of each.
            max_tokens (List[int], optional): The maximum number of tokens of each.
            caches (List[List[Any]], optional): Prompt caches of ``mlx_mtp.make_prompt_cache`` or of mlx-lm, which are copied.
            all_tokens (List[List[int]], optional): The tokens in the caches, which logits processors are shown.
            samplers (List[Sampler], optional): The sampler of each.
            logits_processors (List[List[LogitsProcessor]], optional): The processors of each.
            stop_sequences (List[StopSequences], optional): What ends each.
            num_draft_tokens (List[Union[int, str]], optional): The most drafts of each in a step, as for the generator, whose
              own is the most of all; ``None`` for the generator's.
            copy_drafts (List[Union[int, str]], optional): The most copies of each in a step, as for the generator; ``None`` for
              the generator's, or ``"off"`` where a number of drafts is given.
            counts (List[DraftCounts], optional): Count the drafts of each as the steps go.

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
        }
        for name, values in options.items():
            is_list = isinstance(values, Sequence) and not isinstance(values, str)
            if not is_list or len(values) != n:
                got = len(values) if is_list else values
                raise ValueError(f"{name} must have an entry for each prompt: {n}, not {got}.")
        new = [self._prompt_of(i, *given) for i, given in enumerate(zip(segments, *options.values()))]
        self._uid_count += n
        self.prompts.extend(new)
        return [prompt.row.uid for prompt in new]

    def _prompt_of(
        self,
        i: int,
        segments: list[list[int]],
        max_tokens: int,
        cache: list[Any] | None,
        tokens: list[int],
        sampler: Sampler | None,
        processors: list[LogitsProcessor],
        stop_sequences: StopSequences,
        num_draft_tokens: NumDraftTokens | None,
        copy_drafts: CopyDrafts | None,
        counts: DraftCounts,
    ) -> Prompt:
        segments = [list(segment) for segment in segments if segment]
        if not segments:
            raise ValueError(f"Prompt {i} is empty.")
        _check_count(f"max_tokens of prompt {i}", max_tokens)
        max_drafts, copy_drafts = self._drafts_of(num_draft_tokens, copy_drafts)
        if any(isinstance(c, QuantizedKVCache) for c in cache or []):
            raise ValueError(f"The prompt cache of prompt {i} is quantized: generate with it alone, not in a batch.")
        *before, end = segments
        segments = [s for s in (*before, end[:-1]) if s] + [end[-1:]]
        opened = open_prompt_cache(self.model, copy.deepcopy(cache))
        uid, stop = self._uid_count + i, stop_sequences.matcher()
        known: list[int] = [] if tokens else opened.text
        row = Row(
            uid,
            list(tokens),
            max_tokens,
            sampler or self.sampler,
            list(processors),
            stop,
            max_drafts,
            copy_drafts,
            known,
            counts,
        )
        return Prompt(row, opened, segments)

    def _drafts_of(
        self, num_draft_tokens: NumDraftTokens | None, copy_drafts: CopyDrafts | None
    ) -> tuple[int, CopyDrafts]:
        """The most drafts of a sequence, and its copies: what it asks for, and the generator's own where it does not say."""
        given = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        most = [resolve_batch_number(self.model, n) for n in (given, self.num_draft_tokens)]
        copies = resolve(self.model, given, self.copy_drafts if copy_drafts is None else copy_drafts).copy_drafts
        return min(n if isinstance(n, int) else MAX_DRAFT_TOKENS for n in most), copies

    def extract_cache(self, uids: list[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """The prompt cache of each sequence at this moment, and the tokens in it."""
        with mx.stream(self.stream):
            prompts = {
                p.row.uid: (copy.deepcopy(p.cache.entries), p.row.tokens[:]) for p in self.prompts if p.row.uid in uids
            }
            rows = [row for row in self.batch.rows if row.uid in uids and not row.is_out]
            return prompts | {row.uid: (self.batch.extract(row), row.tokens[:]) for row in rows}

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> dict[int, tuple[list[Any], list[int]]]:
        """Take sequences out -> with ``return_prompt_caches``, the prompt cache of each and the tokens in it."""
        caches = self.extract_cache(uids) if return_prompt_caches else {}
        self.prompts = deque(p for p in self.prompts if p.row.uid not in uids)
        for row in self.batch.rows:
            if row.uid in uids:
                row.finish_reason, row.is_out = "removed", True
        if all(row.is_out for row in self.batch.rows):
            self.batch.clear()
        return caches

    # Steps

    def next(self) -> tuple[list[PromptResponse], list[Response]]:
        """
        Read a part of the prompts that wait, and do a step of the sequences that generate.

        Returns:
            Tuple of prompt processing responses and generation responses.
        """
        with mx.stream(self.stream):
            ready = self._ready()
            read = [PromptResponse(p.row.uid, (p.n_tokens,) * 2, True, True) for p in ready]
            read += self._read_prompts(ready)
            return read, self._step(ready)

    def next_generated(self) -> list[Response]:
        """Generated tokens alone: reads prompts until there are some. Empty when no sequence is left."""
        while len(self) > 0:
            if generated := self.next()[1]:
                return generated
        return []

    def _ready(self) -> list[Prompt]:
        """The prompts that were read before this step, as many as may generate."""
        n_free = self.completion_batch_size - sum(row.finish_reason is None for row in self.batch.rows)
        return [p for p in self.prompts if p.is_read][: max(n_free, 0)]

    def _read_prompts(self, ready: list[Prompt]) -> list[PromptResponse]:
        waiting = [prompt for prompt in self.prompts if not prompt.is_read]
        if not waiting:
            return []
        is_running = bool(ready) or any(row.finish_reason is None for row in self.batch.rows)
        n_cached = waiting[0].cache.n_tokens
        n_left = n = self.prefill.next(n_cached, is_running)
        responses: list[PromptResponse] = []
        start = time.perf_counter()
        for prompt in waiting:
            if n_left > 0:
                n_before = prompt.n_read
                responses.append(prompt.read(self.model, n_left))
                n_left -= prompt.n_read - n_before
        if responses:
            seconds = time.perf_counter() - start
            self.prefill.record_chunk(n - n_left, n_cached, seconds)
            self.pace.interrupt()
            self._counters.prompt_tokens += n - n_left
            self._counters.prompt_time += seconds
        return responses

    def _step(self, ready: list[Prompt]) -> list[Response]:
        start, batch, pace = time.perf_counter(), self.batch, self.pace
        step = batch.accept()  # accept
        if step is not None and not step.is_plain:
            pace.record(step)
        self._come_and_go(ready)
        if len(batch) > 0:
            n_drafts = batch.draft(pace.next(batch.rows, batch.max_drafts))  # draft
            pace.begin(batch.rows, n_drafts)
            batch.verify()  # verify, once what was rejected is rolled back
        responses = []
        if step is not None:
            if step.is_plain:
                batch.wait(step)
                pace.record(step)
            responses = self._tokens(step)
        responses += self._errors([*batch.rows, *(step.rows if step is not None else [])])
        if all(row.is_out for row in batch.rows):
            batch.clear()
        self._count(len(responses), time.perf_counter() - start)
        return responses

    def _come_and_go(self, ready: list[Prompt]) -> None:
        batch = self.batch
        batch.filter([row for row in batch.rows if batch.goes_on(row)])
        if ready:
            for prompt in ready:
                self.prompts.remove(prompt)
                prompt.row.tokens += prompt.segments.pop()
            batch.join([p.row for p in ready], [p.cache for p in ready])

    def _count(self, n_tokens: int, seconds: float) -> None:
        self._counters.generation_tokens += n_tokens
        self._counters.decode_time += seconds
        if n_tokens > 0:
            self.prefill.record_step(seconds)
        self._counters.generation_steps += n_tokens > 0
        if self._counters.generation_steps % CLEAR_EVERY == CLEAR_EVERY - 1:
            mx.clear_cache()

    def _tokens(self, step: Step) -> list[Response]:
        """The tokens of a step; the last of each sequence that ends here with its prompt cache."""
        responses = []
        for b, (row, tokens) in enumerate(zip(step.rows, step.tokens)):
            for t, token in enumerate(tokens):
                logprobs, from_draft = step.logprobs_of(b, t), t < step.n_accepted[b]
                responses.append(Response(row.uid, token, logprobs, None, None, None, from_draft, row.counts))
            if tokens and row.finish_reason is not None:
                self._end(row, responses[-1])
        return responses

    def _errors(self, rows: list[Row]) -> list[Response]:
        """The ends of sequences whose sampler or processor has failed."""
        responses = []
        for row in rows:
            if row.error is not None and not row.is_out:
                row.finish_reason = "error"
                responses.append(
                    Response(row.uid, row.tokens[-1], None, None, None, None, False, row.counts, row.error)
                )
                self._end(row, responses[-1])
        return responses

    def _end(self, row: Row, last: Response) -> None:
        """A sequence ends with this response."""
        last.finish_reason, last.all_tokens = row.finish_reason, row.tokens
        if self.batch.return_prompt_caches:
            last.prompt_cache = row.prompt_cache or self.batch.extract(row)
        row.is_out = True
