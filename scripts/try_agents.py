"""Try the real coding agents: each reads a file, edits it, runs a command and ends, by a scripted model. Aider only edits.

    python -m scripts.try_agents /tmp/agents

npm and pip, in environments of their own, install the clients in the folder, at the versions below; npm must be allowed to run
the install scripts of node and opencode. ``mlx_mtp launch`` starts each client in a network
namespace that has nothing but the loopback device (``unshare -n``, as root), with a HOME of its own, and finds the server of a
tiny model: nothing leaves the machine. The environment, HOME and the project lead to a vendor and to a proxy (``TRAPS``), in
whose place a listener must hear nothing of the server and the question. What the client left on disk must be right, it must say
the model's last words, and the server's log may have no traceback. With ``--drifts``, the model leaves tags of its calls out.
Takes a minute or two for each client.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from scripts.shared import run_without_network, script_parser
from tests.support.server_process import serve
from tests.support.tool_texts import make_model

ROOT = Path(__file__).parents[1]
ASK = "Make three of two in notes.txt, then count its lines."
LIMIT = 900  # seconds for a client, on a busy machine
NODE = "node@22"  # that some of them need
# What a run without a person needs, beside the settings that users have.
QUIET_VARIABLES = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@dataclass(frozen=True)
class Client:
    """A coding agent."""

    package: str  # npm's name, or pip's
    version: str  # the one that was tried
    arguments: str  # before the question
    is_python: bool = False
    has_tools: bool = True  # whether it runs commands


AIDER = "--edit-format diff --file notes.txt --no-git --yes-always --analytics-disable --no-check-update"
AIDER += " --no-show-model-warnings --no-show-release-notes --no-pretty --message"
CODEX = "exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
CLIENTS = {
    "pi": Client("@earendil-works/pi-coding-agent", "1.6.0", "-p"),
    "claude": Client("@anthropic-ai/claude-code", "2.1.197", "--allowedTools Read,Edit,Bash -p"),
    "codex": Client("@openai/codex", "0.169.0", CODEX),
    "opencode": Client("opencode-ai", "1.18.33", "run"),
    "kilo": Client("@kilocode/cli", "7.7.7", "run --auto"),
    "qwen": Client("@qwen-code/qwen-code", "0.24.4", "--yolo -p"),
    "cline": Client("cline", "3.0.65", ""),
    "copilot": Client("@github/copilot", "1.0.102", "--allow-all-tools -p"),
    "mini": Client("mini-swe-agent", "2.4.6", "-y --exit-immediately -t", is_python=True),
    "aider": Client("aider-chat", "0.86.2", AIDER, is_python=True, has_tools=False),
}

# What would lead a client away from the server: variables, and files of the user and of the project.
VENDOR = "http://vendor.test/v1"
SWITCHES = {
    **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_VERTEX_BASE_URL"), VENDOR),
    **{"OPENAI_API_KEY": "theirs", "CLAUDE_CODE_USE_VERTEX": "1", "ANTHROPIC_VERTEX_PROJECT_ID": "theirs"},
    **{"CLOUD_ML_REGION": "us", "CLAUDE_CODE_SKIP_VERTEX_AUTH": "1", "NO_PROXY": "corp.example"},
    **{f"COPILOT_PROVIDER_{name}": "theirs" for name in ("BEARER_TOKEN", "WIRE_MODEL")},
}
THEIRS = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": VENDOR, "apiKey": "k"}, "models": {"m": {}}}
AGENTS = {agent: {"model": "theirs/m"} for agent in ("build", "code", "title")}
OPENCODE = {"permission": "allow", "provider": {"theirs": THEIRS}, "agent": AGENTS, "disabled_providers": ["mlx-mtp"]}
QWEN = {"id": "default_model", "baseUrl": VENDOR, "envKey": "K"}
CLINE = {"provider": "openai-compatible", "apiKey": "k", "model": "m", "baseUrl": VENDOR}
STORED = {"openai-compatible": {"settings": CLINE, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}}
PROVIDER = f'[model_providers.theirs]\nname = "theirs"\nbase_url = "{VENDOR}"\nwire_api = "responses"\n'
ENV = f"OPENAI_BASE_URL={VENDOR}\nAIDER_OPENAI_API_BASE={VENDOR}\nAIDER_OPENAI_API_KEY=theirs\nAIDER_MODEL=openai/m\n"
TRAPS = {
    "home/.claude/settings.json": {
        "env": {"ANTHROPIC_BASE_URL": VENDOR, "CLAUDE_CODE_USE_FOUNDRY": "1", "NO_PROXY": ""},
        "apiKeyHelper": "echo theirs",
    },
    "work/.claude/settings.json": {"env": {"ANTHROPIC_BASE_URL": VENDOR, "ANTHROPIC_FOUNDRY_BASE_URL": VENDOR}},
    "home/.codex/config.toml": f'model = "m"\nmodel_provider = "theirs"\n{PROVIDER}',
    "home/.config/opencode/opencode.json": OPENCODE,
    "work/opencode.json": {"model": "theirs/m", "small_model": "theirs/m"},
    "home/.config/kilo/kilo.json": OPENCODE,
    "home/.qwen/settings.json": {"fastModel": "m", "modelProviders": {"openai": [QWEN]}, "env": {"K": "k"}},
    "work/.env": ENV,
    "work/.aider.conf.yml": f"set-env:\n- OPENAI_BASE_URL={VENDOR}\nweak-model: openai/m\n",
    "home/.cline/data/settings/providers.json": {"version": 1, "modes": {}, "providers": STORED},
    "home/.copilot/settings.json": {"model": "claude-opus-4.5"},
    "home/.config/mini-swe-agent/.env": f"OPENAI_BASE_URL={VENDOR}\n",
    "work/mini.yaml": f"model:\n  model_class: openrouter\n  model_kwargs:\n    api_base: {VENDOR}\n",
    "home/.pi/agent/settings.json": {"defaultProvider": "openai", "defaultModel": "gpt-5"},
}


class Listener(threading.Thread):
    """In the place of a proxy, and by it of a vendor: it refuses every request, and keeps it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.heard: list[bytes] = []
        self.start()

    def run(self) -> None:
        while True:
            with self.socket.accept()[0] as s:
                self.heard.append(s.recv(1 << 16))
                s.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def try_client(name: str, agents: Path, folder: Path) -> list[str]:
    """Run a client in a new folder -> what is wrong with what it did."""
    client, work, proxy = CLIENTS[name], folder / "work", Listener()
    for file, content in TRAPS.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    (folder / "key").write_text("sesame")
    (work / "notes.txt").write_text("one\ntwo\n")
    model = str(make_model(folder / "model"))
    os.environ["AGENT_FOLDER"] = str(work)  # for the script
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # where the server is found
    places = [agents / "node_modules" / ".bin", agents / "aider" / "bin", agents / "mini" / "bin", "/usr/local/bin"]
    env = {"PATH": f"{':'.join(map(str, places))}:/usr/bin:/bin", "HOME": str(folder / "home"), **QUIET_VARIABLES}
    env |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), proxy.url) | SWITCHES
    launch = [sys.executable, "-P", "-m", "mlx_mtp", "launch", name, "--model", model]
    command = ["timeout", str(LIMIT), *launch, "--", *client.arguments.split(), ASK]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    flags = ["--mtp", "--model", model, "--api-key-file", str(folder / "key")]
    with serve(folder / "server.log", *flags, module="scripts.scripted_agent"):
        env["XDG_CACHE_HOME"] = os.environ["XDG_CACHE_HOME"]
        done = subprocess.run(command, cwd=work, env=env, text=True, **streams)
    (folder / "client.log").write_text(done.stdout)
    (folder / "heard.log").write_bytes(b"\n\n".join(proxy.heard))
    wrong = [] if done.returncode == 0 else [f"it ends with status {done.returncode}"]
    for file, want in (("notes.txt", "one\nthree\n"), ("count.txt", "2 notes.txt\n")):
        got = (work / file).read_text() if (work / file).exists() else None
        wrong += [f"{file} is {got!r}"] * (got != want and (client.has_tools or file == "notes.txt"))
    wrong += ["it does not say the last words"] * ("It is done." not in done.stdout)
    wrong += ["it does not use the server that runs"] * ("Using the server at " not in done.stdout)
    wrong += [f"{file} is changed" for file in TRAPS if "127.0.0.1" in (folder / file).read_text()]
    secrets = (b"127.0.0.1", b"vendor.test", ASK.encode())
    wrong += [f"the listener hears {x[:60]!r}" for x in proxy.heard if any(secret in x for secret in secrets)]
    wrong += ["a traceback of the server"] * ("Traceback" in (folder / "server.log").read_text())
    return wrong


def install(names: list[str], agents: Path) -> None:
    """Install the clients, unless the folder has them in these versions."""
    npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error", "--prefix", agents, NODE]
    for name in names:
        client = CLIENTS[name]
        found = agents / "node_modules" / client.package / "package.json"
        if client.is_python and not [*agents.glob(f"{name}/lib/*/site-packages/*-{client.version}.dist-info")]:
            subprocess.run([sys.executable, "-m", "venv", "--clear", agents / name], check=True)
            pip = [agents / name / "bin" / "python", "-m", "pip", "install", "-q"]
            subprocess.run([*pip, f"{client.package}=={client.version}"], check=True)
        elif not client.is_python and not (
            found.exists() and json.loads(found.read_text())["version"] == client.version
        ):
            npm.append(f"{client.package}@{client.version}")
    if npm[-1] != NODE:
        subprocess.run(npm, check=True)


def main() -> None:
    inside, drifts = "The network has nothing but the loopback device.", "The tags of the model's calls drift."
    parser = script_parser(__doc__, inside=(False, inside), drifts=(False, drifts))
    parser.add_argument("agents", type=Path, help="The folder that npm has installed them in.")
    parser.add_argument("--client", action="append", choices=CLIENTS, help="Try this one; repeatable (default: all).")
    args = parser.parse_args()
    names = args.client or [*CLIENTS]
    if not args.inside:
        install(names, args.agents)
        run_without_network("scripts.try_agents")
    if args.drifts:
        os.environ["AGENT_DRIFTS"] = "1"  # for the script, too
    n_failed = 0
    for name in names:
        own = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        wrong = try_client(name, args.agents.resolve(), own)
        n_failed += bool(wrong)
        print(f"{name} {CLIENTS[name].version}: {'; '.join(wrong) or 'right'} ({own})", flush=True)
    sys.exit(n_failed > 0)


if __name__ == "__main__":
    main()
