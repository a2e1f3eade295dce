"""The options of a server: its flags, checked."""

import argparse
import json
import logging
import os
from pathlib import Path
from secrets import token_urlsafe
from typing import Any
from urllib.parse import urlsplit

import mlx.core as mx
from transformers.utils.chat_template_utils import render_jinja_template

from ..checkpoint.adapters import check_adapter
from ..checkpoint.catalog import resolve
from ..checkpoint.config import context_length_of, read_config
from ..checkpoint.hub import fetch
from ..cli import arguments
from ..core.batch.scheduler import PrefillBudget
from ..core.caches.rows import KVOptions
from ..errors import MTPError, as_mtp_error
from ..files import check_source
from ..memory import CONTEXT
from . import DEFAULT
from .agents import NO_PROXY
from .api.common import RESERVED
from .engine.models import ModelProvider
from .request import NO_LIMIT, Options

NO_KEY = "none"  # clients require a key
MAX_ANSWER = 32000  # tokens that a client reserves for an answer without --max-tokens
GUESS = 32768  # tokens of context for clients that require a number, if it is not known


def check(args: argparse.Namespace) -> Options:
    """Check the flags before the model is loaded, and read the API key. Return them with ``load``, the arguments of
    ``mlx_mtp.load``, ``sampling``, the given flags of ``Sampling``, ``kv``, and ``instance``, a random name of this server.
    """
    if args.draft_model is not None:
        raise MTPError(f"--draft-model runs in mlx-lm's own server: mlx_lm.server --draft-model {args.draft_model}.")
    arguments.check_generation_flags(args)
    PrefillBudget(args.prefill_step_size, args.max_token_gap, args.min_decode_share)  # raises an error for a wrong flag
    if reserved := RESERVED & args.chat_template_args.keys():
        raise MTPError(f"--chat-template-args: {min(reserved)} is not a variable of the chat template.")
    if isinstance(args.mtp, str) and (args.serve_model or args.allow_any_model):
        raise MTPError("--mtp HEAD fits one model: remove --serve-model and --allow-any-model.")
    arguments.check_prompt_cache_dir(args)
    if args.prompt_cache_disk_bytes is not None and args.prompt_cache_dir is None:
        raise MTPError("--prompt-cache-disk-bytes requires --prompt-cache-dir.")
    if args.adapter_path is not None:
        check_adapter(args.adapter_path, "--adapter-path")
    if args.chat_template:
        with as_mtp_error("--chat-template cannot be rendered"):
            render_jinja_template([], chat_template=args.chat_template)  # it is compiled, and no chat rendered
    arguments.check_alone(args, "serve_model", "allow_any_model", "images", "unload_after", "keep_warm")
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
    load |= ({"vision": "auto"} if args.images else {}) | arguments.load_options(args)
    options = Options(**vars(args), load=load, sampling=arguments.given_sampling(args), kv=kv)
    options.max_tokens = NO_LIMIT if args.max_tokens == -1 else args.max_tokens
    options.instance = token_urlsafe()
    return options


def flags_of(options: argparse.Namespace) -> dict[str, Any]:
    """The flags of a server as values of JSON, with absolute paths and without the API key."""
    flags = vars(options) | {"model": resolve(options.model), "api_key": None}
    paths = {name for name, value in flags.items() if isinstance(value, str | Path) and os.path.exists(value)}
    return dict(json.loads(json.dumps(flags | {name: os.path.realpath(flags[name]) for name in paths}, default=str)))


def check_model(args: argparse.Namespace, models: ModelProvider) -> None:
    arguments.check_model_flags(args, vars(models.model.args))
    if args.chat_template:
        question = [{"role": "user", "content": "a"}]
        with as_mtp_error("--chat-template cannot be rendered"):
            models.tokenizer.apply_chat_template(question, tokenize=False, **args.chat_template_args)


def address_of(options: Options, url: str, context: int | None, folder: Path) -> dict[str, Any]:
    """What ``agents.py`` says of a server: the URL (without /v1), key and model, the context length and what follows from it,
    if it is known, the hosts that need no proxy, and a folder for the client's file.
    """
    given = ",".join(os.environ.get(name, "") for name in NO_PROXY)
    hosts = [*given.split(","), "127.0.0.1", "localhost", "::1", str(urlsplit(url).hostname)]
    answer = context and min(MAX_ANSWER, context // 4) if options.max_tokens == NO_LIMIT else options.max_tokens
    said = {
        "url": url,
        "key": options.api_key or NO_KEY,
        "model": options.served_model_name or DEFAULT,
        "context": context,
        "window": context or GUESS,
        "answer": context and answer,
        "history": context and context // 16,
        "no_proxy": ",".join(dict.fromkeys(host.strip() for host in hosts if host.strip())),
        "folder": str(folder),
    }
    return {name: value for name, value in said.items() if value is not None}


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
