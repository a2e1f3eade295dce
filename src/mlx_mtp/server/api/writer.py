"""How an API writes an answer."""

import json
from dataclasses import dataclass
from typing import Protocol

from ...decoding.counts import DraftCounts
from ...text.schema import Json
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
