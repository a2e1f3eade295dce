"""The increment of an answer: the events of one token."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from ...batch.generator import Response
from ...text.answer import Event
from ...text.tokens import Pieces
from ..request import Request


@dataclass(frozen=True)
class Likely:
    """A token and its log probability."""

    piece: bytes  # the token's text, which may end within a character
    logprob: float  # before the temperature and the sampler's filters


@dataclass(frozen=True)
class Delta:
    """The part of an answer that one token adds."""

    events: list[Event]  # the token's text, reasoning and calls
    token: int
    finish_reason: str | None  # None unless the answer ends here
    stop_word: str | None = None  # the stop word that ended the text
    source: str | None = None  # "model", or the source of the accepted draft: "head", "copies" or "grammar"
    likely: Likely | None = None  # the token's log probability, if requested
    top: list[Likely] = field(default_factory=list)  # the requested number of likeliest tokens, in order


def make_delta(request: Request, response: Response, finish_reason: str | None) -> Delta:
    """Add a token to the request's answer; ``finish_reason`` is "stop" or "length" for the last token."""
    token, logprobs = response.token, response.logprobs
    assert logprobs is not None
    request.n_tokens += 1
    request.n_accepted += response.from_draft
    text = _text_of(request.detokenizer, token, finish_reason)
    events, finish_reason = request.answer.step(text, finish_reason)
    source = response.counts.source if response.from_draft else "model"
    delta = Delta(events, token, finish_reason, request.answer.stop.found, source)
    if request.pieces is None:
        return delta
    likely, top = _likely(logprobs, token, max(request.args.top_logprobs, 0), request.pieces)
    return replace(delta, likely=likely, top=top)


def _text_of(detokenizer: Any, token: int, finish_reason: str | None) -> str:
    if finish_reason != "stop":  # the token that ends the text has no text
        detokenizer.add_token(token)
    if finish_reason is not None:
        detokenizer.finalize()
    text: str = detokenizer.last_segment
    return text


def _likely(logprobs: mx.array, token: int, n: int, pieces: Pieces) -> tuple[Likely, list[Likely]]:
    """The token, and the n likeliest tokens at its position that the grammar allows."""
    tokens = mx.argpartition(-logprobs, kth=n - 1)[:n] if n > 0 else mx.zeros(0, mx.int32)
    tokens = mx.concatenate([mx.array([token]), tokens.astype(mx.int32)])  # [1 + n]
    values: Any = logprobs[tokens].tolist()
    likely, *top = map(Likely, pieces.of(tokens.tolist()), values)  # type: ignore[arg-type]
    return likely, sorted((t for t in top if t.logprob > -math.inf), key=lambda t: -t.logprob)
