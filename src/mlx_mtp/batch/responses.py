"""Conversion of a batch's step to mlx-lm's responses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..caches.prompt_cache import PromptCache, make_head_cache
from ..decoding.counts import DraftCounts
from ..decoding.decoder import Decoder
from ..decoding.sequence import Sequence
from ..decoding.window import Stepped

CacheOf = Callable[[Sequence], list[Any] | None]  # the prompt cache to return with a sequence's last token, if any


@dataclass
class PromptResponse:
    """mlx-lm's ``PromptProcessingBatch.Response``: the progress of a prompt's prefill."""

    uid: int
    progress: tuple[int, int]  # tokens prefilled, and tokens of the prompt
    end_of_segment: bool
    end_of_prompt: bool


@dataclass
class Response:
    """mlx-lm's ``GenerationBatch.Response``: a token of a sequence. A step may have several tokens of a sequence.

    Args:
        uid: The id of the sequence.
        token: The token; with an error, the last token before it.
        logprobs: A vector of log probabilities, [V]; ``None`` with an error.
        finish_reason: ``"stop"`` or ``"length"`` with the last token, or ``"error"`` without a token, after an
          exception of the sequence's sampler or logits processor.
        prompt_cache: With the last token, the prompt cache of ``all_tokens``.
        all_tokens: With the last token, the prompt and the generated tokens.
        from_draft: Whether the token was drafted by the head.
        counts: Drafts made and accepted for the sequence so far.
        error: The exception of the sampler or logits processor.
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


def responses_of(stepped: list[Stepped], cache_of: CacheOf) -> list[Response]:
    """A response for each token of a step, sequence by sequence."""
    responses = []
    for s, tokens in stepped:
        for token, logprobs, from_draft in tokens:
            responses.append(Response(s.uid, token, logprobs, None, None, None, from_draft, s.counts))
        if tokens and s.end in ("length", "stop"):
            _end(responses[-1], s, cache_of)
    return responses


def failures_of(sequences: list[Sequence], cache_of: CacheOf) -> list[Response]:
    """The last response of each sequence whose sampler or processor has failed."""
    responses = []
    for s in sequences:
        if isinstance(s.end, Exception):
            responses.append(Response(s.uid, s.tokens[-1], None, None, None, None, False, s.counts, s.end))
            _end(responses[-1], s, cache_of)
    return responses


def _end(last: Response, s: Sequence, cache_of: CacheOf) -> None:
    """Complete a sequence's last response."""
    last.finish_reason, last.all_tokens, last.prompt_cache = s.finish_reason, s.tokens, cache_of(s)


def cache_at_end(decoder: Decoder, s: Sequence) -> list[Any]:
    """The prompt cache of a sequence at the first token of the window in flight."""
    entries: list[Any] = [None] * len(decoder.model.layers) + make_head_cache(decoder.model)
    cache = PromptCache(entries, len(decoder.model.layers))
    n = decoder.extract(s, cache)
    cache.record(n, s.text_of(n))
    return entries
