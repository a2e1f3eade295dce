"""What ``mlx_mtp server`` runs: the generation thread, and the HTTP server before it."""

import argparse
import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from ipaddress import ip_address
from pathlib import Path
from types import FrameType

import h11
import mlx.core as mx
import psutil
import uvicorn
from mlx_lm.utils import maybe_set_recommended_wired_limit
from tqdm import tqdm
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..checkpoint import DEMO, DEMO_NOTE
from ..cli.display import INTERRUPTED, one_line_errors
from ..cli.parser import parse
from ..core.distributed import Ranks
from ..errors import MTPError, MTPOSError
from ..files import SERVERS, cache_file, keep
from ..memory import Account, size
from .agents import as_text
from .app import make_app
from .command_line import make_parser
from .engine.admission import Admission
from .engine.engine import Engine
from .engine.models import ModelProvider, Stores
from .frontend import POLL, Frontend, in_thread
from .options import address_of, check, check_model, context_of, flags_of
from .request import Metrics, Options

OPEN_FILES = 4096
LAST_ANSWERS = 5  # seconds to send the last answers when the server stops
IDLE = 75  # seconds until a connection without a request is closed
HEADER = 20  # seconds from a connection, or from the first byte of a further request, until its header must be complete
MAX_CONNECTIONS = 2000  # a request above this limit gets status 503
BACKLOG = 512  # connections that wait to be accepted
MAX_HEADERS = 64 << 10  # bytes


def run(args: argparse.Namespace, ranks: Ranks | None) -> None:
    options = check(args)
    maybe_set_recommended_wired_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a file for each connection; macOS allows 256 by default
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    is_first = ranks is None or ranks.rank == 0
    with listen(options.host, options.port) if is_first else nullcontext() as sockets:  # a port in use costs no loading
        engine = make_engine(options, ranks)
        try:
            with tqdm(
                bar_format="Starting the server: {elapsed}", leave=False, disable=args.log is None or None
            ) as line:
                while not wait([engine.loaded], POLL).done:
                    line.refresh()
            engine.loaded.result()
            check_model(args, engine.admission.models)
            if sockets is not None:
                serve(options, engine, sockets)
            else:
                with suppress(KeyboardInterrupt):  # then it ends the other ranks as well
                    while engine.is_alive:  # Python 3.11 takes a thread for ended if its join is interrupted
                        time.sleep(POLL)
        finally:
            if not engine.stop_and_join():
                logging.warning("The last step, or the disk of --prompt-cache-dir, takes too long: the server ends.")
                os._exit(1)
    if engine.error is not None:
        raise engine.error


def make_engine(options: Options, ranks: Ranks | None) -> Engine:
    metrics = Metrics()
    caches = Stores(options, ranks)
    account = Account(options.max_memory)
    metrics.registry.register(caches)
    metrics["memory_limit_bytes"].set_function(lambda: account.limit)
    metrics["memory_held_bytes"].set_function(lambda: account.held)
    admission = Admission(options, ModelProvider(options), caches, ranks, account)
    return Engine(admission, metrics, ranks)


def serve(options: Options, engine: Engine, sockets: list[socket.socket]) -> None:
    """Answer requests until an interrupt or an error of the generation thread, then end the open ones."""
    server = Server(options, engine)
    (_, port, *_), *_ = addresses = [s.getsockname() for s in sockets]
    host = options.host
    models = engine.admission.models
    account = engine.admission.account
    if options.api_key is None and not all(ip_address(address).is_loopback for address, *_ in addresses):
        logging.warning(f"Anyone who can reach {host} can use the server: require a key with --api-key-file.")
    context = models.tokenizers[options.model].context_length or "unknown"
    logging.info(f"Model: {models.name}, {'with' if models.drafts else 'without'} drafts, context of {context} tokens")
    if options.model == str(DEMO):
        logging.info(f"{DEMO_NOTE}.")
    logging.info(f"Memory: {size(account.held)} used of {size(account.limit)}")
    logging.info(f"Starting httpd at {host} on port {port}...")
    page = "" if options.no_ui else f"Open {url(host, port)} to chat. "
    logging.info(f"{page}Clients use {url(host, port)}/v1 and the model {models.name}")
    if options.log is not None:
        with options.log.open("a") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
    started = psutil.Process().create_time()
    keep(SERVERS, str(os.getpid()), {"url": url(host, port), "flags": flags_of(options), "started": started})
    try:
        server.run(sockets=sockets)
    finally:
        keep(SERVERS, str(os.getpid()), None)


class Protocol(H11Protocol):
    """uvicorn's protocol, which closes a connection whose request has no complete header after some seconds."""

    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_header()

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE and self.timer is not None:  # the header is complete
            self.timer.cancel()
            self.timer = None

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE:  # of the next request: uvicorn's own timer ends with its first byte
            self._expect_header()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        super().connection_lost(exc)

    def _expect_header(self) -> None:
        if self.timer is None:
            self.timer = self.loop.call_later(HEADER, self.transport.close)


class Server(uvicorn.Server):
    """uvicorn's server. When it stops, it stops the engine, and running requests get one last token."""

    def __init__(self, options: Options, engine: Engine):
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        config = uvicorn.Config(
            make_app(Frontend(options, engine)),
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # app.py has it
            log_level=options.log_level.lower(),
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=LAST_ANSWERS,
            limit_concurrency=MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 2),
            backlog=BACKLOG,
            h11_max_incomplete_event_size=MAX_HEADERS,
        )
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first SIGINT or SIGTERM stops the server, and the command succeeds; a second one ends the process."""
        if self.should_exit:
            os._exit(INTERRUPTED)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await in_thread(self.engine.stop_and_join)
        await super().shutdown(sockets)


@contextmanager
def listen(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets with one port at the addresses of a host, but for those that this machine lacks."""
    opened, both = list[socket.socket](), host == "::" and socket.has_dualstack_ipv6()  # then with IPv4
    with ExitStack() as stack:
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            places = [*dict.fromkeys((family, address) for family, _, _, _, (address, *_) in found)]
            for family, address in places:
                try:
                    s = socket.create_server((address, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
                    opened.append(stack.enter_context(s))
                    port = s.getsockname()[1]  # of 0, the one that the first has found free
                except OSError as e:
                    if e.errno == errno.EADDRINUSE or (not opened and address == places[-1][1]):
                        raise
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise MTPOSError(f"Port {port} of {host} is in use: stop the other program, or choose a --port.") from e
            raise MTPOSError(f"The server cannot listen at --host {host}, --port {port}: {e.strerror}.") from e
        yield opened


def url(host: str, port: int) -> str:
    if host in ("", "0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@one_line_errors("mlx_mtp server")
def main(log: Path | None = None) -> None:
    """Run the command. With a file for the log, the terminal gets no more than what is printed before the server answers."""
    group = mx.distributed.init()
    ranks = Ranks(group) if group.size() > 1 else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args = parse(make_parser())
    args.log = log
    form = "%(asctime)s - %(levelname)s - %(message)s"
    logging.basicConfig(level=args.log_level, format=form, filename=log)
    if args.print_config is not None:  # stdout is for a shell or the client's file
        options = check(args)
        if options.port == 0:
            raise MTPError("--print-config requires a fixed port, such as --port 8080.")
        context, folder = context_of(options.model), cache_file("agents") / args.print_config
        note, text = as_text(args.print_config, address_of(options, url(options.host, options.port), context, folder))
        print(note, file=sys.stderr)
        return print(text, end="")
    try:
        run(args, ranks)
    except KeyboardInterrupt:  # a second one: do not wait for the generation thread
        os._exit(INTERRUPTED)
