"""The settings of coding agents for this server. ``--print-config`` prints them."""

import json
import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint.catalog import resolve
from ..checkpoint.config import context_length_of, read_config
from ..checkpoint.hub import fetch
from .engine.models import DEFAULT
from .request import NO_LIMIT, Options

NO_KEY = "none"  # clients require a key
KEY_VARIABLE = "MLX_MTP_API_KEY"  # the variable that Codex and Zed read
MAX_ANSWER = 32000  # tokens that opencode reserves for an answer without --max-tokens
CONTEXT = 32768  # tokens of context for Zed, which requires a number, if it is not known
NAME = "mlx-mtp"  # the provider or profile in the client

_quoted = json.dumps  # a string in JSON, which is also one in TOML and YAML


@dataclass(frozen=True)
class ServerAddress:
    url: str  # without /v1
    key: str | None = None  # the API key, if the server requires one
    model: str = DEFAULT  # the model's name in requests
    context: int | None = None  # the context length, if known
    max_tokens: int | None = None  # the limit of an answer, if the server has one


@dataclass(frozen=True)
class ClientSettings:
    command: str  # starts the client
    variables: dict[str, str] = field(default_factory=dict)  # the client's environment
    file: str = ""  # the client's file, below the user's home
    text: str = ""  # the content of the file

    @property
    def note(self) -> str:
        """The place of the settings, in one line."""
        where = f"put this into ~/{self.file}" if self.file else "run this in a shell"
        exports = "".join(f" {name}={shlex.quote(value)}" for name, value in self.variables.items() if self.file)
        return f"# {where}{', export' * bool(exports)}{exports}, then start: {self.command}"

    def as_text(self) -> str:
        """The file's content, or the lines for a shell."""
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.variables.items())
        return self.text if self.file else exports


def connection_to(options: Options, url: str) -> ServerAddress:
    """The address of a server with these options. Only the config of the model is fetched, if the hub can be reached."""
    resolve(options.model)
    context = None
    try:
        context = context_length_of(read_config(fetch(options.model, None, weights=()), options.model))
    except FileNotFoundError as e:
        if Path(options.model).exists():
            raise
        logging.warning(f"[WARNING] The settings lack the context length: {e}")
    max_tokens = None if options.max_tokens == NO_LIMIT else options.max_tokens
    return ServerAddress(url, options.api_key, options.served_model_name or DEFAULT, context, max_tokens)


def claude(to: ServerAddress) -> ClientSettings:
    variables = {"ANTHROPIC_BASE_URL": to.url, "ANTHROPIC_API_KEY": to.key or NO_KEY}
    if to.model != DEFAULT:
        variables["ANTHROPIC_MODEL"] = to.model
    return ClientSettings("claude", variables)


def codex(to: ServerAddress) -> ClientSettings:
    """A profile: a file of its own beside the user's config.toml, which stays as it is."""
    lines = [f"model = {_quoted(to.model)}", f'model_provider = "{NAME}"']
    lines += [f"model_context_window = {to.context}"] if to.context is not None else []
    lines += ["", f"[model_providers.{NAME}]", f'name = "{NAME}"', f"base_url = {_quoted(to.url + '/v1')}"]
    lines += ['wire_api = "responses"']
    lines += [f'env_key = "{KEY_VARIABLE}"'] if to.key is not None else []
    variables = {} if to.key is None else {KEY_VARIABLE: to.key}
    return ClientSettings(f"codex --profile {NAME}", variables, f".codex/{NAME}.config.toml", "\n".join(lines) + "\n")


def opencode(to: ServerAddress) -> ClientSettings:
    """A config of its own, which opencode adds to the user's where ``OPENCODE_CONFIG`` names it."""
    model = {}
    if to.context is not None:
        model["limit"] = {"context": to.context, "output": to.max_tokens or min(MAX_ANSWER, to.context // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{to.url}/v1", "apiKey": to.key or NO_KEY},
        "models": {to.model: model},
    }
    text = json.dumps({"provider": {NAME: provider}}, indent=2) + "\n"
    file = f".config/opencode/{NAME}.json"
    command = f"OPENCODE_CONFIG=~/{file} opencode -m {shlex.quote(f'{NAME}/{to.model}')}"
    return ClientSettings(command, {}, file, text)


def aider(to: ServerAddress) -> ClientSettings:
    variables = {"OPENAI_API_BASE": f"{to.url}/v1", "OPENAI_API_KEY": to.key or NO_KEY}
    return ClientSettings(f"aider --model {shlex.quote(f'openai/{to.model}')}", variables)


def continue_(to: ServerAddress) -> ClientSettings:
    lines = ["models:", "  - name: Qwen", "    provider: openai", f"    model: {_quoted(to.model)}"]
    lines += [f"    apiBase: {_quoted(to.url + '/v1')}", f"    apiKey: {_quoted(to.key or NO_KEY)}"]
    if to.context is not None:
        lines += ["    defaultCompletionOptions:", f"      contextLength: {to.context}"]
    text = "\n".join(["name: mlx_mtp", "version: 1.0.0", "schema: v1", *lines]) + "\n"
    return ClientSettings("Continue in your editor", {}, ".continue/config.yaml", text)


def zed(to: ServerAddress) -> ClientSettings:
    """A provider for the user's settings. Zed reads the key from a variable named after the provider."""
    model = {"name": to.model, "display_name": NAME, "max_tokens": to.context or CONTEXT}
    model["capabilities"] = {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False}
    provider = {"api_url": f"{to.url}/v1", "available_models": [model]}
    text = json.dumps({"language_models": {"openai_compatible": {NAME: provider}}}, indent=2) + "\n"
    return ClientSettings("zed", {KEY_VARIABLE: to.key or NO_KEY}, ".config/zed/settings.json", text)


CLIENTS: dict[str, Callable[[ServerAddress], ClientSettings]] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
    "aider": aider,
    "continue": continue_,
    "zed": zed,
}
