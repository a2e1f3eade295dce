"""Try the real coding agents: each reads a file, edits it, runs a command and ends, by a scripted model. Aider only edits.

    npm install --prefix /tmp/agents @anthropic-ai/claude-code@2.1.197 @openai/codex@0.169.0 opencode-ai@1.18.33
    python -m venv /tmp/agents/aider && /tmp/agents/aider/bin/pip install aider-chat==0.86.2
    python -m scripts.try_agents /tmp/agents

npm must be allowed to run the install script of opencode (``npm install --allow-scripts``, or ``node postinstall.mjs`` in its
folder). ``mlx_mtp launch`` starts each client in a network namespace that has nothing but the loopback device (``unshare -n``,
as root), with an empty environment and a HOME of its own, and finds the server of a tiny model: nothing leaves the machine.
What the client left on disk must be right, it must say the model's last words, and the server's log may have no traceback.
With ``--drifts``, the model leaves tags of its calls out. Takes a minute or two for each client.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.shared import run_without_network, script_parser
from tests.support.server_process import serve
from tests.support.tool_texts import make_model

ROOT = Path(__file__).parents[1]
ASK = "Make three of two in notes.txt, then count its lines."
LIMIT = 900  # seconds for a client, on a busy machine
# What a run without a person needs, beside the settings that users have.
QUIET_VARIABLES = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@dataclass(frozen=True)
class Client:
    """A coding agent."""

    package: str  # npm's name, or pip's
    version: str  # the one that was tried
    arguments: str  # before the question
    has_tools: bool = True  # whether it runs commands


AIDER = "--edit-format diff --file notes.txt --no-git --yes-always --analytics-disable --no-check-update"
AIDER += " --no-show-model-warnings --no-show-release-notes --no-pretty --message"
CODEX = "exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
CLIENTS = {
    "claude": Client("@anthropic-ai/claude-code", "2.1.197", "--allowedTools Read,Edit,Bash -p"),
    "codex": Client("@openai/codex", "0.169.0", CODEX),
    "opencode": Client("opencode-ai", "1.18.33", "run"),
    "aider": Client("aider_chat", "0.86.2", AIDER, has_tools=False),
}
OPENCODE = '{"permission": "allow"}'  # the user's own config: otherwise opencode asks before it edits


def try_client(name: str, agents: Path, folder: Path) -> list[str]:
    """Run a client in an empty folder -> what is wrong with what it did."""
    client, home, work = CLIENTS[name], folder / "home", folder / "work"
    config = home / ".config" / "opencode" / "opencode.json"
    config.parent.mkdir(parents=True)
    config.write_text(OPENCODE)
    work.mkdir()
    (folder / "key").write_text("sesame")
    (work / "notes.txt").write_text("one\ntwo\n")
    model = str(make_model(folder / "model"))
    os.environ["AGENT_FOLDER"] = str(work)  # for the script
    path = f"{agents / 'node_modules' / '.bin'}:{agents / 'aider' / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # where the server is found
    env = {"PATH": path, "HOME": str(home), "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"], **QUIET_VARIABLES}
    launch = [sys.executable, "-P", "-m", "mlx_mtp", "launch", name, "--model", model]
    command = ["timeout", str(LIMIT), *launch, "--", *client.arguments.split(), ASK]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    flags = ["--mtp", "--model", model, "--api-key-file", str(folder / "key")]
    with serve(folder / "server.log", *flags, module="scripts.scripted_agent"):
        done = subprocess.run(command, cwd=work, env=env, text=True, **streams)
    (folder / "client.log").write_text(done.stdout)
    wrong = [] if done.returncode == 0 else [f"it ends with status {done.returncode}"]
    for name, want in (("notes.txt", "one\nthree\n"), ("count.txt", "2 notes.txt\n")):
        got = (work / name).read_text() if (work / name).exists() else None
        wrong += [f"{name} is {got!r}"] * (got != want and (client.has_tools or name == "notes.txt"))
    wrong += ["it does not say the last words"] * ("It is done." not in done.stdout)
    wrong += ["it does not use the server that runs"] * ("Using the server at " not in done.stdout)
    wrong += ["its config is changed"] * ("mlx" in config.read_text())  # opencode itself adds its schema
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
