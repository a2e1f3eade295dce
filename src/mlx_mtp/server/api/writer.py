"""The protocols of the APIs' writers, which write an answer as a stream of events or as a whole."""

import json
from dataclasses import dataclass
from typing import Any, Protocol

from ...decoding.counts import DraftCounts
from ...text.answer import Reasoning
from ...text.schema import Json
from ...text.tool_calls import CallArguments, CallBegins, Text
from ..request import ApiError, Delta


@dataclass(frozen=True)
class Usage:
    """The tokens of a request."""

    n_prompt: int  # tokens of the prompts, each counted once
    n_cached: int  # cached tokens among them
    n_generated: int  # tokens of all answers
    n_accepted: int  # accepted drafts among them
    drafts: list[DraftCounts] | None  # of each answer; None if the server does not draft


class Writer(Protocol):
    """Writes the answer to one request from the engine's steps: as a stream of bytes, or as a whole."""

    def begin(self, usage: Usage) -> bytes:
        """The beginning of a stream."""
        return b""

    def waiting(self, n_read: int, n_prompt: int) -> bytes:
        """The progress of prefill in a stream, by default as a comment, which clients ignore."""
        return f": keepalive {n_read}/{n_prompt}\n\n".encode()

    def add(self, step: Delta, choice: int = 0) -> bytes:
        """The part of a stream for a step.

        Args:
            choice (int): The index of the answer, in APIs with several answers to a request. Default: ``0``.
        """

    def end(self, usage: Usage) -> bytes:
        """The end of a stream."""

    def whole(self, usage: Usage) -> Json:
        """The whole answer, after the last step, for a client that does not stream."""

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream whose generation has failed."""


def event(data: Json, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data)}\n\n".encode()


class BlockWriter(Writer, Protocol):
    """A ``Writer`` for APIs whose answers consist of blocks. It tracks the open block; each API formats its blocks."""

    blocks: list[Json]  # the answer so far
    is_open: bool = False  # whether the last block is open
    finish_reason: str | None = None

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
        """End the open block, and begin a new one."""
        closed = self.close()
        self.blocks.append(block)
        self.is_open = True
        return closed + self.opened(block)

    def goes_on(self, kind: str) -> bool:
        """Whether a block of this type is open."""
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
        """Complete the last block. Return its end in a stream."""

    def message(self, usage: Usage) -> Json:
        """The answer, once its blocks are closed."""
