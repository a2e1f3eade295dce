"""The HTTP server: uvicorn with limits on connections. It ends the open answers before it stops."""

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ...cli.errors import INTERRUPTED
from ..engine.engine import Engine
from ..engine.frontend import in_thread

LAST_ANSWERS = 5  # seconds to send the last answers when the server stops
IDLE = 75  # seconds in which the head of a request must arrive
MAX_CONNECTIONS = 2000  # a request above this limit gets status 503
BACKLOG = 512  # connections that asyncio may accept at a time, for which room is kept
MAX_HEADERS = 64 << 10  # bytes
LOG_INTERVAL = 60.0  # seconds between two lines with the same message
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class State(ServerState):
    def __init__(self) -> None:
        super().__init__()
        # Connections without a complete request, in the order of waiting. Those with a complete request by now are skipped and
        # removed by ``Connection._make_room``.
        self.incomplete: dict[Connection, None] = {}


class Connection(H11Protocol):
    """A connection that is closed if the head of a request does not arrive in time.

    uvicorn itself waits for the first request without a limit, and for later requests as long as bytes arrive. If there are too
    many connections, the oldest without a complete request is closed, so that idle clients do not lock out others.
    """

    server_state: State
    timer: asyncio.TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_incomplete(self) -> bool:
        """Whether the client has not sent a complete request."""
        return self.is_waiting or self.cycle.more_body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._make_room()
        self._wait()

    def on_response_complete(self) -> None:
        self._wait()  # first: the next request may already be here
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.server_state.incomplete.pop(self, None)
        super().connection_lost(exc)

    def _wait(self) -> None:
        """Start to wait for a request."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.loop.call_later(IDLE, self._end)
        self.server_state.incomplete.pop(self, None)
        self.server_state.incomplete[self] = None  # at the end

    def _end(self) -> None:
        if self.is_waiting and not self.transport.is_closing():
            self.logger.info("A client has not sent a request within %d seconds: its connection is closed.", IDLE)
            self.transport.close()

    def _make_room(self) -> None:
        if len(self.connections) <= self.config.limit_concurrency - self.config.backlog:  # type: ignore[operator]  # it is set
            return
        incomplete = self.server_state.incomplete
        while incomplete:
            del incomplete[oldest := next(iter(incomplete))]  # added again after its answer
            if oldest.is_incomplete and not oldest.transport.is_closing():
                self.logger.warning("There are too many connections: the oldest one without a request is closed.")
                oldest.transport.abort()
                return


class RateLimit(logging.Filter):
    """Passes a message once in ``LOG_INTERVAL`` seconds, and all errors with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = str(record.msg)
        if record.exc_info is None and record.created - self.last.get(kind, 0.0) < LOG_INTERVAL:
            return False
        self.last[kind] = record.created
        return True


class Server(uvicorn.Server):
    """uvicorn's server. When it stops, it stops the engine, and running requests get one last token."""

    def __init__(self, app: ASGIApp, engine: Engine, log_level: str):
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 2)
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # app.py has it
            log_level=log_level.lower(),
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=LAST_ANSWERS,
            limit_concurrency=most,
            backlog=min(BACKLOG, most // 2),
            h11_max_incomplete_event_size=MAX_HEADERS,
        )
        super().__init__(config)
        self.server_state = State()
        self.engine = engine

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        log, rate_limit = logging.getLogger("uvicorn.error"), RateLimit()
        asyncio.get_running_loop().set_exception_handler(_log_exception)
        log.addFilter(rate_limit)
        try:
            await super().serve(sockets)
        finally:
            log.removeFilter(rate_limit)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM stops the server, and the command succeeds; a second one ends the process."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(INTERRUPTED)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await in_thread(self.engine.stop_and_join)
        await super().shutdown(sockets)

    def wait(self, seconds: float) -> None:
        """Wait until all answers are sent, for at most this time. Called in another thread."""
        deadline = time.monotonic() + seconds
        while self.server_state.tasks and time.monotonic() < deadline:
            time.sleep(0.01)


def _log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log one line if a connection cannot be accepted: asyncio retries, and would log a traceback each time."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in OUT_OF_FILES:
        logging.getLogger("uvicorn.error").warning("A connection cannot be accepted: %s.", error.strerror)
    else:
        loop.default_exception_handler(context)


def listen(host: str, port: int) -> socket.socket:
    """Make a listening socket.

    Raises:
        OSError: The port is in use, or the host is not an address of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise OSError(f"Port {port} of {host} is in use: stop the other program, or choose another --port.") from e
        raise OSError(f"The server cannot listen at --host {host}, --port {port}: {e.strerror}.") from e
