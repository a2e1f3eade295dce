"""Answers that an API writes as blocks, one after another: text, reasoning, calls."""

from typing import Any

from ...text.schema import Json
from ...text.tool_calls import CallArguments, CallBegins, Text
from ..answers.answer import Reasoning
from ..engine.delta import Delta
from .writer import Usage, keep_alive


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
