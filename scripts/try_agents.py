"""Try the real coding agents: each reads a file, edits it, runs a command and ends, by a scripted model. Aider only edits.

    npm install --prefix /tmp/agents @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0 opencode-ai@1.18.33
    python -m venv /tmp/agents/aider && /tmp/agents/aider/bin/pip install aider-chat==0.86.2
    python -m scripts.try_agents /tmp/agents

npm must be allowed to run the install script of opencode (``npm install --allow-scripts``, or ``node postinstall.mjs`` in its
folder). Each client runs in a network namespace that has nothing but the loopback device (``unshare -n``, as root), with an
empty environment and a HOME of its own, against ``mlx_mtp server`` with a tiny model: nothing leaves the machine. What it left
on disk must be right, it must say the model's last words, and the server's log may have no traceback. With ``--drifts``, the
model leaves tags of its calls out. Takes a minute or two for each client.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mlx_mtp.server.command_line import CLIENTS as CLIENT_SETTINGS
from mlx_mtp.server.command_line import ServerAddress
from scripts.shared import script_parser
from tests.support.server_process import serve
from tests.support.tool_texts import make_model

ROOT = Path(__file__).parents[1]
ASK = "Make three of two in notes.txt, then count its lines."
LIMIT = 900  # seconds for a client, on a busy machine
CONTEXT = 131072  # of the tiny model
# What a run without a person needs, beside the settings that users have.
QUIET_VARIABLES = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@dataclass(frozen=True)
class Client:
    """A coding agent."""

    package: str  # npm's name, or pip's
    version: str  # the one that was tried
    command: str  # without the question
    has_tools: bool = True  # whether it runs commands


def configure(name: str, home: Path, url: str) -> dict[str, str]:
    """Write a client's settings, as ``mlx_mtp server --print-config`` prints them -> its environment."""
    settings = CLIENT_SETTINGS[name](ServerAddress(url.removesuffix("/v1"), context=CONTEXT))
    variables = settings.variables | QUIET_VARIABLES
    if settings.file:
        text = settings.text
        if name == "opencode":  # which asks before it edits
            text = json.dumps(json.loads(text) | {"permission": "allow"})
            variables["OPENCODE_CONFIG"] = str(home / settings.file)
        (home / settings.file).parent.mkdir(parents=True)
        (home / settings.file).write_text(text)
    return variables


AIDER = "aider --model openai/default_model --edit-format diff --file notes.txt --no-git --yes-always"
AIDER += " --analytics-disable --no-check-update --no-show-model-warnings --no-show-release-notes --no-pretty --message"
CODEX = "codex exec --profile mlx-mtp --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
CLIENTS = {
    "claude": Client("@anthropic-ai/claude-code", "2.1.197", "claude --allowedTools Read,Edit,Bash -p"),
    "codex": Client("@openai/codex", "0.169.0", CODEX),
    "opencode": Client("opencode-ai", "1.18.33", "opencode run -m mlx-mtp/default_model"),
    "aider": Client("aider_chat", "0.86.2", AIDER, has_tools=False),
}


def try_client(name: str, agents: Path, folder: Path) -> list[str]:
    """Run a client in an empty folder -> what is wrong with what it did."""
    client, home, work = CLIENTS[name], folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    (work / "notes.txt").write_text("one\ntwo\n")
    model = str(make_model(folder / "model"))
    os.environ["AGENT_FOLDER"] = str(work)  # for the script
    path = f"{agents / 'node_modules' / '.bin'}:{agents / 'aider' / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    command, null, pipe = ["timeout", str(LIMIT), *client.command.split(), ASK], subprocess.DEVNULL, subprocess.PIPE
    with serve(folder / "server.log", "--mtp", "--model", model, module="tests.support.scripted_agent") as server:
        env = {"PATH": path, "HOME": str(home), **configure(name, home, server.url)}
        streams = {"stdin": null, "stdout": pipe, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, cwd=work, env=env, text=True, **streams)
    (folder / "client.log").write_text(done.stdout)
    wrong = [] if done.returncode == 0 else [f"it ends with status {done.returncode}"]
    for name, want in (("notes.txt", "one\nthree\n"), ("count.txt", "2 notes.txt\n")):
        got = (work / name).read_text() if (work / name).exists() else None
        wrong += [f"{name} is {got!r}"] * (got != want and (client.has_tools or name == "notes.txt"))
    wrong += ["it does not say the last words"] * ("It is done." not in done.stdout)
    wrong += ["a traceback of the server"] * ("Traceback" in (folder / "server.log").read_text())
    return wrong


def check_version(client: Client, agents: Path) -> None:
    """Exit where the client is not installed, or in another version."""
    file = agents / "node_modules" / client.package / "package.json"
    found = json.loads(file.read_text())["version"] if file.exists() else "none"
    for folder in agents.glob(f"aider/lib/*/site-packages/{client.package}-*.dist-info"):
        found = folder.stem.rpartition("-")[2]
    if found != client.version:
        sys.exit(f"{client.package} must be {client.version}, not {found}: see the docstring of scripts/try_agents.py.")


def main() -> None:
    inside, drifts = "The network has nothing but the loopback device.", "The tags of the model's calls drift."
    parser = script_parser(__doc__, inside=(False, inside), drifts=(False, drifts))
    parser.add_argument("agents", type=Path, help="The folder that npm has installed them in.")
    parser.add_argument("--client", action="append", choices=CLIENTS, help="Try this one; repeatable (default: all).")
    args = parser.parse_args()
    names = args.client or [*CLIENTS]
    for name in names:
        check_version(CLIENTS[name], args.agents)
    if not args.inside:
        again = [sys.executable, "-m", "scripts.try_agents", *sys.argv[1:], "--inside"]
        os.execvp("unshare", ["unshare", "-n", "bash", "-c", 'ip link set lo up; exec "$@"', "bash", *again])
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
