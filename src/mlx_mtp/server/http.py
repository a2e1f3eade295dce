"""The HTTP server: uvicorn, which ends the open answers before it ends."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from .. import cli
from .engine.engine import Engine
from .engine.frontend import in_thread

LAST_ANSWERS = 5  # seconds to send them when the server ends
IDLE = 75  # seconds that a connection stays open between two requests
MAX_CONNECTIONS = 4000
MAX_HEADERS = 64 << 10  # bytes


class Server(uvicorn.Server):
    """
    Args:
        app (ASGIApp): What answers.
        engine (Engine): Ended with the server: the requests that have begun get one last token.
        log_level (str): As in logging.
    """

    def __init__(self, app: ASGIApp, engine: Engine, log_level: str):
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=log_level.lower(),
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=LAST_ANSWERS,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEADERS,
        )
        super().__init__(config)
        self.engine = engine

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM ends the server, and the command succeeds; a second one ends it at once."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(cli.INTERRUPTED)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await in_thread(self.engine.stop_and_join)
        await super().shutdown(sockets)

    def wait(self, seconds: float) -> None:
        """For another thread: wait until all answers have been sent, for at most this time."""
        deadline = time.monotonic() + seconds
        while self.server_state.tasks and time.monotonic() < deadline:
            time.sleep(0.01)


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections.

    Raises:
        OSError: The port is in use, or the host is not this machine's.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=1024)
