"""Conversion of a batch's step to mlx-lm's responses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

from ..caches.prompt_cache import PromptCache, make_head_cache
from ..decoding.counts import DraftCounts
from ..decoding.decoder import Decoder
from ..decoding.sequence import Sequence
from ..decoding.window import Stepped

CacheOf = Callable[[Sequence], list[Any] | None]  # the prompt cache to return with a sequence's last token, if any
PromptResponse = PromptProcessingBatch.Response  # the progress of a prompt's prefill


@dataclass
class Response(GenerationBatch.Response):
    """mlx-lm's ``GenerationBatch.Response``: a token of a sequence. A step may have several tokens of a sequence.

    The last one has a ``finish_reason``, ``"stop"`` or ``"length"``, the prompt and generated tokens, and their prompt cache.
    After an exception of the sequence's sampler or logits processor, ``"error"``, it has no log probabilities, and ``token`` is
    the last token before the exception.
    """

    from_draft: bool
    counts: DraftCounts  # drafts made and accepted for the sequence so far
    error: Exception | None = None


def responses_of(stepped: list[Stepped], cache_of: CacheOf) -> list[Response]:
    """A response for each token of a step, sequence by sequence."""
    responses = []
    for s, tokens in stepped:
        for token, logprobs, from_draft in tokens:
            responses.append(Response(s.uid, token, logprobs, None, None, None, from_draft, s.counts))
        if tokens and s.end is not None:
            last = responses[-1]
            last.finish_reason, last.all_tokens, last.prompt_cache = s.finish_reason, s.tokens, cache_of(s)
    return responses


def failures_of(sequences: list[Sequence], cache_of: CacheOf) -> list[Response]:
    """The last response of each sequence whose sampler or processor has failed."""
    return [
        Response(s.uid, s.tokens[-1], None, s.finish_reason, cache_of(s), s.tokens, False, s.counts, s.end)
        for s in sequences
        if isinstance(s.end, Exception)
    ]


def cache_at_end(decoder: Decoder, s: Sequence) -> list[Any]:
    """The prompt cache of a sequence at the first token of the window in flight."""
    entries: list[Any] = [None] * len(decoder.model.layers) + make_head_cache(decoder.model)
    cache = PromptCache(entries, len(decoder.model.layers))
    n = decoder.extract(s, cache)
    cache.record(n, s.text_of(n))
    return entries
