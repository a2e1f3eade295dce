"""``mtp_generate_step``: mlx-lm's ``generate_step`` with drafts, one text alone in a ``Scheduler``."""

import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, generation_stream

from ...errors import MTPError
from ..caches.positions import ImageSpan
from ..caches.prompt_cache import PromptCache, open_prompt_cache, place_images
from ..caches.rows import KVOptions
from ..decoding.counts import DraftCounts
from ..decoding.decoder import DecoderState
from ..decoding.prefill import check_embeddings, prefill_chunk, prefill_part
from ..decoding.sequence import Task, TextSequence
from ..decoding.window import Token
from ..distributed import synchronize
from ..drafts.options import TextOptions
from ..layers.mtp import has_head
from ..models.mixin import check_model
from ..pacing.depth import Depth
from .ids import TokenIds, check_count, token_ids
from .scheduler import PrefillBudget, Scheduler


def mtp_generate_step(
    prompt: TokenIds,
    model: nn.Module,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    *,
    options: TextOptions | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | PromptCache | None = None,
    all_tokens: Iterable[int] = (),
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    prompt_cuts: Iterable[int] = (),
    input_embeddings: mx.array | None = None,
    images: Iterable[ImageSpan] = (),
    counts: DraftCounts | None = None,
    **keywords: Any,
) -> Generator[Token, None, None]:
    """
    A generator producing the tokens of mlx-lm's ``generate_step``, with the model's MTP head as the draft model.

    When it ends, is closed, interrupted or fails, the prompt cache holds the prompt and exactly the tokens it has yielded.

    Args:
        prompt (Union[mx.array, List[int]]): The token ids of the input prompt, [T]: a sequence or array of integers, [1, T] as
          well, or a ``BatchEncoding`` of transformers.
        model (nn.Module): A model of ``mlx_mtp.load``.
        options (TextOptions, optional): The options of the text in one object. Default: ``None``.
        max_kv_size (int, optional): Must be ``None``: the caches of these models do not rotate.
        prompt_cache (List[Any], optional): A pre-computed cache of ``mlx_mtp.make_prompt_cache`` or of mlx-lm, updated
          in place.
        all_tokens (Iterable[int]): The tokens in the prompt cache, for logits processors, as in batches. Default: none; they
          see the prompt, as in mlx-lm.
        prefill_step_size (int): Step size for processing the prompt.
        kv_bits, kv_group_size, quantized_kv_start (optional): The quantization of keys and values, as in mlx-lm. In a prompt
          it begins at mlx-lm's chunks of 2,048 tokens, whatever ``prefill_step_size``. Default: none.
        prompt_progress_callback (Callable[[int, int], None]): A call-back which takes the prompt tokens processed so far
          and the total number of prompt tokens. Until the first token, the prompt cache then holds the tokens processed so far.
        prompt_cuts (Iterable[int]): Numbers of prompt tokens after which a step of processing ends. Default: none.
        input_embeddings (mx.array, optional): Input embeddings to use instead of or in conjunction with prompt tokens,
          [T, H]. Default: ``None``.
        images (Iterable[ImageSpan]): The spans of the text's images, counted from the first token in the prompt cache; their
          embeddings are among ``input_embeddings``. Images that are in the prompt cache may be left out.
        counts (DraftCounts, optional): Counts drafts as the steps go.
        keywords: Options by the names of ``mlx_mtp.TextOptions``, which replace those of ``options``, such as ``max_tokens=-1``
          for an infinite generator.

    Yields:
        Tuple[int, mx.array, bool]: One token, a vector of log probabilities [V], and whether it was drafted.

    Raises:
        MTPError: The model has no MTP head and ``copy_drafts`` is not given, the prompt cache does not fit it, or an
          argument is out of range, or the prompt is no token ids of the model.
    """
    options = TextOptions.given(options, keywords)
    mtp_model = check_model(model, options)
    ids = token_ids(prompt, model)
    prefill_step_size = check_count("prefill_step_size", prefill_step_size)
    if max_kv_size is not None:
        raise MTPError("max_kv_size is not supported: the caches of this model do not rotate.")
    if input_embeddings is not None:
        check_embeddings(mtp_model, len(ids), input_embeddings)
    if not ids and (input_embeddings is None or len(input_embeddings) == 0):
        raise MTPError("Either input_embeddings or prompt (or both) must be provided.")
    options = options.resolve(mtp_model.draft_settings.tuned, has_head(model))
    cache = open_prompt_cache(model, prompt_cache)
    place_images(mtp_model, cache, images, input_embeddings is not None)
    kv = KVOptions(kv_bits=kv_bits, kv_group_size=kv_group_size, quantized_kv_start=quantized_kv_start)
    depth = options.num_draft_tokens if isinstance(options.num_draft_tokens, Depth) else None
    scheduler = Scheduler(mtp_model, kv, PrefillBudget(prefill_step_size, math.inf, 0.0), stream, depth=depth)
    if (exchange := scheduler.planner.exchange) is not None:
        with mx.stream(stream):
            options = replace(options, sampler=exchange.agree(ids, cache.n_tokens, options.sampler))
    tokens = ids or [0] * len(input_embeddings)  # type: ignore[arg-type]
    ends = [0, *sorted(cut for cut in prompt_cuts if 0 < cut < len(tokens)), len(tokens)]
    sequence = TextSequence(
        Task(options, kv, has_tokens=len(ids) > 0),
        cache,
        [tokens[start:end] for start, end in pairwise(ends)],
        counts or DraftCounts(),
        token_ids([*all_tokens], model, "all_tokens"),
        input_embeddings,
    )
    yield from _generate(scheduler, sequence, prompt_progress_callback or (lambda *_: None))


def _generate(
    scheduler: Scheduler, s: TextSequence, progress: Callable[[int, int], Any]
) -> Generator[Token, None, None]:
    """Prefill a prompt and generate its tokens, alone in the scheduler."""
    n_yielded = 0
    before: DecoderState | None = None
    scheduler.prompts.append(s)
    try:
        progress(0, s.n_prompt)
        while not s.is_prefilled:
            for r in scheduler.prefill():
                progress(*r.progress)
        if s.task.max_tokens == 0:
            with mx.stream(scheduler.stream):
                prefill_part(scheduler.model, s, 1)
            progress(s.n_prompt, s.n_prompt)
        while s.task.max_tokens != 0 and s.end is None:
            before = scheduler.decoder.state if scheduler.decoder.sequences else None
            tokens = [token for _, tokens in scheduler.step()[1] for token in tokens]
            if isinstance(s.end, Exception):  # Its sampler or a processor has failed.
                raise s.end
            if n_yielded == 0 and tokens:
                progress(s.n_prompt, s.n_prompt)
            for n_left, token in zip(range(len(tokens) - 1, -1, -1), tokens):
                # The last one is the first token of the window in flight. No interrupt can come before the yield.
                n_yielded, before = n_yielded + 1, before if n_left > 0 else None
                yield token  # while the device drafts and verifies
    finally:
        try:
            finalize(scheduler, s, before, n_yielded)
        except BaseException:  # users press Ctrl-C twice, and still expect the cache to be kept
            finalize(scheduler, s, before, n_yielded)
            raise


def finalize(scheduler: Scheduler, s: TextSequence, before: DecoderState | None, n_yielded: int) -> None:
    """End a generation, also after an error or an interrupt: its prompt cache holds exactly the prompt and the tokens yielded.

    ``before`` is the state before the latest step, if its tokens were not all yielded.
    """
    decoder = scheduler.decoder
    with mx.stream(scheduler.stream):
        if before is not None:
            decoder.restore(before)
        if decoder.sequences:
            end = s.prompt_end + n_yielded
            n = decoder.extract(s, s.cache, end)
            if missing := s.text[n - s.text_start : end - s.text_start]:
                prefill_chunk(decoder.model, s.cache, mx.array(missing, mx.uint32), None, s.kv)
        if decoder.exchange is not None:
            synchronize(scheduler.stream)  # collectives of the pass in flight would corrupt those of another stream
        # Last: until here the cache is marked as unfinished.
        s.cache.record(s.cache.n_tokens, s.text_of(s.cache.n_tokens))
