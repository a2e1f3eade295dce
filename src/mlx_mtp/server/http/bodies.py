"""The bytes of requests: how many may arrive, in which time, and where they are parsed."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from ..api.body import MAX_BODY
from ..engine.frontend import in_thread
from ..request import ApiError

T = TypeVar("T")
MAX_BODIES = 16 * MAX_BODY  # bytes of all bodies that arrive or are parsed at a time
LARGE_BODY = 1 << 20  # bytes, from which on a body is parsed in a thread of its own
MAX_DRAINED = 256 << 20  # bytes of a body that is too large, read so that the client gets to the answer
BODY_TIMEOUT = 300.0  # seconds that a client may take to send it


class Bodies:
    """The bodies of all requests to a server."""

    def __init__(self) -> None:
        self.n_bytes = 0  # of the bodies that arrive or are parsed
        self.parsing = asyncio.Lock()  # of large bodies: one at a time, so that the event loop runs between two

    async def read(self, http: Request, parse: Callable[[bytearray], T]) -> T:
        """The body of a request, parsed.

        Raises:
            ApiError: It is too large, arrives too slowly or in part, or is refused by ``parse``.
        """
        raw = bytearray()
        try:
            await self._receive(http, raw)
            if len(raw) <= LARGE_BODY:
                return parse(raw)
            async with self.parsing:
                return await in_thread(parse, raw)
        finally:
            self.n_bytes -= len(raw)
            raw.clear()  # also where an error has it

    async def _receive(self, http: Request, raw: bytearray) -> None:
        """Read a body to the end of ``raw``."""
        n = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                async for chunk in http.stream():
                    n += len(chunk)
                    if n <= MAX_BODY:
                        self._make_room(len(chunk))
                        raw += chunk
                    elif n > MAX_DRAINED:
                        break
        except TimeoutError as e:
            raise ApiError(408, f"The body did not arrive within {BODY_TIMEOUT:.0f} seconds.") from e
        except ClientDisconnect as e:
            raise ApiError(400, "The body is shorter than its Content-Length.") from e
        if n > MAX_BODY:
            raise ApiError(413, f"The body is larger than {MAX_BODY} bytes.")

    def _make_room(self, n: int) -> None:
        if self.n_bytes + n > MAX_BODIES:
            raise ApiError(429, "Too many large bodies are arriving: try again later.", code="rate_limit_exceeded")
        self.n_bytes += n
