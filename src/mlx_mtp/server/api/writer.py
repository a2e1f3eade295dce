"""How an API writes an answer: as a stream of events, or whole; in blocks, where the API has them."""

import json
from dataclasses import dataclass
from typing import Any, Protocol

from ...decoding.counts import DraftCounts
from ...text.answer import Reasoning
from ...text.schema import Json
from ...text.tool_calls import CallArguments, CallBegins, Text
from ..engine.delta import Delta
from ..request import ApiError


@dataclass(frozen=True)
class Usage:
    """The tokens of a request."""

    n_prompt: int  # tokens of the prompts, each counted once
    n_cached: int  # cached tokens among them
    n_generated: int  # tokens of all answers
    n_accepted: int  # accepted drafts among them
    drafts: list[DraftCounts] | None  # the drafts of each answer; None where the server makes none


class Writer(Protocol):
    """Writes the answer to one request from the engine's steps: as a stream of bytes, and whole."""

    def begin(self, usage: Usage) -> bytes:
        """The beginning of a stream."""
        return b""

    def waiting(self, n_read: int, n_prompt: int) -> bytes:
        """The progress of prefill, in a stream: a comment, which clients skip."""
        return f": keepalive {n_read}/{n_prompt}\n\n".encode()

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


class BlockWriter(Writer, Protocol):
    """The part of a ``Writer`` that the APIs with blocks share: which block is open. An API says how each is written."""

    blocks: list[Json]  # the answer so far
    is_open: bool = False  # whether the last one goes on
    finish_reason: str | None = None  # why the answer has ended

    def __init__(self) -> None:
        self.blocks = []

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

    def reasoning(self, piece: Reasoning) -> bytes:
        """A piece of reasoning in a stream."""

    def call(self, call: CallBegins) -> Json:
        """The block of a call."""

    def arguments(self, piece: CallArguments) -> bytes:
        """A piece of the last call's arguments in a stream."""

    def opened(self, block: Json) -> bytes:
        """The beginning of the last block in a stream."""

    def closed(self, block: Json) -> bytes:
        """Complete the last block -> its end in a stream."""

    def message(self, usage: Usage) -> Json:
        """The answer, once its blocks are closed."""
