"""The HTTP response with a generated answer, as a stream or as a whole. It ends when the client disconnects."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .api.writer import Usage, Writer
from .engine.delta import Delta
from .engine.frontend import Frontend
from .request import ApiError, Request, Waiting

HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]  # the headers of a stream
FIGURES = "figures"  # the key in the scope for the figures in the request's line of the log


@asynccontextmanager
async def watched(requests: Sequence[Request], receive: Receive) -> AsyncIterator[None]:
    """Mark requests as gone when their client disconnects, and when the context ends."""

    def leave() -> None:
        for request in requests:
            request.is_gone = True

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        leave()
        task.cancel()


class GeneratedResponse(Response):
    """
    Args:
        choices (List[Request]): The answers to generate, of ``Request.choices``.
        is_stream (bool): Whether the client wants a stream.
        waiting (Set[int]): The numbers of requests without a first token.
    """

    def __init__(self, frontend: Frontend, choices: list[Request], writer: Writer, is_stream: bool, waiting: set[int]):
        super().__init__()
        self.frontend, self.choices, self.writer = frontend, choices, writer
        self.is_stream, self.waiting = is_stream, waiting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with watched(self.choices, receive):
                if self.is_stream:
                    await self._stream(send)
                else:
                    async for _ in self._pieces():
                        pass
                    await JSONResponse(self.writer.whole(self._usage()))(scope, receive, send)
        except OSError:
            logging.info("The client has disconnected.")
        finally:
            self.waiting.discard(self.choices[0].number)
            scope[FIGURES] = (figures_of(self.choices, self._usage()),)

    async def _stream(self, send: Send) -> None:
        has_begun = False
        try:
            async for piece in self._pieces():
                if not has_begun:
                    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                    has_begun = True
                if piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            last = self.writer.end(self._usage())
        except ApiError as e:
            if not has_begun:
                raise
            last = self.writer.failed(e)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _pieces(self) -> AsyncIterator[bytes]:
        """The parts of a stream."""
        has_begun = False
        async for i, item in self.frontend.generate_all(self.choices):
            if isinstance(item, Waiting):
                yield self.writer.waiting(item.n_read, item.n_prompt)
            elif isinstance(item, Delta):
                self.waiting.discard(self.choices[0].number)
                yield self.writer.add(item, i)
            elif not has_begun:
                has_begun = True
                yield self.writer.begin(self._usage())

    def _usage(self) -> Usage:
        first = self.choices[:: self.choices[0].n]  # the first answer to each prompt
        return Usage(
            n_prompt=sum(request.n_prompt for request in first),
            n_cached=sum(request.n_cached for request in first),
            n_generated=sum(request.n_tokens for request in self.choices),
            n_accepted=sum(request.n_accepted for request in self.choices),
            drafts=[request.counts for request in self.choices] if self.frontend.options.drafts else None,
        )


def figures_of(choices: Sequence[Request], usage: Usage) -> str:
    """The tokens, times and drafts of a finished request, for the log."""
    now, n = time.perf_counter(), usage.n_generated
    first_tokens = [r.first_token for r in choices if r.first_token is not None]
    figures = [f"{usage.n_prompt} prompt tokens ({usage.n_cached} cached)", f"{n} output tokens"]
    figures.append(f"{now - choices[0].arrived:.2f} s")
    if n > len(choices):
        figures.append(f"{(n - len(choices)) / (now - min(first_tokens)):.1f} tokens/s")
    if drafted := sum(counts.n_drafted for counts in usage.drafts or ()):
        accepted = sum(counts.n_accepted for counts in usage.drafts or ())
        figures.append(f"{accepted} of {drafted} drafts accepted")
    return ", ".join(figures)
