"""The options of a batch's sequences: their own, or the generator's defaults."""

import copy
from collections import abc
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.sample_utils import LogitsProcessor, Sampler

from ..caches.positions import ImageSpan
from ..caches.prompt_cache import open_prompt_cache, place_images
from ..decoding.counts import DraftCounts
from ..decoding.loop import check_embeddings
from ..decoding.sequence import PendingEmbeddings, Sequence
from ..drafts.draft_options import CopyDrafts, DraftOptions, NumDraftTokens, resolve
from ..pacing.depth import MAX_DRAFT_TOKENS, Depth


def check_count(name: str, value: Any) -> int:
    """
    Raises:
        ValueError: The value is not an integer of 1 or more.
    """
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be an integer of 1 or more, not {value}.")
    return int(value)


def check_entries(options: abc.Mapping[str, Any], n: int) -> None:
    """
    Raises:
        ValueError: An option does not have one entry for each of n prompts.
    """
    for name, values in options.items():
        is_list = isinstance(values, abc.Sequence) and not isinstance(values, str)
        if not is_list or len(values) != n:
            got = len(values) if is_list else values
            raise ValueError(f"{name} must have an entry for each prompt: {n}, not {got}.")


@dataclass(frozen=True)
class Defaults:
    """The default options of sequences: arguments of ``BatchGenerator``.

    Args:
        model (MTPModel): The model of all sequences.
        is_quantized (bool): Whether keys and values are quantized.
    """

    model: Any
    max_tokens: int
    sampler: Sampler | None
    logits_processors: list[LogitsProcessor]
    stop_sequences: StopSequences
    num_draft_tokens: NumDraftTokens | None
    copy_drafts: CopyDrafts | None
    is_quantized: bool

    def resolve(self, num_draft_tokens: NumDraftTokens | None, copy_drafts: CopyDrafts | None) -> DraftOptions:
        """Resolve a sequence's draft options: its own or the generator's, whose number is the upper limit.

        Raises:
            ValueError: An option is out of range.
        """
        given = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        own = resolve(self.model, given, self.copy_drafts if copy_drafts is None else copy_drafts)
        numbers = [own.num_draft_tokens, self.num_draft_tokens]
        for number in numbers:
            if isinstance(number, Depth):  # a Depth has the times of one sequence
                raise ValueError(f"num_draft_tokens must be auto or from 0 to {MAX_DRAFT_TOKENS}, not {number}.")
        most = min((n for n in numbers if isinstance(n, int)), default=None)
        return own if most is None else replace(own, num_draft_tokens=most)

    def make_sequence(
        self,
        i: int,
        uid: int,
        *,
        segments: list[list[int]],
        max_tokens: int,
        caches: list[Any] | None,
        all_tokens: list[int],
        samplers: Sampler | None,
        logits_processors: abc.Sequence[LogitsProcessor] | None,
        stop_sequences: StopSequences,
        num_draft_tokens: NumDraftTokens | None,
        copy_drafts: CopyDrafts | None,
        counts: DraftCounts,
        input_embeddings: mx.array | PendingEmbeddings | None,
        images: abc.Sequence[ImageSpan],
    ) -> Sequence:
        """Make the sequence of a call's prompt i. Each argument is its entry of an argument of ``insert_segments``."""
        segments = [list(segment) for segment in segments if segment]
        if not segments:
            raise ValueError(f"Prompt {i} is empty.")
        check_count(f"max_tokens of prompt {i}", max_tokens)
        options = self.resolve(num_draft_tokens, copy_drafts)
        if not self.is_quantized and any(isinstance(c, QuantizedKVCache) for c in caches or []):
            raise ValueError(f"The prompt cache of prompt {i} is quantized: generate its text without a batch.")
        n_prompt = sum(map(len, segments))
        if input_embeddings is not None:
            check_embeddings(self.model, n_prompt, input_embeddings)
        cache = open_prompt_cache(self.model, copy.deepcopy(caches))
        place_images(self.model, cache, images, input_embeddings is not None)
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
            embeddings=input_embeddings if isinstance(input_embeddings, mx.array) else None,
            pending=None if isinstance(input_embeddings, mx.array) else input_embeddings,
            uid=uid,
        )
