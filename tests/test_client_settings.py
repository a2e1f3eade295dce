"""``mlx_mtp server --print-config``: what is printed is what the client gets."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest

from mlx_mtp.server.__main__ import main
from mlx_mtp.server.agents import CLIENTS
from scripts.try_agents import CLIENTS as TRIED
from tests.support.commands import run_command
from tests.support.models import TRAINED

KEYED = ["--api-key", "it's", "--host", "0.0.0.0", "--port", "9", "--served-model-name", "qwen", "--max-tokens", "500"]
LOCAL, OTHER = "http://127.0.0.1:8080", "http://localhost:9"
GIVEN = [([], LOCAL, "none", "default_model", 2048), (KEYED, OTHER, "it's", "qwen", 500)]
AGENTS = [name for name, client in CLIENTS.items() if client.install]
CLIENT = f"#!{sys.executable} -S\nimport json, os, sys\nprint(json.dumps([dict(os.environ), sys.argv[1:]]))\n"


@pytest.fixture
def printed(capsys, tmp_path, monkeypatch):
    """The exit status, a client's settings, and the lines beside them, for a model without weights: it is not loaded."""
    shutil.copy(Path(TRAINED) / "config.json", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    return partial(run_command, main, capsys, "--model", tmp_path, "--print-config")


@pytest.fixture
def started(printed, tmp_path, monkeypatch):
    """Run what is printed in a shell, and then the client -> its variables, its arguments, and the text of its file."""

    def start(client, *flags) -> tuple[dict[str, str], list[str], str]:
        command = tmp_path / "bin" / client
        command.parent.mkdir(exist_ok=True)
        command.write_text(CLIENT)
        command.chmod(0o755)
        script = ["bash", "-c", f'eval "$1"; {client} --of-the-user', "bash", printed(client, *flags)[1]]
        variables, arguments = json.loads(
            subprocess.check_output(script, env=os.environ | {"PATH": f"{command.parent}:/usr/bin:/bin"})
        )
        assert arguments.pop() == "--of-the-user"
        if not CLIENTS[client].file:
            return variables, arguments, ""
        file = tmp_path / "mlx_mtp" / "agents" / client / CLIENTS[client].file
        assert file.stat().st_mode & 0o077 == 0  # it has the key
        return variables, arguments, file.read_text()

    return start


@pytest.mark.parametrize("client", AGENTS)
def test_a_client_is_told_of_the_server(started, monkeypatch, client):
    """The server, the model and the lengths, the user's hosts without a proxy and the server's; what outranks it is unset."""
    monkeypatch.setenv("NO_PROXY", "corp.example, 127.0.0.1")
    for name in CLIENTS[client].unset:
        monkeypatch.setenv(name, "theirs")
    variables, arguments, text = started(client, *KEYED)
    own = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    told = json.dumps([own, arguments, text])
    assert all(said in told for said in (OTHER, "it's", "qwen"))
    assert "$" not in told
    assert str(8192 // 16 if client == "aider" else 8192) in told or client == "mini"
    assert "500" in told or client in ("aider", "codex")  # which have no setting for it
    assert own["NO_PROXY"] == own["no_proxy"] == "corp.example,127.0.0.1,localhost,::1"
    assert not variables.keys() & {*CLIENTS[client].unset}


@pytest.mark.parametrize(("flags", "url", "key", "model", "answer"), GIVEN)
def test_what_some_clients_are_told(started, flags, url, key, model, answer):
    variables, arguments, text = started("claude", *flags)
    # A token, since Claude Code asks before it uses a key; and the model under each of its own names for models.
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")))
    limits = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": "8192", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(answer)}
    to = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, "ANTHROPIC_API_KEY": ""}
    want = {**to, **limits, **dict.fromkeys(names, model)}
    assert want.items() <= variables.items()
    assert want.items() <= json.loads(text)["env"].items()  # a file outranks those of the user and of the project
    assert arguments[0] == "--settings"
    variables, arguments, _ = started("codex", *flags)
    config = tomllib.loads("\n".join(arguments[1::2]))
    provider = {"name": "mlx-mtp", "base_url": f"{url}/v1", "wire_api": "responses", "env_key": "MLX_MTP_API_KEY"}
    own = {"model": model, "model_provider": "mlx-mtp", "model_context_window": 8192}
    assert config == {**own, "model_providers": {"mlx-mtp": provider}}
    assert variables["MLX_MTP_API_KEY"] == key
    config = json.loads(started("opencode", *flags)[0]["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == config["small_model"] == config["agent"]["build"]["model"] == f"mlx-mtp/{model}"
    options, limit = {"baseURL": f"{url}/v1", "apiKey": key}, {"context": 8192, "output": answer}
    models = {model: {"name": model, "limit": limit}}
    assert config["provider"] == {"mlx-mtp": {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}}
    _, arguments, text = started("aider", *flags)  # a project's .env outranks variables
    lines = dict(shlex.split(line)[0].split("=", 1) for line in text.splitlines())
    assert (lines["AIDER_OPENAI_API_KEY"], lines["AIDER_MODEL"]) == (key, f"openai/{model}")
    assert f"OPENAI_BASE_URL={url}/v1" in arguments


def test_zed(printed):
    _, out, err = printed("zed", *KEYED)
    provider = json.loads(out)["language_models"]["openai_compatible"]["mlx-mtp"]
    (model,) = provider["available_models"]
    assert (provider["api_url"], model["name"], model["max_tokens"]) == (f"{OTHER}/v1", "qwen", 8192)
    assert f"MLX_MTP_API_KEY={shlex.quote(KEYED[1])}" in err
    assert KEYED[1] not in out


def test_without_the_hub_the_context_is_unknown(printed, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    assert "model_context_window" not in printed("codex", "--model", "qwen3.5-4b")[1]
    assert "The settings lack the context length: mlx-community/Qwen3.5-4B-MLX-4bit" in caplog.text
    assert printed("codex", "--model", "qwen3.5-4x")[0] == 2  # a name that is not a model's is an error


@pytest.mark.parametrize("client", CLIENTS)
def test_a_line_beside_them_says_where_they_belong(printed, client, tmp_path):
    """And nothing is said of a context that the model does not say."""
    status, _, err = printed(client)
    _, line = err.splitlines()  # the first is of the imports
    assert status == 0
    assert ("put this into ~/.config/zed/settings.json" if client == "zed" else "run this in a shell") in line
    config = json.loads((tmp_path / "config.json").read_text())
    del config["text_config"]["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = printed(client)[1]
    assert not re.search(
        r"None|null|\$(?!@)|[lL]imit|_TOKENS|context|max_?[tT]okens", out.replace('"max_tokens": 32768', "")
    )
    status, _, err = printed(client, "--port", "0")
    assert (status, "--print-config requires a fixed port" in err) == (2, True)


def test_the_page_tells_of_each_agent_as_it_was_tried():
    page = (Path(__file__).parents[1] / "docs" / "agents.md").read_text()
    rows = [re.split(r" *\| *", line)[1:-1] for line in page.splitlines() if line.startswith("| `")]
    said = {row[0].split("`")[1]: [row[1], *row[3:]] for row in rows}
    tokens = {name: CLIENTS[name].n_tokens for name in AGENTS}
    times = {name: [f"{n:,}", f"{n / 100:.0f} s", f"{n / 1000:.1f} s"] for name, n in tokens.items()}
    assert said == {name: [TRIED[name].version, *times[name]] for name in AGENTS}
