"""The steps of an answer: the events of one token."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from ...batch.generator import Response
from ...text.tokens import Pieces
from ..answers.answer import Event
from ..request import Request


@dataclass(frozen=True)
class Likely:
    """A token and its log probability.

    Args:
        piece (bytes): Its text, which may end within a character.
        logprob (float): Before the temperature and the sampler's filters.
    """

    piece: bytes
    logprob: float


@dataclass(frozen=True)
class Delta:
    """A token's part of an answer.

    Args:
        events (List[Event]): Its text, reasoning and calls.
        token (int): The token.
        finish_reason (str, optional): The reason why the answer ends here, if it does.
        stop_word (str, optional): The request's stop word that ended the text.
        source (str, optional): "model", or the source of the accepted draft: "head", "copies" or "grammar".
        likely (Likely, optional): The token's log probability, if the request asks for it.
        top (List[Likely]): The likeliest tokens at its position, in order, as many as the request asks for.
    """

    events: list[Event]
    token: int
    finish_reason: str | None
    stop_word: str | None = None
    source: str | None = None
    likely: Likely | None = None
    top: list[Likely] = field(default_factory=list)


def make_delta(request: Request, response: Response, finish_reason: str | None) -> Delta:
    """Add a token to the request's answer.

    Args:
        response (Response): The batch generator's, with a token.
        finish_reason (str, optional): "stop" or "length" with the last token.
    """
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
    """The token, and the n most likely ones at its position that a grammar allows."""
    tokens = mx.argpartition(-logprobs, kth=n - 1)[:n] if n > 0 else mx.zeros(0, mx.int32)
    tokens = mx.concatenate([mx.array([token]), tokens.astype(mx.int32)])  # [1 + n]
    values: Any = logprobs[tokens].tolist()
    likely, *top = map(Likely, pieces.of(tokens.tolist()), values)  # type: ignore[arg-type]
    return likely, sorted((t for t in top if t.logprob > -math.inf), key=lambda t: -t.logprob)
