"""Conversion of a batch's step to mlx-lm's responses."""

from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

from ...memory import advice
from ..caches.prompt_cache import PromptCache, make_head_cache
from ..decoding.counts import DraftCounts
from ..decoding.decoder import Decoder
from ..decoding.sequence import Sequence
from ..decoding.window import Stepped

PromptResponse = PromptProcessingBatch.Response  # the progress of a prompt's prefill


@dataclass
class Response(GenerationBatch.Response):
    """mlx-lm's ``GenerationBatch.Response``: a token of a sequence. A step may have several tokens of a sequence.

    The last one has a ``finish_reason``, ``"stop"`` or ``"length"``, the prompt and generated tokens, and their prompt cache.
    After an exception of the sequence's sampler, of a logits processor or of a pass, ``"error"``, it has no log probabilities,
    and ``token`` is the last token before the exception.
    """

    from_draft: bool
    counts: DraftCounts  # drafts made and accepted for the sequence so far
    error: Exception | None = None


def responses_of(stepped: list[Stepped], decoder: Decoder | None) -> list[Response]:
    """A response for each token of a step, sequence by sequence. Of the last, the prompt cache is the decoder's, if given."""
    responses = []
    for s, tokens in stepped:
        for token, logprobs, from_draft in tokens:
            responses.append(Response(s.uid, token, logprobs, None, None, None, from_draft, s.counts))
        if s.end is None:
            continue
        if not tokens:  # its sampler, a processor or a pass has failed
            last_token = s.tokens[-1] if s.tokens else 0
            responses.append(Response(s.uid, last_token, None, None, None, None, False, s.counts, s.end))
        last = responses[-1]
        last.finish_reason, last.all_tokens = s.finish_reason, s.tokens
        # Nothing of a failed pass is kept.
        last.prompt_cache = None if decoder is None or advice(last.error) is not None else cache_at_end(decoder, s)
    return responses


def cache_at_end(decoder: Decoder, s: Sequence) -> list[Any]:
    """The prompt cache of a sequence that generates, with all of its tokens."""
    entries: list[Any] = [None] * len(decoder.model.layers) + make_head_cache(decoder.model)
    cache = PromptCache(entries, len(decoder.model.layers))
    n = decoder.extract(s, cache, s.prompt_end + s.n_observed)
    cache.record(n, s.text_of(n))
    return entries
