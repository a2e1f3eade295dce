"""How an API writes an answer."""

import json
from dataclasses import dataclass
from typing import Any, Protocol

from ...decoding.counts import DraftCounts
from ..engine.delta import Delta
from ..request import ApiError

Json = dict[str, Any]


@dataclass(frozen=True)
class Usage:
    """What a request took.

    Args:
        n_prompt (int): Tokens of its prompts, each counted once.
        n_cached (int): Those of them that the prompt cache had.
        n_generated (int): Tokens of all answers.
        n_accepted (int): Those of them that were drafted.
        drafts (List[DraftCounts], optional): The drafts of each answer. ``None`` where the server makes none.
    """

    n_prompt: int
    n_cached: int
    n_generated: int
    n_accepted: int
    drafts: list[DraftCounts] | None


class Writer(Protocol):
    """Makes an answer of the engine's steps, for one request: as a stream of bytes, and whole."""

    def begin(self, usage: Usage) -> bytes:
        """What a stream begins with."""

    def waiting(self, n_read: int, n_prompt: int) -> bytes:
        """What a stream says while the prompt is read."""

    def add(self, step: Delta, choice: int = 0) -> bytes:
        """What a token adds to a stream.

        Args:
            choice (int): The number of the answer, where a request may ask for several. Default: ``0``.
        """

    def end(self, usage: Usage) -> bytes:
        """What a stream ends with."""

    def whole(self, usage: Usage) -> Json:
        """After the last step: the answer, for a client that wants no stream."""

    def failed(self, error: ApiError) -> bytes:
        """What a stream ends with where generation fails."""


def event(data: Json, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def keep_alive(n_read: int, n_prompt: int) -> bytes:
    """A comment in a stream, which clients skip: how much of a prompt is read."""
    return f": keepalive {n_read}/{n_prompt}\n\n".encode()
