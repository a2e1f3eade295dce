"""What generates the requests: ``mlx_mtp.BatchGenerator``, or for a model that does not draft mlx-lm's own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator as StockBatchGenerator
from mlx_lm.generate import StopSequences
from mlx_lm.models import cache as stock
from mlx_lm.sample_utils import LogitsProcessor, Sampler

from ..batch.generator import BatchGenerator, Response
from ..batch.prefill import MAX_TOKEN_GAP, MIN_DECODE_SHARE, PrefillPace
from ..decoding.counts import DraftCounts
from ..decoding.options import CopyDrafts, NumDraftTokens
from ..decoding.sampling import for_one_text
from ..models.positions import ImageSpan
from ..models.prompt_cache import has_head, make_prompt_cache
from ..models.single import KVOptions


@dataclass(eq=False)
class Generation:
    """The tokens of a request, and what generates the next ones.

    Args:
        segments (List[List[int]]): The prompt without its cached tokens; the cache is shown after each segment.
        max_tokens (int): The number of tokens to generate.
        sampler (Sampler): As in mlx-lm, or one of ``mlx_mtp.make_sampler``.
        logits_processors (List[LogitsProcessor]): As in mlx-lm; they see all tokens, also cached ones.
        stop (StopSequences.Matcher): Recognizes the last token.
        prompt_cache (List[Any]): The cache of ``tokens``; updated in place, or replaced.
        tokens (List[int]): The tokens in the cache, whenever no step is running.
        num_draft_tokens (Union[int, str], optional): As in ``mtp_generate_step``.
        counts (DraftCounts): Counts drafts as the steps go.
        copy_drafts (Union[int, str], optional): As in ``mtp_generate_step``.
        embeddings (mx.array, optional): Of the segments, [T, H], where there are images. Default: ``None``, the tokens'.
        images (List[ImageSpan]): Where these are in the whole prompt.
    """

    segments: list[list[int]]
    max_tokens: int
    sampler: Sampler
    logits_processors: list[LogitsProcessor]
    stop: StopSequences.Matcher
    prompt_cache: list[Any]
    tokens: list[int]
    num_draft_tokens: NumDraftTokens | None = None
    counts: DraftCounts = field(default_factory=DraftCounts)
    copy_drafts: CopyDrafts | None = None
    embeddings: mx.array | None = None
    images: list[ImageSpan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.tokens) + sum(len(s) for s in self.segments)

    def matcher(self) -> StopSequences.Matcher:
        """For the generators, which take this for a ``StopSequences``."""
        return self.stop


@dataclass
class Progress:
    """A part of a prompt is in the cache."""

    generation: Generation
    n_tokens: int
    prompt_cache: list[Any] | None  # at the end of a segment, without its last token
    key: list[int] | None  # the tokens of that cache


@dataclass
class NewToken:
    """A generated token. After one with a finish reason the scheduler no longer uses the generation."""

    generation: Generation
    token: int
    logprobs: mx.array  # [V]
    finish_reason: str | None
    source: str = "model"  # or where it was drafted: "head", "copies", "grammar"

    @property
    def from_draft(self) -> bool:
        return self.source != "model"


@dataclass
class Failure:
    """A generation's sampler or logits processor raised. The scheduler no longer uses the generation; the others go on."""

    generation: Generation
    error: Exception


Event = Progress | NewToken | Failure


class StockBatches(StockBatchGenerator):
    """mlx-lm's batch generator, for models without a head. It reads prompts at the pace of ours, several at once."""

    def __init__(
        self,
        model: Any,
        *,
        prefill_step_size: int,
        max_token_gap: float = MAX_TOKEN_GAP,
        min_decode_share: float = MIN_DECODE_SHARE,
        **kwargs: Any,
    ):
        super().__init__(model, prefill_step_size=prefill_step_size, **kwargs)
        self.prefill = PrefillPace(prefill_step_size, max_token_gap, min_decode_share, getattr(model, "ranks", None))

    def next(self) -> tuple[list[Any], list[Any]]:
        waiting = [*self._prompt_batch.tokens, *(tokens for *_, tokens, _, _, _ in self._unprocessed_sequences)]
        n_prompts, is_running = min(len(waiting), self.prefill_batch_size), len(self._generation_batch) > 0
        n_cached = max(map(len, waiting), default=0)
        with mx.stream(self.stream):
            n = self.prefill.next(n_cached, is_running) if waiting else 0
        self.prefill_step_size = max(n // n_prompts, 1) if n > 0 else 0  # of each prompt
        with self.stats() as stats:
            read, generated = super().next()
        if generated:
            self.prefill.record_step(stats.generation_time)
        if stats.prompt_tokens > 0:
            self.prefill.record_chunk(stats.prompt_tokens, n_cached, stats.prompt_time)
        return [r for r in read if n > 0 or r.end_of_prompt], generated


class Scheduler:
    """Runs any number of generations.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``.
        mtp (bool): Draft; ``False`` generates in mlx-lm's batch generator.
        on_switch (Callable[[str], None]): Called with ``"batch"`` where a second generation begins to generate beside one, and
          with ``"mtp"`` where one is left.
        kv_options (Dict[str, Any]): ``kv_bits`` and the like.
        kwargs: Those of ``mlx_mtp.BatchGenerator``, and mlx-lm's ``prefill_batch_size``.
    """

    def __init__(
        self,
        model: Any,
        *,
        mtp: bool,
        on_switch: Callable[[str], None],
        kv_options: dict[str, Any],
        stream: mx.Stream,
        **kwargs: Any,
    ):
        self.model, self.mtp, self.on_switch = model, mtp, on_switch
        self.batch: Any
        if mtp:
            kwargs.pop("prefill_batch_size", None)  # prompts are read one by one
            drafts: dict[str, Any] = {} if has_head(model) else {"num_draft_tokens": 0, "copy_drafts": "auto"}
            self.batch = BatchGenerator(model, stream=stream, kv=KVOptions(**kv_options), **drafts, **kwargs)
        else:
            self.batch = StockBatches(model, stream=stream, **kwargs)
        self.generations: dict[int, Generation] = {}
        self.n_generating = 0

    def __len__(self) -> int:
        return len(self.generations)

    def make_cache(self) -> list[Any]:
        """An empty cache for a generation."""
        caches: list[Any] = make_prompt_cache(self.model) if self.mtp else stock.make_prompt_cache(self.model)
        return caches

    @property
    def nbytes(self) -> int:
        """The size of the caches in use."""
        return int(self.batch.prompt_cache_nbytes)

    def add(self, s: Generation) -> None:
        drafts: dict[str, Any] = {
            "num_draft_tokens": [s.num_draft_tokens],
            "copy_drafts": [s.copy_drafts],
            "counts": [s.counts],
            "input_embeddings": [s.embeddings],
            "images": [s.images],
        }
        (uid,) = self.batch.insert_segments(
            segments=[s.segments],
            max_tokens=[s.max_tokens],
            caches=[s.prompt_cache],
            all_tokens=[s.tokens],
            samplers=[s.sampler if self.mtp else for_one_text(s.sampler)],
            logits_processors=[s.logits_processors],
            stop_sequences=[s],
            **(drafts if self.mtp else {}),
        )
        self.generations[uid], s.embeddings = s, None  # the batch drops them as they are read

    def remove(self, generation: Generation) -> None:
        """Take a generation out at once, with its cache and tokens."""
        for uid in [uid for uid, s in self.generations.items() if s is generation]:
            caches = self.batch.remove([uid], return_prompt_caches=True)
            generation.prompt_cache, generation.tokens = caches[uid]
            del self.generations[uid]

    def next(self) -> list[Event]:
        """Do a step of all generations -> what it made."""
        in_prompt, generated = self.batch.next()
        events: list[Event] = [self._progress(r) for r in in_prompt]
        for r in generated:
            s = self.generations[r.uid]
            if r.finish_reason is not None:
                s.prompt_cache, s.tokens = r.prompt_cache, r.all_tokens
                del self.generations[r.uid]
            if isinstance(r, Response) and r.error is not None:
                events.append(Failure(s, r.error))
            else:
                drafted = isinstance(r, Response) and r.from_draft
                events.append(
                    NewToken(s, r.token, r.logprobs, r.finish_reason, s.counts.source if drafted else "model")
                )
        self._count_switches()
        return events

    def close(self) -> None:
        self.batch.close()

    def _count_switches(self) -> None:
        n = len(self.batch.decoder) if self.mtp else 0
        if n > 1 >= self.n_generating:
            self.on_switch("batch")
        elif n == 1 and self.n_generating > 1:
            self.on_switch("mtp")
        self.n_generating = n

    def _progress(self, response: Any) -> Progress:
        s = self.generations[response.uid]
        done, total = response.progress
        prompt_cache = key = None
        if response.end_of_segment and not response.end_of_prompt:
            prompt_cache, key = self.batch.extract_cache([response.uid])[response.uid]
            key = key[:]
        return Progress(s, s.n_prompt - total + done, prompt_cache, key)
