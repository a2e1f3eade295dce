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
from .caches import make_caches
from .engine import ResponseGenerator
from .http import Server, listen
from .metrics import Metrics
from .provider import ModelProvider
from .ranks import RankGenerator
from .request import ApiError

LAST_WORDS = 1.0  # seconds to send errors where a rank is lost: soon its watcher ends the process
OPEN_FILES = 4096


def run(args: argparse.Namespace, ranks: Ranks | None, on_loss: list[Callable[[str], None]]) -> None:
    check(args)
    maybe_set_recommended_wired_limit()
    _allow_open_files()
    generator = make_generator(args, ranks)
    try:
        generator.loaded.result()
        check_model(args, generator.model_provider)
        if ranks is None or ranks.rank == 0:
            serve(args, generator, on_loss)
        else:
            with suppress(KeyboardInterrupt):  # then it asks the others to end as well
                generator.join()
    finally:
        generator.stop_and_join()
    if generator.error is not None:
        raise generator.error


def make_generator(args: argparse.Namespace, ranks: Ranks | None) -> ResponseGenerator:
    metrics, provider = Metrics(), ModelProvider(args)
    if ranks is not None:
        return RankGenerator(ranks, provider, make_caches(args, ranks), metrics)
    return ResponseGenerator(provider, make_caches(args, None), metrics)


def serve(args: argparse.Namespace, generator: ResponseGenerator, on_loss: list[Callable[[str], None]]) -> None:
    """Answer requests until interrupted, then end those that are open; also where another rank is lost."""
    app = make_app(generator, args.api_key, [*args.allowed_origins])
    server = Server(app, generator, args.log_level)
    on_loss += [lambda error: generator.fail_all(ApiError(503, error)), lambda _: server.wait(LAST_WORDS)]
    with listen(args.host, args.port) as s:
        logging.info(f"Starting httpd at {args.host} on port {s.getsockname()[1]}...")
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
