"""``mlx_mtp server --print-config``: what is printed is what the client reads."""

import json
import shlex
import shutil
import tomllib
from functools import partial
from pathlib import Path

import pytest

from mlx_mtp.server.__main__ import main
from mlx_mtp.server.agents import CLIENTS
from tests.support.commands import run_command
from tests.support.models import TRAINED

KEYED = ["--api-key", "it's", "--host", "0.0.0.0", "--port", "9", "--served-model-name", "qwen", "--max-tokens", "500"]


@pytest.fixture
def printed(capsys, tmp_path):
    """The exit status, a client's settings, and the line beside them, for a model without weights: it is not loaded."""
    shutil.copy(Path(TRAINED) / "config.json", tmp_path)

    return partial(run_command, main, capsys, "--model", tmp_path, "--print-config")


LOCAL, OTHER = "http://127.0.0.1:8080", "http://localhost:9"
GIVEN = [([], LOCAL, "none", "default_model", 2048), (KEYED, OTHER, "it's", "qwen", 500)]


@pytest.mark.parametrize(("flags", "url", "key", "model", "answer"), GIVEN)
def test_lines_for_a_shell(printed, flags, url, key, model, answer):
    def exported(client) -> dict[str, str]:
        """The variables that a shell exports."""
        lines = [shlex.split(line) for line in printed(client, *flags)[1].splitlines()]
        assert all(len(line) == 2 and line[0] == "export" for line in lines)
        return dict(line[1].split("=", 1) for line in lines)

    # A token, since Claude Code asks before it uses a key; and the model under each of its own names for models.
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")))
    limits = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": "8192", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(answer)}
    to = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, "ANTHROPIC_API_KEY": ""}
    assert exported("claude") == {**to, **limits, **dict.fromkeys(names, model)}
    # Aider's own variables: a project's .env may have others' keys for OpenAI.
    own = {"AIDER_OPENAI_API_BASE": f"{url}/v1", "AIDER_OPENAI_API_KEY": key}
    assert exported("aider") == {**own, "AIDER_MODEL": f"openai/{model}", "AIDER_MAX_CHAT_HISTORY_TOKENS": "512"}
    config = json.loads(exported("opencode")["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == config["small_model"] == f"mlx-mtp/{model}"
    options, models = {"baseURL": f"{url}/v1", "apiKey": key}, {model: {"limit": {"context": 8192, "output": answer}}}
    assert config["provider"]["mlx-mtp"] == {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}


def test_codex(printed):
    provider = {"name": "mlx-mtp", "base_url": f"{LOCAL}/v1", "wire_api": "responses"}
    want = {"model": "default_model", "model_provider": "mlx-mtp", "model_context_window": 8192}
    assert tomllib.loads(printed("codex")[1]) == {**want, "model_providers": {"mlx-mtp": provider}}
    _, out, err = printed("codex", *KEYED)
    own = tomllib.loads(out)
    assert own["model"] == "qwen"
    assert own["model_providers"]["mlx-mtp"]["base_url"] == f"{OTHER}/v1"
    assert f"{own['model_providers']['mlx-mtp']['env_key']}={shlex.quote(KEYED[1])}" in err
    assert err.endswith("then start: codex --profile mlx-mtp\n")
    assert KEYED[1] not in out


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
    files = {"codex": ".codex/mlx-mtp.config.toml", "zed": ".config/zed/settings.json"}
    status, _, err = printed(client)
    _, line = err.splitlines()  # the first is of the imports
    assert status == 0
    assert (f"put this into ~/{files[client]}" if client in files else "run this in a shell") in line
    config = json.loads((tmp_path / "config.json").read_text())
    del config["text_config"]["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = printed(client)[1]
    assert not any(word in out for word in ("None", "null", "limit", "MAX_", "context_window"))
    status, _, err = printed(client, "--port", "0")
    assert (status, "--print-config requires a fixed port" in err) == (2, True)
