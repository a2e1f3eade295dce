"""The event loop's side of a request: encode the prompt in a thread, submit the request, await its tokens, write the answer."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .api.common import Usage, Writer
from .engine.encode import BoundedTokenizer, count_tokens, encode
from .engine.engine import Engine
from .request import LOADING, ApiError, Delta, Options, Request, Waiting, as_api_error

KEEP_ALIVE = 5.0  # seconds between two reports of the progress of prefill
POLL = 1.0  # seconds between two checks of the generation thread
T = TypeVar("T")
Items = asyncio.Queue[tuple[int, Any]]  # the items of requests, each with the index of its answer


async def in_thread(f: Callable[..., T], *args: Any) -> T:
    """Call a slow function in a daemon thread, which does not delay the server's exit."""
    future: Future[T] = Future()

    def run(future: Future[T]) -> None:
        try:
            future.set_result(f(*args))
        except BaseException as e:
            future.set_exception(e)
        finally:
            # Break the cycle of an error, its traceback, this frame and the future, which would keep the arguments alive.
            del future

    threading.Thread(target=run, args=(future,), daemon=True).start()
    return await asyncio.wrap_future(future)


class Frontend:
    """Encodes prompts in threads of their own, so that no prompt delays other requests, and submits requests to the engine."""

    def __init__(self, options: Options, engine: Engine):
        self.options = options
        self.engine = engine
        self.metrics = engine.metrics
        self.models = engine.admission.models
        self.caches = engine.admission.caches
        self.created = int(time.time())
        self.waiting: dict[int, Waiting] = {}  # the progress of requests without a first token, by their numbers

    async def generate(self, choices: list[Request]) -> AsyncIterator[tuple[int, str | Waiting | Delta]]:
        """Yield the start and the tokens of each answer, with its index. The first one of a prompt prefills it for all."""
        items: Items = asyncio.Queue()
        n_of_each = choices[0].n
        has_read = [asyncio.Event() for _ in choices[::n_of_each]]

        async def start(i: int, choice: Request) -> None:
            try:
                if i % n_of_each > 0:
                    await has_read[i // n_of_each].wait()
                await self.start(choice, items, i)
            except Exception as e:
                items.put_nowait((i, e))

        tasks = [asyncio.create_task(start(i, choice)) for i, choice in enumerate(choices)]
        try:
            async for i, item in self._receive(items, len(tasks)):
                if item is None or isinstance(item, Delta):
                    has_read[i // n_of_each].set()
                if item is not None:
                    yield i, item
        finally:
            for task in tasks:
                task.cancel()

    async def start(self, request: Request, items: Items, i: int) -> None:
        tokenizer = await self._tokenizer_of(request)
        prompt = await in_thread(encode, tokenizer, request, self.options, self.engine.admission.account)
        if self.options.prompt_cache_dir is not None and prompt.image_prompt is None:
            # With images, the generation thread reads the files: their keys depend on the tower, which only that thread runs.
            await in_thread(self.caches.load, request.key, prompt)
        request.encoded = prompt
        self._submit(request, items, i)

    async def count_tokens(self, request: Request) -> int:
        return await in_thread(count_tokens, await self._tokenizer_of(request), request, self.options)

    async def _tokenizer_of(self, request: Request) -> BoundedTokenizer:
        request.key = self.models.resolve(request.args.model)
        if request.key not in self.models.tokenizers:  # go through the engine's queue once to load the model
            items: Items = asyncio.Queue()
            self._submit(request, items, 0)
            async for _ in self._receive(items, 1):
                pass
        return self.models.tokenizers[request.key]

    def _submit(self, request: Request, items: Items, i: int) -> None:
        """Hand a request to the engine, which puts its items into the queue, each with the index i."""
        loop = asyncio.get_running_loop()

        def send(item: Any) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(items.put_nowait, (i, item))

        items.put_nowait((i, Waiting(0, 0)))
        request.send = send
        self.engine.clients.arriving.put(request)

    async def _receive(self, items: Items, n: int) -> AsyncIterator[tuple[int, Any]]:
        """Yield the items of n requests, and ``None`` at the end of each; of the progress, the latest every few seconds."""
        progress = None
        due = math.inf
        while n > 0:
            if progress is not None and time.monotonic() >= due:
                yield progress
                due = time.monotonic() + KEEP_ALIVE
            is_alive = self.engine.is_alive
            try:
                async with asyncio.timeout(min(POLL, due - time.monotonic())) if items.empty() else nullcontext():
                    i, item = await items.get()
            except TimeoutError:
                if not is_alive:
                    raise ApiError(503, "The server is stopping.") from None
                continue
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Waiting):
                progress = (i, item)
                due = min(due, time.monotonic() + KEEP_ALIVE)
                continue
            yield i, item
            n -= item is None
            due = time.monotonic() + KEEP_ALIVE


STREAM_HEADERS = [  # the last one is for nginx, which would collect the events
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
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
    """The response with the answers of ``Request.choices``."""

    def __init__(self, frontend: Frontend, choices: list[Request], writer: Writer, is_stream: bool):
        super().__init__()
        self.frontend = frontend
        self.choices = choices
        self.writer = writer
        self.is_stream = is_stream
        self.waiting = frontend.waiting
        self.number = choices[0].number
        writer.usage = self._usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with watched(self.choices, receive):
                if self.is_stream:
                    await self._stream(send)
                else:
                    async for _ in self._pieces():
                        pass
                    await JSONResponse(self.writer.whole(self._usage()))(scope, receive, send)
        finally:
            self.waiting.pop(self.number, None)
            scope[FIGURES] = (self._figures(),)

    async def _stream(self, send: Send) -> None:
        has_begun = False
        try:
            async for piece in self._pieces():
                if not has_begun:
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                    has_begun = True
                if piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            last = self.writer.end(self._usage())
        except Exception as e:
            if not has_begun:
                raise
            last = self.writer.failed(as_api_error(e))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _pieces(self) -> AsyncIterator[bytes]:
        has_begun = False
        async for i, item in self.frontend.generate(self.choices):
            if isinstance(item, Waiting):
                if item.n_prompt > 0 and self.number in self.waiting:
                    self.waiting[self.number] = item
                    logging.info(f"Request {self.number}: {item.n_read:,} of {item.n_prompt:,} prompt tokens processed")
                yield self.writer.waiting(item.n_read, item.n_prompt)
            elif isinstance(item, Delta):
                self.waiting.pop(self.number, None)
                yield self.writer.add(item, i)
            elif item == LOADING:
                yield self.writer.loading()
            elif not has_begun:
                has_begun = True
                yield self.writer.begin(self._usage())

    def _usage(self) -> Usage:
        return Usage(self.choices, self.frontend.models.drafts)

    def _figures(self) -> str:
        """Those of the request's line in the log."""
        usage = self._usage()
        counts = [choice.counts for choice in self.choices]
        figures = [f"{usage.n_prompt} prompt tokens ({usage.n_cached} cached)", f"{usage.n_generated} output tokens"]
        figures.append(f"{time.perf_counter() - self.choices[0].arrived:.2f} s")
        if n_timed := sum(c.n_timed for c in counts):  # tokens of steps that compile nothing
            figures.append(f"{n_timed / max(c.seconds for c in counts):.1f} tokens/s")
        if drafted := sum(c.n_drafted for c in counts):
            figures.append(f"{sum(c.n_accepted for c in counts)} of {drafted} drafts accepted")
        return ", ".join(figures)
