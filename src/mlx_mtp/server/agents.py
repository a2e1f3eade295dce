"""The settings of coding agents, which ``--print-config`` prints and ``mlx_mtp launch`` passes on."""

import json
import shlex
from dataclasses import dataclass, field

from . import DEFAULT

NO_KEY = "none"  # clients require a key
KEY_VARIABLE = "MLX_MTP_API_KEY"  # the variable that Codex and Zed read
MAX_ANSWER = 32000  # tokens that opencode reserves for an answer without --max-tokens
ZED_CONTEXT = 32768  # tokens of context for Zed, which requires a number, if it is not known
NAME = "mlx-mtp"  # the provider or profile in the client
CLAUDE_MODELS = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")))


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
    text = "\n".join(lines) + "\n"
    arguments = tuple(word for line in lines for word in ("-c", line))
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
