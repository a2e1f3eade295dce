"""The bodies of requests: limits on their size and time, and the parsing of their JSON."""

import asyncio
import math
from collections.abc import Callable
from typing import TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from ...text.schema import Json
from ..engine.frontend import in_thread
from ..request import ApiError

T = TypeVar("T")
MAX_BODY = 64 << 20  # bytes: a conversation with a few pictures
# Parsing takes microseconds for an object and less for other values, and blocks all threads. Brackets, braces and commas in
# strings count as well; a million tokens rarely have as many.
MAX_OBJECTS = 100_000  # brackets and braces
MAX_VALUES = 300_000  # commas: a prompt may be 262,144 numbers of tokens
MAX_PARTS = (
    10_000  # messages, tools and their parts: validation takes 10 microseconds for each, and blocks all threads as well
)
LISTS = "messages", "input", "system", "tools", "content", "tool_calls", "summary", "output"  # of parts
MAX_BODIES = 16 * MAX_BODY  # bytes of all bodies in transfer or being parsed
LARGE_BODY = 1 << 16  # bytes; a larger body is parsed in a thread of its own
MAX_DRAINED = 256 << 20  # bytes of a too large body to read, so that the client receives the error
BODY_TIMEOUT = 300.0  # seconds that a client may take to send a body


class Bodies:
    """The bodies of all requests to a server."""

    def __init__(self) -> None:
        self.n_bytes = 0  # bytes of the bodies in transfer or being parsed
        self.parsing = asyncio.Lock()  # large bodies are parsed one at a time, so that the event loop runs between two

    async def read(self, http: Request, parse: Callable[[Json], T]) -> T:
        """The result of ``parse`` for the body's fields that are not null.

        Raises:
            ApiError: The body is too large, slow or incomplete, is not a JSON object, or is refused by ``parse``.
        """
        raw = bytearray()
        try:
            await self._receive(http, raw)
            if len(raw) <= LARGE_BODY:
                return parse(parse_json(raw))
            async with self.parsing:
                return await in_thread(lambda: parse(parse_json(raw)))
        finally:
            self.n_bytes -= len(raw)
            raw.clear()  # an error may keep a reference to it

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


def parse_json(raw: bytes | bytearray) -> Json:
    """The fields of a body that are not null.

    Raises:
        ApiError: The bytes are not a JSON object, or it has too many values.
    """
    if raw.count(b"[") + raw.count(b"{") > MAX_OBJECTS or raw.count(b",") > MAX_VALUES:
        allowed = f"{MAX_OBJECTS:,} opening brackets and braces, or {MAX_VALUES:,} commas"
        raise ApiError(413, f"The body has more than {allowed}: make it smaller.")
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as e:
        raise ApiError(400, f"Invalid JSON in request body: {e}") from e
    if not isinstance(body, dict):
        raise ApiError(400, "Request should be a JSON dictionary")
    _check_parts(body)
    _check_numbers(body)
    return {name: value for name, value in body.items() if value is not None}


def _check_parts(body: Json) -> None:
    n, parts = 0, [body]
    while parts:
        part = parts.pop()
        for found in (part[name] for name in LISTS if isinstance(part.get(name), list)):
            n += len(found)
            if n > MAX_PARTS:
                raise ApiError(413, f"The body has more than {MAX_PARTS:,} messages, tools and parts: make it smaller.")
            parts += [x for x in found if isinstance(x, dict)]


def _check_numbers(body: Json) -> None:
    """Refuse numbers too large for a float, which are parsed as infinity."""
    for name, field in body.items():
        values = [field]
        while values:
            value = values.pop()
            if isinstance(value, dict):
                values += value.values()
            elif isinstance(value, list):
                values += value
            elif isinstance(value, float) and not math.isfinite(value):
                raise ApiError(400, f"{name[:100]!r} has a number that is too large.", param=name[:100])
