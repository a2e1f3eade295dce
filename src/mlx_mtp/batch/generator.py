"""Continuous batching as in mlx-lm's ``BatchGenerator``, with drafts: sequences join and leave between two steps."""

import copy
import math
import time
import weakref
from collections import abc, deque
from functools import partial
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, StopSequences, generation_stream
from mlx_lm.generate import BatchGenerator as StockGenerator
from mlx_lm.generate_utils import BatchCounters
from mlx_lm.sample_utils import LogitsProcessor, Sampler
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..caches.positions import ImageSpan
from ..caches.prompt_cache import PromptCache
from ..caches.rows import KVOptions
from ..decoding.counts import DraftCounts
from ..decoding.decoder import Decoder
from ..decoding.loop import step
from ..decoding.planner import Planner
from ..decoding.sequence import PendingEmbeddings, Sequence
from ..distributed.ranks import synchronize
from ..drafts.options import CopyDrafts, NumDraftTokens, TextOptions, check_model
from ..errors import MTPError
from .prefill_budget import MAX_TOKEN_GAP, MIN_DECODE_SHARE, PrefillBudget
from .prompts import check_count, entries_of, make_sequence, prefill
from .responses import CacheOf, PromptResponse, Response, cache_at_end, failures_of, responses_of

__all__ = ["BatchGenerator", "PromptResponse", "Response"]


class BatchGenerator:
    """
    A batch generator implements continuous batching, as mlx-lm's ``BatchGenerator``, with drafts by the model's MTP head.

    Each sequence has its own prompt, cache, sampler, logits processors and stop tokens, and accepts or rejects its own drafts.
    Prompts are prefilled one after the other, in chunks between two steps, once there is room for another sequence.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``.
        max_tokens (int): The maximum number of tokens of sequences without their own. Default: ``128``.
        stop_tokens (Sequence[Sequence[int]], optional): Stop sequences of sequences without their own.
        sampler, logits_processors, num_draft_tokens, copy_drafts, draft_p_min (optional): Of sequences without their own, see
          ``mlx_mtp.TextOptions``. A number of drafts is the limit of all. Processors with state must not be shared.
        completion_batch_size (int): The maximum number of sequences that generate at once. Default: ``32``.
        prefill_step_size (int): The maximum number of prompt tokens to prefill between two steps. Default: ``2048``.
        max_token_gap (float): The maximum time between two tokens of a sequence while prompts are prefilled, in seconds. It
          reduces the number of tokens that are prefilled between two steps. Default: ``0.5``.
        min_decode_share (float): The share of the time that steps get while prompts are prefilled, from 0 to below 1.
          Default: ``0.33``.
        max_kv_size (int, optional): Must be ``None``: the caches of these models do not rotate.
        return_prompt_caches (bool): Return a prompt cache with the last token of a sequence. Default: ``True``.
        kv_bits, kv_group_size, quantized_kv_start (optional): The quantization of the keys and values of each text, as in
          ``mtp_generate_step``. Default: none.
        stream (mx.Stream, optional): The stream to run on. Default: ``None``, mlx-lm's generation stream.

    Raises:
        MTPError: The model has no MTP head, or an argument is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_tokens: int = 128,
        stop_tokens: abc.Sequence[abc.Sequence[int]] | None = None,
        sampler: Sampler | None = None,
        logits_processors: list[LogitsProcessor] | None = None,
        num_draft_tokens: NumDraftTokens | None = None,
        copy_drafts: CopyDrafts | None = None,
        draft_p_min: float | None = None,
        completion_batch_size: int = 32,
        prefill_step_size: int = 2048,
        max_token_gap: float = MAX_TOKEN_GAP,
        min_decode_share: float = MIN_DECODE_SHARE,
        max_kv_size: int | None = None,
        return_prompt_caches: bool = True,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
        stream: mx.Stream | mx.ThreadLocalStream | None = None,
    ):
        if max_kv_size is not None:
            raise MTPError("max_kv_size is not supported: the caches of this model do not rotate.")
        n, stops = check_count("max_tokens", max_tokens), StopSequences(stop_tokens or None)
        self.options = TextOptions(n, sampler, logits_processors, stops, num_draft_tokens, copy_drafts, draft_p_min)
        self.model: Any = check_model(model, self.options)
        self.completion_batch_size = check_count("completion_batch_size", completion_batch_size)
        check_count("prefill_step_size", prefill_step_size)
        self.prefill_budget = PrefillBudget(prefill_step_size, max_token_gap, min_decode_share, self.model.ranks)
        self.kv = KVOptions(kv_bits=kv_bits, kv_group_size=kv_group_size, quantized_kv_start=quantized_kv_start)
        self._counters = BatchCounters()
        self.prompts: deque[Sequence] = deque()  # that wait
        TextOptions().resolve(self.model, self.options)  # raises an error for invalid options
        self.stream = stream or generation_stream
        self.planner = Planner(self.model)
        if self.planner.exchange is not None:
            with mx.stream(self.stream):
                self.planner.exchange.agree(mx.zeros(0, mx.uint32), 0, None)  # no sequences yet
        self.decoder = Decoder(self.model, self.kv, self.planner.exchange, self.stream)
        self.return_prompt_caches = return_prompt_caches
        self._uid_count = 0
        self._restore = weakref.finalize(self, _set_wired_limit, maybe_set_recommended_wired_limit(), self.stream)

    def close(self) -> None:
        """Remove all sequences, and restore the wired limit."""
        self.prompts.clear()
        self.decoder.clear()
        if self.planner.exchange is not None:
            synchronize(self.stream)  # collectives of the pass in flight must not mix with those of another stream
        self._restore()

    def __len__(self) -> int:
        return len(self.prompts) + sum(s.end is None for s in self.decoder.sequences)

    stats = StockGenerator.stats

    @property
    def prompt_cache_nbytes(self) -> int:
        """The size of the caches in use."""
        prompts = sum(int(c.nbytes) for s in self.prompts for c in s.cache.entries)
        return prompts + self.decoder.cache.nbytes + self.decoder.head.nbytes

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

    # Sequences join and leave

    def insert(self, prompts: list[list[int]], **kwargs: Any) -> list[int]:
        """Add sequences as ``insert_segments`` does, with each prompt as one segment."""
        return self.insert_segments([[prompt] for prompt in prompts], **kwargs)

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: list[int] | None = None,
        caches: abc.Sequence[list[Any] | PromptCache | None] | None = None,
        all_tokens: list[list[int]] | None = None,
        samplers: abc.Sequence[Sampler | None] | None = None,
        logits_processors: abc.Sequence[abc.Sequence[LogitsProcessor] | None] | None = None,
        stop_sequences: list[StopSequences] | None = None,
        num_draft_tokens: abc.Sequence[NumDraftTokens | None] | None = None,
        copy_drafts: abc.Sequence[CopyDrafts | None] | None = None,
        counts: list[DraftCounts] | None = None,
        input_embeddings: abc.Sequence[mx.array | PendingEmbeddings | None] | None = None,
        images: abc.Sequence[abc.Sequence[ImageSpan]] | None = None,
        options: abc.Sequence[TextOptions] | None = None,
    ) -> list[int]:
        """
        Add sequences, which start with the next step. Each option has one entry per sequence, as in mlx-lm.

        Args:
            segments (List[List[List[int]]]): The prompts, in segments: ``next`` stops at the end of each.
            max_tokens (List[int], optional): The maximum number of tokens of each.
            caches (List[List[Any]], optional): Prompt caches of ``mlx_mtp.make_prompt_cache`` or of mlx-lm, which are copied; a
              ``PromptCache`` is not.
            all_tokens (List[List[int]], optional): The tokens in the caches, for logits processors.
            samplers, logits_processors, stop_sequences, num_draft_tokens, copy_drafts (optional): See ``mlx_mtp.TextOptions``.
              The number of drafts is at most the generator's; ``None`` in place of processors is for none.
            options (List[TextOptions], optional): The options of each, in place of those above.
            counts (List[DraftCounts], optional): Count the drafts of each as the steps go.
            input_embeddings (List[Union[mx.array, PendingEmbeddings]], optional): The embeddings of each, [T, H], or embeddings
              to compute between steps; ``None`` for those of the tokens.
            images (List[List[ImageSpan]], optional): The images of each text, as for ``mtp_generate_step``.

        Returns:
            List[int]: Their uids.

        Raises:
            MTPError: A prompt is empty, a cache does not fit, or an option is out of range or has another number of entries.
              No sequence is then added.
        """
        lists = {
            "max_tokens": max_tokens, "samplers": samplers, "logits_processors": logits_processors,
            "stop_sequences": stop_sequences, "num_draft_tokens": num_draft_tokens, "copy_drafts": copy_drafts,
            "caches": caches, "all_tokens": all_tokens, "counts": counts, "input_embeddings": input_embeddings,
            "images": images, "options": options,
        }  # fmt: skip
        new = [
            make_sequence(self.model, i, self._uid_count + i, own, self.options, self.kv, **entries)
            for i, (own, entries) in enumerate(zip(segments, entries_of(lists, len(segments))))
        ]
        self._uid_count += len(new)
        self.prompts.extend(new)
        return [s.uid for s in new]

    def extract_cache(self, uids: list[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """The prompt cache of each sequence at this moment, and the tokens in it."""
        with mx.stream(self.stream):
            caches = {s.uid: (s.cache.entries, s.tokens) for s in self.prompts if s.uid in uids}
            running = [s for s in self.decoder.sequences if s.uid in uids and s.end is None]
            caches |= {s.uid: (cache_at_end(self.decoder, s), s.tokens) for s in running}
            # Copies: the sequences go on, and one that waits or runs alone shares its arrays with its cache.
            return copy.deepcopy(caches)

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> dict[int, tuple[list[Any], list[int]]]:
        """Remove sequences. With ``return_prompt_caches``, return the prompt cache of each and the tokens in it."""
        caches = {s.uid: (s.cache.entries, s.tokens) for s in self.prompts if s.uid in uids}
        with mx.stream(self.stream):
            for s in self.decoder.sequences:
                if s.uid in uids and s.end is None:
                    s.end = "removed"
                    if return_prompt_caches:
                        caches[s.uid] = cache_at_end(self.decoder, s), s.tokens
            self.prompts = deque(s for s in self.prompts if s.uid not in uids)
            if all(s.end is not None for s in self.decoder.sequences):
                self.decoder.clear()
                self.planner.clear()
        return caches if return_prompt_caches else {}

    # Steps

    def next(self) -> tuple[list[PromptResponse], list[Response]]:
        """Make a step of the sequences that generate, and prefill a part of the waiting prompts -> (prompts, tokens)."""
        with mx.stream(self.stream):
            ready = self._waiting(is_prefilled=True)
            finished = [PromptResponse(s.uid, (s.n_prompt,) * 2, True, True) for s in ready]
            responses = self._step(ready)
            is_running = self._n_free < self.completion_batch_size
            waiting = self._waiting(is_prefilled=False)
            chunks = prefill(self.model, waiting, self.prefill_budget, is_running, self._counters)
            if chunks:
                self.planner.is_interrupted = True
            return finished + chunks, responses

    def next_generated(self) -> list[Response]:
        """Return the next generated tokens, prefilling prompts until there are any. Empty if no sequence is left."""
        while len(self) > 0:
            if generated := self.next()[1]:
                return generated
        return []

    def _step(self, ready: list[Sequence]) -> list[Response]:
        """Make a step of the sequences that generate, after the ready ones have joined."""
        start, decoder = time.perf_counter(), self.decoder
        running, failures = [s for s in decoder.sequences if s.end is None], list[Response]()
        cache_of: CacheOf = partial(cache_at_end, decoder) if self.return_prompt_caches else lambda _: None

        def move() -> None:
            failures.extend(failures_of(running, cache_of))
            decoder.filter([s for s in running if _goes_on(s, self.return_prompt_caches)])
            if ready:
                self.prompts = deque(s for s in self.prompts if s not in ready)
                decoder.join(ready)

        responses = [*responses_of(step(decoder, self.planner, move), cache_of), *failures]
        if all(s.end is not None for s in decoder.sequences):
            decoder.clear()
            self.planner.clear()
        seconds = time.perf_counter() - start
        self._counters.generation_tokens += len(responses)
        self._counters.decode_time += seconds
        self._counters.generation_steps += len(responses) > 0
        if responses:
            self.prefill_budget.record_step(seconds)
        return responses


def _set_wired_limit(limit: int | None, stream: mx.Stream | mx.ThreadLocalStream) -> None:
    if limit is not None:
        mx.synchronize(stream)
        mx.set_wired_limit(limit)


def _goes_on(s: Sequence, return_prompt_caches: bool) -> bool:
    """Whether a sequence has further tokens, or its prompt cache is not extracted yet."""
    if s.end is not None or return_prompt_caches:
        return return_prompt_caches and s.finish_reason != "error"
    return not 0 <= s.max_tokens <= s.n_generated
