"""A request while it is being generated: from its tokens to the text that its client gets."""

import time
from dataclasses import dataclass
from queue import Queue
from typing import Any

from mlx_lm import server as stock

from .batch import Token
from .request import Request


@dataclass
class Job:
    """A request that is being generated.

    Args:
        queue (Queue): Takes what the client gets: responses, an ``ApiError``, or ``None`` at the end.
        request (Request): The request.
        args (GenerationArguments): mlx-lm's.
        ctx (GenerationContext): mlx-lm's.
        tokenizer (TokenizerWrapper): mlx-lm's.
        segment_types (List[str]): Of the segments that are not in the cache yet, the last first.
    """

    queue: "Queue[Any]"
    request: Request
    args: stock.GenerationArguments
    ctx: stock.GenerationContext
    tokenizer: Any
    segment_types: list[str]

    def __post_init__(self) -> None:
        self.detokenizer = self.tokenizer.detokenizer
        self.tail = ""  # of the text, where a stop word may have begun
        self.first_token: float | None = None  # when it came

    def respond(self, event: Token, finish_reason: str | None) -> bool:
        """Send a token to the client -> whether it is the last."""
        self.request.n_tokens += 1
        self.request.n_accepted += event.from_draft
        text, finish_reason = self._text_of(event.token, finish_reason)
        logprob = event.logprobs[event.token].item() if self.args.logprobs else 0.0
        # A response without a reason ends as "stop" in mlx-lm's handler; one with "stop" would lose its text there.
        reason = None if finish_reason == "stop" else finish_reason
        top = stock._format_top_logprobs(event.logprobs, self.args.top_logprobs, self.tokenizer)
        self.queue.put(stock.Response(text, event.token, logprob, reason, top))
        return finish_reason is not None

    def _text_of(self, token: int, finish_reason: str | None) -> tuple[str, str | None]:
        if finish_reason != "stop":  # the token that ends the text has no text
            self.detokenizer.add_token(token)
        if finish_reason is not None:
            self.detokenizer.finalize()
        text = self.detokenizer.last_segment
        stop_words = self.args.stop_words
        if (cut := _to_stop_word(self.tail, text, stop_words)) is not None:
            text, finish_reason = cut, "stop"
        self.tail = (self.tail + text)[-max([1, *map(len, stop_words)]) :]
        return text, finish_reason

    def tokens_per_second(self) -> float | None:
        """After the first token; ``None`` if there is no second."""
        n = self.request.n_tokens - 1
        return n / (time.perf_counter() - self.first_token) if self.first_token is not None and n > 0 else None


def _to_stop_word(tail: str, text: str, words: list[str]) -> str | None:
    """What follows ``tail``, up to the end of the first stop word; ``None`` if there is none.

    mlx-lm compares tokens and misses a word that is tokenized differently in the text.
    """
    both = tail + text
    ends = [both.index(word) + len(word) for word in words if word and word in both]
    return text[: min(ends) - len(tail)] if ends else None
