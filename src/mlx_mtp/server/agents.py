"""The settings of coding agents, which ``--print-config`` prints and ``mlx_mtp launch`` passes on: a row of a table each."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from string import Template
from typing import Any

NAME = "mlx-mtp"  # the provider in the client
KEY = "MLX_MTP_API_KEY"  # the variable of clients that read the key from one of any name


def as_lines(content: Mapping[str, Any]) -> str:
    return "".join(f"{name}={json.dumps(value)}\n" for name, value in content.items())


def as_extension(content: Mapping[str, Any]) -> str:
    return f"export default pi => pi.registerProvider({json.dumps(NAME)}, {json.dumps(content)})\n"


@dataclass(frozen=True)
class Client:
    """A row. In it, ``$url``, ``$key``, ``$model``, ``$context``, ``$window`` (the context, or a guess), ``$answer``,
    ``$history`` (these four in tokens), ``$no_proxy`` and ``$folder`` stand for the values of ``address_of``; ``${context}`` is
    text. An entry with an unknown value is left out.
    """

    n_tokens: int = 0  # of its first request, with Qwen's tokenizer
    install: str = ""  # the command; without one, it is an editor, which ``launch`` does not start
    variables: Mapping[str, Any] = field(default_factory=dict)  # of its environment; a dictionary is JSON
    unset: tuple[str, ...] = ()  # variables that outrank them
    arguments: tuple[Any, ...] = ()  # before the user's, which outrank them; an entry of a dictionary is -c NAME=JSON
    file: str = ""  # in ``$folder``
    content: Mapping[str, Any] = field(default_factory=dict)
    form: Callable[[Mapping[str, Any]], str] = json.dumps  # the text of the content


# What outranks a client's settings was tried with the client and a listener in place of the vendor.
NO_PROXY = dict.fromkeys(("NO_PROXY", "no_proxy"), "$no_proxy")
CLAUDE = {
    "ANTHROPIC_BASE_URL": "$url",
    "ANTHROPIC_AUTH_TOKEN": "$key",  # it asks before it uses a key, not a token
    "ANTHROPIC_API_KEY": "",
    "ANTHROPIC_MODEL": "$model",
    **{f"ANTHROPIC_DEFAULT_{kind}_MODEL": "$model" for kind in ("FABLE", "OPUS", "SONNET", "HAIKU")},
    "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "${context}",  # of models whose names it does not know
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "${answer}",
}
CLAUDE_VENDORS = tuple(
    f"CLAUDE_CODE_USE_{name}" for name in ("BEDROCK", "VERTEX", "FOUNDRY", "MANTLE", "ANTHROPIC_AWS", "GATEWAY")
)
AIDER = {  # "OPENAI_BASE_URL" outranks its own variable
    "AIDER_OPENAI_API_BASE": "$url/v1",
    "AIDER_OPENAI_API_KEY": "$key",
    "OPENAI_BASE_URL": "$url/v1",
    **{f"AIDER_{kind}MODEL": "openai/$model" for kind in ("", "WEAK_", "EDITOR_")},
    "AIDER_MAX_CHAT_HISTORY_TOKENS": "$history",
}
OPENCODE = {  # also Kilo Code's format
    **dict.fromkeys(("model", "small_model"), f"{NAME}/$model"),
    # A project may give its agents models of other providers: these fail.
    "enabled_providers": [NAME],
    "disabled_providers": [],
    "provider": {
        NAME: {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "$url/v1", "apiKey": "$key"},
            "models": {"$model": {"name": "$model", "limit": {"context": "$context", "output": "$answer"}}},
        }
    },
}
OWN = {"model": f"{NAME}/$model"}  # of agents that come with opencode and Kilo Code, whose model a project may set
OPENCODE_AGENTS = dict.fromkeys(("build", "plan", "general", "explore", "title", "summary", "compaction"), OWN)
PROVIDER = f"model_providers.{NAME}"
COPILOT_UNSET = (
    "TYPE",
    "API_KEY_COMMAND",
    "BEARER_TOKEN",
    "WIRE_API",
    "TRANSPORT",
    "MODEL_ID",
    "WIRE_MODEL",
    "HEADERS",
)
CLIENTS = {
    "pi": Client(
        1_300,
        "npm install -g @earendil-works/pi-coding-agent",
        {"PI_OFFLINE": "1"},
        arguments=("-e", "$folder/pi.js", "--model", f"{NAME}/$model"),
        file="pi.js",
        content={
            "baseUrl": "$url/v1",
            "apiKey": "$key",
            "api": "openai-completions",
            "models": [
                {
                    "id": "$model",
                    "name": "$model",
                    "reasoning": True,
                    "input": ["text", "image"],
                    "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
                    "contextWindow": "$context",
                    "maxTokens": "$answer",
                }
            ],
        },
        form=as_extension,
    ),
    "claude": Client(
        18_700,
        "npm install -g @anthropic-ai/claude-code",
        CLAUDE,
        (*CLAUDE_VENDORS, "ANTHROPIC_CUSTOM_HEADERS", "ANTHROPIC_UNIX_SOCKET"),
        ("--settings", "$folder/settings.json"),
        "settings.json",
        {"env": CLAUDE | NO_PROXY | dict.fromkeys((*CLAUDE_VENDORS, "ANTHROPIC_CUSTOM_HEADERS"), "")},
    ),
    "codex": Client(
        8_300,
        "npm install -g @openai/codex",
        {KEY: "$key"},
        arguments=(
            {
                "model": "$model",
                "model_context_window": "$context",
                "model_provider": NAME,
                f"{PROVIDER}.name": NAME,
                f"{PROVIDER}.base_url": "$url/v1",
                f"{PROVIDER}.wire_api": "responses",
                f"{PROVIDER}.env_key": KEY,
            },
        ),
    ),
    "opencode": Client(
        7_200,
        "npm install -g opencode-ai",
        {"OPENCODE_CONFIG_CONTENT": OPENCODE | {"agent": OPENCODE_AGENTS}},
    ),
    "kilo": Client(
        11_900,
        "npm install -g @kilocode/cli",
        {
            "KILO_CONFIG_CONTENT": OPENCODE
            | {"agent": OPENCODE_AGENTS | dict.fromkeys(("ask", "code", "debug", "orchestrator"), OWN)},
            # It sends the sessions of users with an account to its vendor.
            **dict.fromkeys(("KILO_DISABLE_MODELS_FETCH", "KILO_DISABLE_SESSION_INGEST"), "1"),
        },
    ),
    "qwen": Client(
        16_800,
        "npm install -g @qwen-code/qwen-code",
        {KEY: "$key", "QWEN_CODE_SYSTEM_SETTINGS_PATH": "$folder/settings.json"},
        file="settings.json",
        content={
            "security": {"auth": {"selectedType": "openai"}},
            "model": {"name": "$model"},
            "fastModel": "$model",
            "modelProviders": {
                "openai": [
                    {
                        "id": "$model",
                        "name": "$model",
                        "baseUrl": "$url/v1",
                        "envKey": KEY,
                        "generationConfig": {
                            "contextWindowSize": "$context",
                            "samplingParams": {"max_tokens": "$answer"},
                        },
                    }
                ]
            },
        },
    ),
    "cline": Client(  # a folder of its own, since a running hub of the user's would send requests to the user's provider
        5_300,
        "npm install -g cline",
        arguments=("--data-dir", "$folder", "-P", "openai-compatible", "-m", "$model"),
        file="settings/providers.json",
        content={
            "version": 1,
            "lastUsedProvider": "openai-compatible",
            "modes": {},
            "providers": {
                "openai-compatible": {
                    "settings": {
                        "provider": "openai-compatible",
                        "apiKey": "$key",
                        "model": "$model",
                        "baseUrl": "$url/v1",
                        "contextWindow": "$context",
                        "maxTokens": "$answer",
                    },
                    "updatedAt": "2026-01-01T00:00:00.000Z",
                    "tokenSource": "manual",
                }
            },
        },
    ),
    "copilot": Client(
        11_000,
        "npm install -g @github/copilot",
        {
            "COPILOT_OFFLINE": "true",
            "COPILOT_MODEL": "$model",
            "COPILOT_PROVIDER_BASE_URL": "$url/v1",
            "COPILOT_PROVIDER_API_KEY": "$key",
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": "$context",
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": "$answer",
        },
        tuple(f"COPILOT_PROVIDER_{name}" for name in COPILOT_UNSET),
    ),
    "mini": Client(
        800,
        "python3 -m pip install mini-swe-agent",
        {
            "OPENAI_API_KEY": "$key",
            "OPENAI_API_BASE": "$url/v1",
            "OPENAI_BASE_URL": "$url/v1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_CONFIGURED": "true",
        },
        # A config of the user's may have another class or URL.
        arguments=(
            "-m",
            "openai/$model",
            "--model-class",
            "litellm",
            "-c",
            "benchmarks/../mini.yaml",  # its own: a file of this name in the project comes first
            {"model.model_kwargs.api_base": "$url/v1", "model.model_kwargs.max_tokens": "$answer"},
        ),
    ),
    "aider": Client(
        600,
        "python3 -m pip install aider-install && aider-install",
        AIDER,
        arguments=("--env-file", "$folder/aider.env", "--set-env", "OPENAI_BASE_URL=$url/v1"),
        file="aider.env",  # which outranks a project's .env
        content=AIDER | NO_PROXY,
        form=as_lines,
    ),
    "zed": Client(
        variables={KEY: "$key"},  # a variable named after the provider
        file=".config/zed/settings.json",
        content={
            "language_models": {
                "openai_compatible": {
                    NAME: {
                        "api_url": "$url/v1",
                        "available_models": [
                            {
                                "name": "$model",
                                "display_name": NAME,
                                "max_tokens": "$window",
                                "capabilities": {
                                    "tools": True,
                                    "images": False,
                                    "parallel_tool_calls": True,
                                    "prompt_cache_key": False,
                                },
                            }
                        ],
                    }
                }
            }
        },
    ),
}


def settings_of(client: Client, values: Mapping[str, Any]) -> tuple[dict[str, str], list[str], str]:
    """The variables and arguments of a client, and the text of its file."""
    variables, arguments = fill({**NO_PROXY, **client.variables}, values), list[str]()
    for x in fill([*client.arguments], values):
        arguments += [x] if isinstance(x, str) else [w for k, v in x.items() for w in ("-c", f"{k}={json.dumps(v)}")]
    text = client.form(fill(client.content, values)) if client.file else ""
    return {k: json.dumps(x) if isinstance(x, dict) else str(x) for k, x in variables.items()}, arguments, text


def fill(part: Any, values: Mapping[str, Any]) -> Any:
    """A part of a row with these values; ``None`` if one is missing, or nothing is left."""
    if isinstance(part, Mapping):
        known = {fill(name, values): x for name, y in part.items() if (x := fill(y, values)) is not None}
        return known if known or not part else None
    if isinstance(part, list):
        return [fill(x, values) for x in part]
    if isinstance(part, str) and part.startswith("$") and part[1:] in values:
        return values[part[1:]]  # a number stays one
    with suppress(KeyError):
        return Template(part).substitute(values) if isinstance(part, str) else part
    return None


def as_text(name: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """What the user does with the settings of a client, and the settings, as lines of a shell or an editor's file."""
    client = CLIENTS[name]
    variables, arguments, text = settings_of(client, values)
    lines = [f"export {variable}={quote(value)}" for variable, value in variables.items()]
    if not client.install:
        return (
            f"# put this into ~/{client.file}, {', '.join(lines)}, then start: {name}",
            f"{json.dumps(json.loads(text), indent=2)}\n",
        )
    lines += [f"unset {' '.join(client.unset)}"] * bool(client.unset)
    file = Path(values["folder"], client.file)
    write = f"mkdir -p {quote(str(file.parent))}; printf %s {quote(text)} > {quote(str(file))}"
    lines += [f"(umask 077; {write})"] * bool(client.file)
    lines += [f'function {name} {{ command {name} {" ".join(map(quote, arguments))} "$@"; }}'] * bool(arguments)
    return f"# run this in a shell, then start: {name}", "".join(f"{line}\n" for line in lines)
