"""The flags of ``mlx_mtp server``: those of ``mlx_lm.server`` and those of MTP."""

import argparse
from pathlib import Path
from typing import Any

from mlx_lm.generate import setup_arg_parser

from ..checkpoint import DEMO
from ..cli import flags
from ..cli.parser import byte_size, finish, json_object
from ..core.batch import MAX_TOKEN_GAP, MIN_DECODE_SHARE
from ..files import MAX_DISK_BYTES
from .agents import CLIENTS

DISK_SIZE = f"{MAX_DISK_BYTES / 1e9:.0f}GB"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


# The flags of mlx_lm.server that mlx_lm.generate has as well
AS_GENERATE = (
    "--adapter-path", "--trust-remote-code", "--use-default-chat-template", "--prefill-step-size", "--kv-bits",
    "--kv-group-size", "--quantized-kv-start",
)  # fmt: skip
VALUES: tuple[tuple[str, Any, Any, str | None, str], ...] = (  # flag, type, default, metavar, help
    ("--model", str, str(DEMO), None, flags.MODEL_HELP),
    ("--served-model-name", str, None, "NAME", "Name of --model for clients (default: its path)."),
    ("--draft-model", str, None, None, "Not supported: use mlx_lm.server."),
    ("--chat-template", str, "", None, "Specify a chat template for the tokenizer"),
    ("--chat-template-args", json_object, "{}", None, flags.TEMPLATE_HELP),
    ("--host", str, "127.0.0.1", None, "Host for the HTTP server"),
    ("--port", int, 8080, None, "Port for the HTTP server; 0 takes a free one"),
    ("--allowed-origins", _names, None, "ORIGIN,...", "Other pages that may use it; * is all (default: localhost)."),
    ("--allowed-hosts", _names, [], "NAME,...", "More names of the server, besides localhost and --host; * is all."),
    ("--max-queue", int, None, "N", "Refuse requests with 429 while N wait for a first token (default: no limit)."),
    ("--unload-after", float, None, "MINUTES", "Free the model after so long without a request (default: never)."),
    ("--keep-warm", float, 0.0, "SECONDS", "Keep the weights resident for so long after a request (default: 0, off)."),
    ("--api-key", str, None, None, "Answer only requests with this key (default: every request)."),
    ("--api-key-file", Path, None, None, "Read the key from this file, which other users of the machine cannot see."),
    ("--max-tokens", int, -1, None, "Limit of answers whose request sets none (default: -1, the rest of the context)"),
    ("--decode-concurrency", int, 32, None, "Maximum number of requests to decode in parallel"),
    ("--prompt-concurrency", int, 8, None, "Ignored: prompts are prefilled one after the other"),
    ("--max-token-gap", float, MAX_TOKEN_GAP, "SECONDS", "Longest time between tokens of an answer during prefill"),
    ("--min-decode-share", float, MIN_DECODE_SHARE, "SHARE", "Least share of time for answers during prefill, below 1"),
    (
        "--response-memory",
        byte_size,
        "256MB",
        "SIZE",
        "Limit of the stored responses of /v1/responses (0: store none).",
    ),
    ("--prompt-cache-size", int, None, None, "Maximum number of snapshots in the prompt cache (default: no limit)."),
    ("--prompt-cache-bytes", byte_size, None, "SIZE", "Limit of all caches (default: half of what the model leaves)."),
    ("--prompt-cache-disk-bytes", byte_size, None, "SIZE", f"Limit of --prompt-cache-dir (default: {DISK_SIZE})."),
)


def make_parser() -> argparse.ArgumentParser:
    """mlx-lm makes its parser in ``main``: these are its flags and defaults."""
    parser = argparse.ArgumentParser(
        prog="mlx_mtp server",
        description="Serve OpenAI's and Anthropic's APIs, with drafts of the model's own MTP head.",
    )
    parser.add_argument(
        "--print-config",
        metavar="CLIENT",
        choices=CLIENTS,
        help=f"Print the settings of this client for these flags, and exit: {', '.join(CLIENTS)}.",
    )
    return add_flags(parser)


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add all flags that the server runs with. Return the parser."""
    add = parser.add_argument
    theirs = setup_arg_parser()._option_string_actions
    for flag in AS_GENERATE:
        parser._add_action(theirs[flag])
    other_models = "Another model to serve; can be repeated. Requests choose by name; one model is loaded at a time."
    add("--serve-model", action="append", default=[], metavar="MODEL", help=other_models)
    add("--allow-any-model", action="store_true", help="Load any model that a request names, as mlx_lm.server does.")
    for name, kind, default, metavar, text in VALUES:
        add(name, type=kind, default=default, metavar=metavar, help=text)
    add("--no-ui", action="store_true", help="Do not serve the chat page at /.")
    levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    add("--log-level", default="INFO", choices=levels, help="Set the logging level")
    flags.add_sampling(parser)
    own = ("--mtp", "--no-mtp", "--num-draft-tokens", "--copy-drafts", "--acceptance", *flags.LOADING)
    flags.add_flags(parser, (*own, "--images", "--prompt-cache-dir", "--pipeline"))
    return finish(parser)
