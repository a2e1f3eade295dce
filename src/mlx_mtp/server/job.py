"""A request while it is being generated: from its tokens to the text that its client gets."""

import time
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_lm import server as stock

from .answer import Answer, Event
from .batch import NewToken
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
        source (str, optional): "model", or what has drafted the token: "head", "copies" or "grammar". ``None`` where it is
          not known.
    """

    events: list[Event]
    token: int
    logprob: float
    top_tokens: tuple[dict[str, Any], ...]
    finish_reason: str | None
    stop_word: str | None = None
    source: str | None = None


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
        self.first_token: float | None = None  # when it came

    def respond(self, event: NewToken, finish_reason: str | None) -> bool:
        """Send a token to the client -> whether it is the last."""
        self.request.n_tokens += 1
        self.request.n_accepted += event.from_draft
        events, finish_reason = self.answer.step(self._text_of(event.token, finish_reason), finish_reason)
        logprob: Any = event.logprobs[event.token].item() if self.args.logprobs else 0.0
        top = stock._format_top_logprobs(event.logprobs, self.args.top_logprobs, self.tokenizer)
        self.queue.put(Delta(events, event.token, logprob, top, finish_reason, self.answer.stop.found, event.source))
        return finish_reason is not None

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
