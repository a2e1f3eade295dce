"""The command line of ``mlx_mtp.server``: that of ``mlx_lm.server``, and the flags of MTP."""

import argparse
import json
import logging
import os
import signal
import socket
from functools import partial
from pathlib import Path

from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import get_system_fingerprint
from mlx_lm.utils import _parse_size, maybe_set_recommended_wired_limit

from .. import cli
from ..checkpoint.load import DEMO
from ..decoding.depth import MAX_DRAFT_TOKENS
from .api import APIHandler, Server
from .engine import ModelProvider, ResponseGenerator
from .metrics import Metrics

LAST_ANSWERS = 5.0  # seconds for them to leave when the server ends


def make_parser() -> argparse.ArgumentParser:
    """mlx-lm makes its parser in ``main``: these are its flags, defaults and words."""
    parser = argparse.ArgumentParser(prog="mlx_mtp.server", description="MLX Http Server, with the MTP head.")
    add = parser.add_argument
    add(
        "--model",
        default=str(DEMO),
        help="The path to the MLX model weights, tokenizer, and config (default: the demo)",
    )
    add("--adapter-path", help="Optional path for the trained adapter weights and config.")
    add("--host", default="127.0.0.1", help="Host for the HTTP server (default: 127.0.0.1)")
    add("--port", type=int, default=8080, help="Port for the HTTP server; 0 takes a free one (default: 8080)")
    add(
        "--allowed-origins",
        type=lambda x: x.split(","),
        default="*",
        help="Allowed origins (default: *)",
    )
    add("--draft-model", help="A model to be used for speculative decoding.")
    add(
        "--num-draft-tokens",
        type=cli.auto_or_number,
        default=None,
        help="Number of tokens to draft when using speculative decoding (default: 3; with --mtp that of the "
        f"settings, or auto; up to {MAX_DRAFT_TOKENS}).",
    )
    add("--trust-remote-code", action="store_true", help="Enable trusting remote code for tokenizer")
    add(
        "--log-level",
        default="INFO",
        choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
        help="Set the logging level (default: INFO)",
    )
    add("--chat-template", default="", help="Specify a chat template for the tokenizer")
    add("--use-default-chat-template", action="store_true", help="Use the default chat template")
    add("--temp", type=float, default=0.0, help="Default sampling temperature (default: 0.0)")
    add("--top-p", type=float, default=1.0, help="Default nucleus sampling top-p (default: 1.0)")
    add("--top-k", type=int, default=0, help="Default top-k sampling (default: 0, disables top-k)")
    add("--min-p", type=float, default=0.0, help="Default min-p sampling (default: 0.0, disables min-p)")
    add("--max-tokens", type=int, default=512, help="Default maximum number of tokens to generate (default: 512)")
    add(
        "--chat-template-args",
        type=json.loads,
        default="{}",
        help="A JSON formatted string of arguments for the tokenizer's apply_chat_template, e.g. "
        """'{"enable_thinking":false}'""",
    )
    add(
        "--decode-concurrency",
        type=int,
        default=32,
        help="When a request is batchable then decode that many requests in parallel",
    )
    add(
        "--prompt-concurrency",
        type=int,
        default=8,
        help="When a request is batchable then process that many prompts in parallel",
    )
    add("--prefill-step-size", type=int, default=2048, help="Step size for prefill processing (default: 2048)")
    add(
        "--prompt-cache-size",
        type=int,
        default=10,
        help="Maximum number of distinct KV caches to hold in the prompt cache",
    )
    add("--prompt-cache-bytes", type=_parse_size, help="Maximum size in bytes of the KV caches")
    add(
        "--kv-bits",
        type=int,
        help="Number of bits for KV cache quantization (e.g., 4 or 8). Disables batching, so requests are served one at a "
        "time. Default: None (full precision)",
    )
    add("--kv-group-size", type=int, default=64, help="Group size for KV cache quantization (default: 64)")
    add(
        "--quantized-kv-start",
        type=int,
        default=DEFAULT_QUANTIZED_KV_START,
        help=f"Token position to start KV cache quantization (default: {DEFAULT_QUANTIZED_KV_START})",
    )
    add("--pipeline", action="store_true", help="Not supported: this server runs on one machine")

    add("--mtp", action="store_true", help="Draft with the model's MTP head while one request is being generated.")
    cli.add_arguments(parser)
    add("--api-key", help="Answer only requests that have this key (default: every request).")
    add("--api-key-file", type=Path, help="A file with the key, for which other users of the machine cannot look.")
    add(
        "--serve-model",
        action="append",
        default=[],
        metavar="MODEL",
        help="One more model that a request may name; may be given several times. One at a time is loaded.",
    )
    add(
        "--allow-any-model",
        action="store_true",
        help="Let a request name any path or Hugging Face repo as its model, adapters or draft model, as mlx_lm.server does.",
    )
    return parser


def check(args) -> None:
    """
    Raises:
        ValueError: Flags that do not go together.
    """
    if args.mtp and args.draft_model is not None:
        raise ValueError("--mtp and --draft-model cannot draft together: leave out one of them.")
    if args.num_draft_tokens is None and not args.mtp:
        args.num_draft_tokens = 3
    n = args.num_draft_tokens
    if not args.mtp and n == "auto":
        raise ValueError("--num-draft-tokens auto is of --mtp: give both, or a number.")
    if isinstance(n, int) and (n < 0 or (args.mtp and n > MAX_DRAFT_TOKENS)):
        raise ValueError(f"--num-draft-tokens must be auto or from 0 to {MAX_DRAFT_TOKENS}, not {n}.")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, not {args.port}.")
    if args.pipeline:
        raise ValueError("--pipeline is not supported: use mlx_lm.server to serve from several machines.")
    if args.api_key is not None and args.api_key_file is not None:
        raise ValueError("Give the key by --api-key or by --api-key-file, not by both.")
    if args.api_key_file is not None:
        args.api_key = args.api_key_file.read_text().strip()
    if args.api_key == "":
        raise ValueError("The API key is empty: leave it out, or give one.")


def run(args) -> None:
    check(args)
    maybe_set_recommended_wired_limit()
    metrics = Metrics()
    kwargs = {} if args.prompt_cache_bytes is None else {"max_bytes": args.prompt_cache_bytes}
    prompt_cache = LRUPromptCache(args.prompt_cache_size, **kwargs)
    generator = ResponseGenerator(ModelProvider(args), prompt_cache, metrics)
    try:
        generator.loaded.result()
        infos = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        Server.address_family, _, _, _, address = infos[0]
        handler = partial(APIHandler, generator, system_fingerprint=get_system_fingerprint())
        with Server(address, handler, api_key=args.api_key) as httpd:
            logging.info(f"Starting httpd at {args.host} on port {httpd.server_port}...")
            try:
                httpd.serve_forever()
            except KeyboardInterrupt:
                logging.info("Stopping: ending the requests that are open.")
            generator.stop_and_join()
            httpd.wait(LAST_ANSWERS)
    finally:
        generator.stop_and_join()


def main() -> None:
    args = make_parser().parse_args()
    logging.basicConfig(level=args.log_level, format="%(asctime)s - %(levelname)s - %(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with cli.one_line_errors("mlx_mtp.server"):
            run(args)
    except KeyboardInterrupt:  # once more: do not wait for the generation thread
        os._exit(130)


if __name__ == "__main__":
    main()
