"""How an API writes an answer: as a stream of events, or whole; in blocks, where the API has them."""

import json
from dataclasses import dataclass
from typing import Any, Protocol

from ...decoding.counts import DraftCounts
from ...text.schema import Json
from ...text.tool_calls import CallArguments, CallBegins, Text
from ..answers.answer import Reasoning
from ..engine.delta import Delta
from ..request import ApiError


@dataclass(frozen=True)
class Usage:
    """The tokens of a request.

    Args:
        n_prompt (int): Tokens of its prompts, each counted once.
        n_cached (int): Cached tokens among them.
        n_generated (int): Tokens of all answers.
        n_accepted (int): Accepted drafts among them.
        drafts (List[DraftCounts], optional): The drafts of each answer. ``None`` where the server makes none.
    """

    n_prompt: int
    n_cached: int
    n_generated: int
    n_accepted: int
    drafts: list[DraftCounts] | None


class Writer(Protocol):
    """Writes the answer to one request from the engine's steps: as a stream of bytes, and whole."""

    def begin(self, usage: Usage) -> bytes:
        """The beginning of a stream."""

    def waiting(self, n_read: int, n_prompt: int) -> bytes:
        """The progress of prefill, in a stream."""

    def add(self, step: Delta, choice: int = 0) -> bytes:
        """A token's part of a stream.

        Args:
            choice (int): The number of the answer, where a request may ask for several. Default: ``0``.
        """

    def end(self, usage: Usage) -> bytes:
        """The end of a stream."""

    def whole(self, usage: Usage) -> Json:
        """The whole answer, after the last step, for a client that wants no stream."""

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream whose generation has failed."""


def event(data: Json, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def keep_alive(n_read: int, n_prompt: int) -> bytes:
    """A comment in a stream, which clients skip: the progress of prefill."""
    return f": keepalive {n_read}/{n_prompt}\n\n".encode()


class BlockWriter:
    """The part of a ``Writer`` that the APIs with blocks share: which block is open. An API says how each is written.

    Attributes:
        blocks (List[Dict[str, Any]]): Those of the answer so far.
        is_open (bool): Whether the last one goes on.
        finish_reason (str, optional): The reason why the answer has ended; ``None`` before its end.
    """

    def __init__(self) -> None:
        self.blocks: list[Json] = []
        self.is_open = False
        self.finish_reason: str | None = None

    def waiting(self, n_read: int, n_prompt: int) -> bytes:
        return keep_alive(n_read, n_prompt)

    def add(self, step: Delta, choice: int = 0) -> bytes:
        self.finish_reason = step.finish_reason or self.finish_reason
        return b"".join(self._add(e) for e in step.events)

    def _add(self, e: Any) -> bytes:
        if isinstance(e, Text):
            return self.text(e)
        if isinstance(e, Reasoning):
            return self.reasoning(e)
        if isinstance(e, CallBegins):
            return self.open(self.call(e))
        if isinstance(e, CallArguments):
            return self.arguments(e)
        return self.close()

    def open(self, block: Json) -> bytes:
        """Begin a block behind the last one."""
        closed = self.close()
        self.blocks.append(block)
        self.is_open = True
        return closed + self.opened(block)

    def goes_on(self, kind: str) -> bool:
        """Whether the last block is open and of a type."""
        return self.is_open and self.blocks[-1]["type"] == kind

    def close(self) -> bytes:
        """End the last block, if it is open."""
        if not self.is_open:
            return b""
        self.is_open = False
        return self.closed(self.blocks[-1])

    def whole(self, usage: Usage) -> Json:
        self.close()
        return self.message(usage)

    def text(self, piece: Text) -> bytes:
        """A piece of text in a stream."""
        raise NotImplementedError

    def reasoning(self, piece: Reasoning) -> bytes:
        """A piece of reasoning in a stream."""
        raise NotImplementedError

    def call(self, call: CallBegins) -> Json:
        """The block of a call."""
        raise NotImplementedError

    def arguments(self, piece: CallArguments) -> bytes:
        """A piece of the last call's arguments in a stream."""
        raise NotImplementedError

    def opened(self, block: Json) -> bytes:
        """The beginning of the last block in a stream."""
        raise NotImplementedError

    def closed(self, block: Json) -> bytes:
        """Complete the last block -> its end in a stream."""
        raise NotImplementedError

    def message(self, usage: Usage) -> Json:
        """The answer, once its blocks are closed."""
        raise NotImplementedError
