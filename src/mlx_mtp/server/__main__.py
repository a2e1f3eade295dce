"""The command ``mlx_mtp.server``."""

import argparse
import logging
import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from .. import cli
from ..distributed.ranks import Ranks
from .app import make_app
from .arguments import check, check_model, make_parser
from .caches import Stores
from .engine.admission import Admission
from .engine.clients import Clients
from .engine.engine import Engine
from .engine.frontend import Frontend
from .engine.metrics import Metrics
from .engine.provider import ModelProvider
from .engine.ranks import SharedClients
from .http import Server, listen
from .options import Options
from .request import ApiError

LAST_WORDS = 1.0  # seconds to send errors where a rank is lost: soon its watcher ends the process
OPEN_FILES = 4096


def run(args: argparse.Namespace, ranks: Ranks | None, on_loss: list[Callable[[str], None]]) -> None:
    options = check(args)
    maybe_set_recommended_wired_limit()
    _allow_open_files()
    engine = make_engine(options, ranks)
    try:
        engine.loaded.result()
        check_model(args, engine.admission.models)
        if ranks is None or ranks.rank == 0:
            serve(options, engine, on_loss)
        else:
            with suppress(KeyboardInterrupt):  # then it asks the others to end as well
                engine.thread.join()
    finally:
        engine.stop_and_join()
    if engine.error is not None:
        raise engine.error


def make_engine(options: Options, ranks: Ranks | None) -> Engine:
    """Start the generation thread, which loads the model first."""
    metrics, caches = Metrics(), Stores(options, ranks)
    metrics.registry.register(caches)
    admission = Admission(options, ModelProvider(options), caches, ranks)
    return Engine(admission, Clients() if ranks is None else SharedClients(ranks), metrics, ranks)


def serve(options: Options, engine: Engine, on_loss: list[Callable[[str], None]]) -> None:
    """Answer requests until interrupted, then end those that are open; also where another rank is lost."""
    app = make_app(Frontend(options, engine), options.api_key, [*options.allowed_origins])
    server = Server(app, engine, options.log_level)
    on_loss += [lambda error: engine.clients.fail_all(ApiError(503, error)), lambda _: server.wait(LAST_WORDS)]
    with listen(options.host, options.port) as s:
        logging.info(f"Starting httpd at {options.host} on port {s.getsockname()[1]}...")
        server.run(sockets=[s])


def _allow_open_files() -> None:
    """Each connection is an open file, and macOS allows a process 256 of them unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    group = mx.distributed.init()
    ranks = Ranks(group) if group.size() > 1 else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    on_loss: list[Callable[[str], None]] = []
    with cli.one_line_errors("mlx_mtp.server", on_loss):
        args = cli.parse(make_parser())
        logging.basicConfig(level=args.log_level, format="%(asctime)s - %(levelname)s - %(message)s")
        try:
            run(args, ranks, on_loss)
        except KeyboardInterrupt:  # a second one: do not wait for the generation thread
            os._exit(cli.INTERRUPTED)


if __name__ == "__main__":
    main()
