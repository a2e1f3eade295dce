"""The command ``mlx_mtp.server``."""

import argparse
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import nullcontext, suppress
from ipaddress import ip_address

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
    is_first = ranks is None or ranks.rank == 0
    with listen(args.host, args.port) if is_first else nullcontext() as s:  # a port in use costs no loading
        generator = make_generator(args, ranks)
        try:
            generator.loaded.result()
            check_model(args, generator.model_provider)
            if s is not None:
                serve(args, generator, s, on_loss)
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


def serve(
    args: argparse.Namespace, generator: ResponseGenerator, s: socket.socket, on_loss: list[Callable[[str], None]]
) -> None:
    """Answer requests until interrupted, then end those that are open; also where another rank is lost."""
    server = make_server(args, generator)
    on_loss += [lambda error: generator.fail_all(ApiError(503, error)), lambda _: server.wait(LAST_WORDS)]
    address, port = s.getsockname()[:2]
    if args.api_key is None and not ip_address(address).is_loopback:
        logging.warning(f"Everybody who reaches {args.host} may use the server: require a key with --api-key-file.")
    logging.info(f"Serving {generator.model_provider.served[0]}, {drafting(args)}: open {url(args.host, port)}")
    logging.info(f"Starting httpd at {args.host} on port {port}...")
    server.run(sockets=[s])


def make_server(args: argparse.Namespace, generator: ResponseGenerator) -> Server:
    hosts = [args.host, *args.allowed_hosts]
    return Server(make_app(generator, args.api_key, args.allowed_origins, hosts), generator, args.log_level)


def url(host: str, port: int) -> str:
    """What to open in a browser of this machine."""
    if host in ("", "0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def drafting(args: argparse.Namespace) -> str:
    """How the flags have the model draft, in words."""
    if args.draft_model is not None:
        return f"with drafts of {args.draft_model}"
    drafters = []
    if args.mtp:
        drafters.append("its MTP head" if args.mtp is True else f"the MTP head {args.mtp}")
    if cli.copies(args) or (args.mtp and args.copy_drafts is None and not isinstance(args.num_draft_tokens, int)):
        drafters.append("copies")
    return f"with drafts of {' and '.join(drafters)}" if drafters else "without drafts"


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
