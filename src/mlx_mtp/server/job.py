"""A request while it is being generated: from its tokens to the text that its client gets."""

import math
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm import server as stock

from .answer import Answer, Event
from .batch import NewToken
from .request import Request
from .text_tokens import Pieces


@dataclass(frozen=True)
class Likely:
    """A token, and how likely it was.

    Args:
        piece (bytes): What it says: one token may have a part of a character.
        logprob (float): Before the temperature and the sampler's filters.
    """

    piece: bytes
    logprob: float


@dataclass(frozen=True)
class Delta:
    """What a token adds to an answer.

    Args:
        events (List[Event]): What it says.
        token (int): The token.
        finish_reason (str, optional): Why the answer ends here, if it does.
        stop_word (str, optional): The one of the request's that has ended the text.
        source (str, optional): "model", or what has drafted the token: "head", "copies" or "grammar". ``None`` where it is
          not known.
        likely (Likely, optional): The token as ``logprobs`` shows it; ``None`` where the request does not ask for that.
        top (List[Likely]): The likeliest tokens in its place, as many as were asked for, the likeliest first.
    """

    events: list[Event]
    token: int
    finish_reason: str | None
    stop_word: str | None = None
    source: str | None = None
    likely: Likely | None = None
    top: list[Likely] = field(default_factory=list)


class Outbox(Protocol):
    """Where what a client gets is put."""

    def put(self, response: Any) -> None: ...


@dataclass
class Job:
    """A request that is being generated.

    Args:
        queue (Outbox): Takes what the client gets: steps, an ``ApiError``, or ``None`` at the end.
        request (Request): The request.
        args (GenerationArguments): mlx-lm's.
        ctx (GenerationContext): mlx-lm's.
        answer (Answer): What reads its text.
        tokenizer (TokenizerWrapper): mlx-lm's.
        segment_types (List[str]): Of the segments that are not in the cache yet, the last first.
    """

    queue: Outbox
    request: Request
    args: stock.GenerationArguments
    ctx: stock.GenerationContext
    answer: Answer
    tokenizer: Any
    segment_types: list[str]

    def __post_init__(self) -> None:
        self.detokenizer = self.tokenizer.detokenizer
        if self.request.goes_on:  # or it would drop a space that the answer begins with
            self.detokenizer.add_token(self.ctx.prompt[-1])
            self.detokenizer.last_segment  # noqa: B018 (it is not the answer's)
        self.pieces: Pieces | None = None  # where log probabilities are asked for
        self.first_token: float | None = None  # when it came

    def respond(self, event: NewToken, finish_reason: str | None) -> bool:
        """Send a token to the client -> whether it is the last."""
        self.request.n_tokens += 1
        self.request.n_accepted += event.from_draft
        events, finish_reason = self.answer.step(self._text_of(event.token, finish_reason), finish_reason)
        likely, top = self._likely(event) if self.args.logprobs else (None, [])
        stop_word = self.answer.stop.found
        self.queue.put(Delta(events, event.token, finish_reason, stop_word, event.source, likely, top))
        return finish_reason is not None

    def _likely(self, event: NewToken) -> tuple[Likely, list[Likely]]:
        """The token, and the likeliest ones in its place; those that a grammar forbids are left out."""
        n = max(self.args.top_logprobs, 0)
        tokens = mx.argpartition(-event.logprobs, kth=n - 1)[:n] if n > 0 else mx.zeros(0, mx.int32)
        tokens = mx.concatenate([mx.array([event.token]), tokens.astype(mx.int32)])  # [1 + n]
        if self.pieces is None:
            self.pieces = Pieces(self.tokenizer)
        logprobs: Any = event.logprobs[tokens].tolist()
        pieces = self.pieces.of(tokens.tolist())  # type: ignore[arg-type]
        likely, *top = map(Likely, pieces, logprobs)
        return likely, sorted((t for t in top if t.logprob > -math.inf), key=lambda t: -t.logprob)

    def _text_of(self, token: int, finish_reason: str | None) -> str:
        if finish_reason != "stop":  # the token that ends the text has no text
            self.detokenizer.add_token(token)
        if finish_reason is not None:
            self.detokenizer.finalize()
        text: str = self.detokenizer.last_segment
        return text

    def tokens_per_second(self) -> float | None:
        """After the first token; ``None`` if there is no second."""
        n = self.request.n_tokens - 1
        return n / (time.perf_counter() - self.first_token) if self.first_token is not None and n > 0 else None
