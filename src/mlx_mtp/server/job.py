"""What a token adds to an answer."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..batch.generator import Response
from .answer import Event
from .request import Request


@dataclass(frozen=True)
class Delta:
    """What a token adds to an answer.

    Args:
        events (List[Event]): What it says.
        token (int): The token.
        logprob (float): Its own.
        top_tokens (Tuple[Dict[str, Any]]): The most probable tokens, as mlx-lm formats them.
        finish_reason (str, optional): Why the answer ends here, if it does.
        stop_word (str, optional): The one of the request's that has ended the text.
        source (str, optional): "model", or what has drafted the token: "head", "copies" or "grammar".
    """

    events: list[Event]
    token: int
    logprob: float
    top_tokens: tuple[dict[str, Any], ...]
    finish_reason: str | None
    stop_word: str | None = None
    source: str | None = None


def make_delta(request: Request, response: Response, tokenizer: Any, finish_reason: str | None) -> Delta:
    """Add a token to the request's answer.

    Args:
        response (Response): The batch generator's, with a token.
        tokenizer (TokenizerWrapper): mlx-lm's.
        finish_reason (str, optional): "stop" or "length" with the last token.
    """
    token, logprobs = response.token, response.logprobs
    assert logprobs is not None
    request.n_tokens += 1
    request.n_accepted += response.from_draft
    text = _text_of(request.detokenizer, token, finish_reason)
    events, finish_reason = request.answer.step(text, finish_reason)
    logprob: Any = logprobs[token].item() if request.args.logprobs else 0.0
    top = _top_tokens(logprobs, request.args.top_logprobs, tokenizer)
    source = response.counts.source if response.from_draft else "model"
    return Delta(events, token, logprob, top, finish_reason, request.answer.stop.found, source)


def _text_of(detokenizer: Any, token: int, finish_reason: str | None) -> str:
    if finish_reason != "stop":  # the token that ends the text has no text
        detokenizer.add_token(token)
    if finish_reason is not None:
        detokenizer.finalize()
    text: str = detokenizer.last_segment
    return text


def _top_tokens(logprobs: mx.array, n: int, tokenizer: Any) -> tuple[dict[str, Any], ...]:
    """The n most probable tokens."""
    if n <= 0:
        return ()
    tokens: Any = mx.argpartition(-logprobs, kth=n - 1)[:n].tolist()
    values: Any = logprobs[mx.array(tokens)].tolist()
    names = tokenizer.convert_ids_to_tokens(tokens)
    return tuple({"id": i, "token": name, "logprob": value} for i, name, value in zip(tokens, names, values))
