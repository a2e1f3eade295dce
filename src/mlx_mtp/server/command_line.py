"""The flags of ``mlx_mtp server``, those of ``mlx_lm.server`` and those of MTP, and the settings of coding agents for it."""

import argparse
import json
import logging
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import setup_arg_parser
from transformers.utils.chat_template_utils import render_jinja_template

from ..checkpoint.adapters import check_adapter
from ..checkpoint.catalog import resolve
from ..checkpoint.config import context_length_of, read_config
from ..checkpoint.hub import fetch
from ..checkpoint.load import DEMO
from ..cli import flags
from ..cli.parser import byte_size, finish, json_object
from ..core.batch.scheduler import MAX_TOKEN_GAP, MIN_DECODE_SHARE, PrefillBudget
from ..core.caches.rows import KVOptions
from ..errors import MTPError, as_mtp_error
from ..files import check_source
from ..memory import CONTEXT
from ..prompt_store.disk import MAX_DISK_BYTES
from .api.common import RESERVED
from .engine.models import DEFAULT, ModelProvider
from .request import NO_LIMIT, Options

NO_KEY = "none"  # clients require a key
KEY_VARIABLE = "MLX_MTP_API_KEY"  # the variable that Codex and Zed read
MAX_ANSWER = 32000  # tokens that opencode reserves for an answer without --max-tokens
ZED_CONTEXT = 32768  # tokens of context for Zed, which requires a number, if it is not known
NAME = "mlx-mtp"  # the provider or profile in the client
DISK_SIZE = f"{MAX_DISK_BYTES / 1e9:.0f}GB"
CLAUDE_MODELS = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")))


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
    ("--prompt-cache-size", int, None, None, "Maximum number of snapshots in the prompt cache (default: no limit)."),
    ("--prompt-cache-bytes", byte_size, None, "SIZE", "Limit of all caches (default: half of what the model leaves)."),
    ("--prompt-cache-disk-bytes", byte_size, None, "SIZE", f"Limit of --prompt-cache-dir (default: {DISK_SIZE})."),
)


def make_parser() -> argparse.ArgumentParser:
    """mlx-lm makes its parser in ``main``: these are its flags and defaults."""
    description = "Serve OpenAI's and Anthropic's APIs, with drafts of the model's own MTP head."
    parser = argparse.ArgumentParser(prog="mlx_mtp server", description=description)
    config = "Print the settings of this client for these flags, and exit."
    parser.add_argument("--print-config", choices=CLIENTS, help=config)
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


def check(args: argparse.Namespace) -> Options:
    """Check the flags before the model is loaded, and read the API key. Return them with ``load``, the arguments of
    ``mlx_mtp.load``, ``sampling``, the given flags of ``Sampling``, and ``kv``.
    """
    if args.draft_model is not None:
        raise MTPError(f"--draft-model runs in mlx-lm's own server: mlx_lm.server --draft-model {args.draft_model}.")
    flags.check_generation_flags(args)
    PrefillBudget(args.prefill_step_size, args.max_token_gap, args.min_decode_share)  # raises an error for a wrong flag
    if reserved := RESERVED & args.chat_template_args.keys():
        raise MTPError(f"--chat-template-args: {min(reserved)} is not a variable of the chat template.")
    if isinstance(args.mtp, str) and (args.serve_model or args.allow_any_model):
        raise MTPError("--mtp HEAD fits one model: remove --serve-model and --allow-any-model.")
    flags.check_prompt_cache_dir(args)
    if args.prompt_cache_disk_bytes is not None and args.prompt_cache_dir is None:
        raise MTPError("--prompt-cache-disk-bytes requires --prompt-cache-dir.")
    if args.adapter_path is not None:
        check_adapter(args.adapter_path, "--adapter-path")
    if args.chat_template:
        with as_mtp_error("--chat-template cannot be rendered"):
            render_jinja_template([], chat_template=args.chat_template)  # it is compiled, and no chat rendered
    flags.check_alone(args, "serve_model", "allow_any_model", "images", "unload_after", "keep_warm")
    if args.pipeline and mx.distributed.init().size() == 1:
        raise MTPError("--pipeline requires several processes: start them with mlx.launch.")
    if args.api_key is not None and args.api_key_file is not None:
        raise MTPError("--api-key and --api-key-file cannot be combined.")
    if args.api_key_file is not None:
        check_source(args.api_key_file, "--api-key-file")
        args.api_key = args.api_key_file.read_bytes().decode("utf-8-sig", errors="replace").strip()
    if args.api_key == "":
        raise MTPError("The API key is empty.")
    if args.api_key is not None and not (args.api_key.isascii() and args.api_key.isprintable()):
        raise MTPError("The API key must be printable ASCII, the only characters that all HTTP clients send.")
    kv = KVOptions(kv_bits=args.kv_bits, kv_group_size=args.kv_group_size, quantized_kv_start=args.quantized_kv_start)
    trust = {"trust_remote_code": args.trust_remote_code}
    config = trust | ({"chat_template": args.chat_template} if args.chat_template else {})
    context = min(CONTEXT, args.prefill_step_size)  # that must fit; longer prompts are checked when they arrive
    load: dict[str, Any] = {**trust, "tokenizer_config": config, "copy_drafts": True, "context": context}
    load |= ({"vision": "auto"} if args.images else {}) | flags.load_options(args)
    options = Options(**vars(args), load=load, sampling=flags.given_sampling(args), kv=kv)
    options.max_tokens = NO_LIMIT if args.max_tokens == -1 else args.max_tokens
    return options


def flags_of(options: argparse.Namespace) -> dict[str, Any]:
    """The flags of a server as values of JSON, with absolute paths and without the API key."""
    flags = vars(options) | {"model": resolve(options.model), "api_key": None}
    paths = {name for name, value in flags.items() if isinstance(value, str | Path) and os.path.exists(value)}
    return dict(json.loads(json.dumps(flags | {name: os.path.realpath(flags[name]) for name in paths}, default=str)))


def check_model(args: argparse.Namespace, models: ModelProvider) -> None:
    flags.check_model_flags(args, vars(models.model.args))
    if args.chat_template:
        question = [{"role": "user", "content": "a"}]
        with as_mtp_error("--chat-template cannot be rendered"):
            models.tokenizer.apply_chat_template(question, tokenize=False, **args.chat_template_args)


# Settings of coding agents, which ``--print-config`` prints and ``mlx_mtp launch`` passes on


@dataclass(frozen=True)
class ServerAddress:
    url: str  # without /v1
    key: str | None = None  # the API key, if the server requires one
    model: str = DEFAULT  # the model's name in requests
    context: int | None = None  # the context length, if known
    max_tokens: int | None = None  # the limit of an answer, if the server has one

    @property
    def answer(self) -> int:
        """The tokens that a client reserves for an answer, given the context."""
        return self.max_tokens or min(MAX_ANSWER, (self.context or 0) // 4)


@dataclass(frozen=True)
class ClientSettings:
    command: str  # starts the client
    variables: dict[str, str] = field(default_factory=dict)  # the client's environment
    file: str = ""  # the client's file, below the user's home
    text: str = ""  # the content of the file
    arguments: tuple[str, ...] = ()  # of the client, in place of the file

    def as_text(self) -> tuple[str, str]:
        """What the user does with the settings, and the settings."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()]
        if not self.file:
            return f"# run this in a shell, then start: {self.command}", "".join(f"{line}\n" for line in exports)
        return f"# {', '.join([f'put this into ~/{self.file}', *exports])}, then start: {self.command}", self.text


def address_of(options: Options, url: str, context: int | None) -> ServerAddress:
    max_tokens = None if options.max_tokens == NO_LIMIT else options.max_tokens
    return ServerAddress(url, options.api_key, options.served_model_name or DEFAULT, context, max_tokens)


def context_of(name: str) -> int | None:
    """The context length of a model, of which only the config is fetched; ``None`` without the hub."""
    resolve(name)
    try:
        return context_length_of(read_config(fetch(name, None, weights=()), name))
    except FileNotFoundError as e:
        if Path(name).exists():
            raise
        logging.warning(f"[WARNING] The settings lack the context length: {e}")
        return None


def claude(to: ServerAddress) -> ClientSettings:
    """Claude Code takes a context for names of models that it does not know. It asks before it uses an API key, not a token."""
    variables = {"ANTHROPIC_BASE_URL": to.url, "ANTHROPIC_AUTH_TOKEN": to.key or NO_KEY, "ANTHROPIC_API_KEY": ""}
    variables |= dict.fromkeys(CLAUDE_MODELS, to.model)
    if to.context is not None:
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(to.context)
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(to.answer)
    return ClientSettings("claude", variables)


def codex(to: ServerAddress) -> ClientSettings:
    """A profile: a file of its own beside the user's config.toml, which stays as it is."""
    provider = f"model_providers.{NAME}"
    values = {"model": to.model, "model_context_window": to.context, "model_provider": NAME, f"{provider}.name": NAME}
    values |= {f"{provider}.base_url": f"{to.url}/v1", f"{provider}.wire_api": "responses"}
    values |= {f"{provider}.env_key": None if to.key is None else KEY_VARIABLE}
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]  # also TOML
    variables = {} if to.key is None else {KEY_VARIABLE: to.key}
    text, arguments = "\n".join(lines) + "\n", tuple(word for line in lines for word in ("-c", line))
    return ClientSettings(f"codex --profile {NAME}", variables, f".codex/{NAME}.config.toml", text, arguments)


def opencode(to: ServerAddress) -> ClientSettings:
    """A config that opencode adds to the user's and the project's."""
    model = {}
    if to.context is not None:
        model["limit"] = {"context": to.context, "output": to.answer}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{to.url}/v1", "apiKey": to.key or NO_KEY},
        "models": {to.model: model},
    }
    models = dict.fromkeys(("model", "small_model"), f"{NAME}/{to.model}")
    return ClientSettings("opencode", {"OPENCODE_CONFIG_CONTENT": json.dumps({**models, "provider": {NAME: provider}})})


def aider(to: ServerAddress) -> ClientSettings:
    """Aider's own variables: a project's .env overrides those of OpenAI. It summarizes a chat at a 16th of the context."""
    variables = {"AIDER_OPENAI_API_BASE": f"{to.url}/v1", "AIDER_OPENAI_API_KEY": to.key or NO_KEY}
    variables["AIDER_MODEL"] = f"openai/{to.model}"
    if to.context is not None:
        variables["AIDER_MAX_CHAT_HISTORY_TOKENS"] = str(to.context // 16)
    return ClientSettings("aider", variables)


def zed(to: ServerAddress) -> ClientSettings:
    """A provider for the user's settings. Zed reads the key from a variable named after the provider."""
    model = {"name": to.model, "display_name": NAME, "max_tokens": to.context or ZED_CONTEXT}
    model["capabilities"] = {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False}
    provider = {"api_url": f"{to.url}/v1", "available_models": [model]}
    text = json.dumps({"language_models": {"openai_compatible": {NAME: provider}}}, indent=2) + "\n"
    return ClientSettings("zed", {KEY_VARIABLE: to.key or NO_KEY}, ".config/zed/settings.json", text)


CLIENTS = {client.__name__: client for client in (claude, codex, opencode, aider, zed)}
