"""Try the libraries that programs ask models with, of JavaScript and Python, by a model that does what it is told.

    python -m scripts.try_sdks /tmp/sdks

npm and pip, in an environment of its own, install them in the folder, at the versions below. Then ``clients.mjs`` and
``clients.py`` run in a network namespace that has nothing but the loopback device (``unshare -n``, as root), with an empty
environment and a HOME of their own: whole and streamed answers, three calls of a tool, ten schemas, an answer that is given up,
errors, and a second turn that needs the first. The server's log may have no traceback, and an answer that is given up must
end. Takes four minutes.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from scripts.shared import run_without_network, script_parser
from tests.support.server_process import serve
from tests.support.tool_texts import make_model

HERE = Path(__file__).parent
LIMIT = 900  # seconds for the libraries of a language, on a busy machine
KEY = "sesame"
CONTEXT = 4096  # tokens: of the texts of the programs, some are longer
NPM = (
    "openai@7.59.0 @openai/agents@0.20.0 @anthropic-ai/sdk@1.14.0 ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/anthropic@4.0.105 "
    "@ai-sdk/openai-compatible@3.0.92 @langchain/openai@1.6.0 @langchain/core@1.4.0 zod@4.6.7"
)
PIP = (
    "langchain-openai==1.7.4 pydantic-ai-slim[openai,anthropic]==2.38.0 instructor==1.17.0 litellm==1.110.2 "
    "openai-agents==0.24.0 openai==3.3.0 anthropic==1.17.0"
)


def install(sdks: Path) -> None:
    """Install the libraries, unless the folder has them."""
    mark, wanted = sdks / "installed.txt", f"{NPM} {PIP}"
    if mark.exists() and mark.read_text() == wanted:
        return
    sdks.mkdir(exist_ok=True)
    venv, options = sdks / "venv", {"check": True, "stdout": subprocess.DEVNULL}
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error", "--prefix", sdks, *NPM.split()], **options
    )
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], **options)
    subprocess.run([venv / "bin" / "python", "-m", "pip", "install", *PIP.split()], **options)
    mark.write_text(wanted)


def try_language(command: list[str | Path], own: Path) -> tuple[Counter[str], list[str]]:
    """Run a program of checks -> the number of checks of each library, and what is wrong."""
    env = {"HOME": str(own), "PATH": "/usr/local/bin:/usr/bin:/bin", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with open(own / f"{Path(command[1]).name}.log", "w") as log:
        options = {"cwd": own, "env": env, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        done = subprocess.run(["timeout", str(LIMIT), *command], **options)
        log.write(done.stdout)
    checks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    wrong = [f"{library}, {name}: {why}" for library, name, why in checks if why]
    wrong += [f"{command[1]} ends with status {done.returncode}"] * (done.returncode != 0)
    return Counter(library for library, _, _ in checks), wrong


def main() -> None:
    parser = script_parser(__doc__, inside=(False, "The network has nothing but the loopback device."))
    parser.add_argument("sdks", type=Path, help="The folder of the libraries.")
    parser.add_argument("--client", action="append", default=[], help="Try this library; repeatable (default: all).")
    args = parser.parse_args()
    sdks, own = args.sdks.resolve(), Path(tempfile.mkdtemp(prefix="sdks-"))
    if not args.inside:
        install(sdks)
        run_without_network("scripts.try_sdks")
    shutil.copy(HERE / "clients.mjs", sdks)  # where node finds the libraries
    file = make_model(own / "model") / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["max_position_embeddings"] = CONTEXT
    file.write_text(json.dumps(config))
    (own / "key").write_text(KEY)
    node, python = Path(shutil.which("node") or "node"), sdks / "venv" / "bin" / "python"
    log, n_checks, wrong = own / "server.log", Counter[str](), list[str]()
    flags = "--model", str(file.parent), "--api-key-file", str(own / "key")
    with serve(log, *flags, module="scripts.try_sdks.model") as server:
        for program in ([node, sdks / "clients.mjs"], [python, HERE / "clients.py"]):
            of_program = try_language([*program, server.url, KEY, *args.client], own)
            n_checks, wrong = n_checks + of_program[0], wrong + of_program[1]
    told = log.read_text()
    wrong += ["a traceback of the server"] * ("Traceback" in told)
    wrong += ["no library has such a name"] * (not n_checks)
    n_tokens = max(map(int, re.findall(r"(\d+) output tokens", told)), default=0)
    wrong += [f"an answer that was given up goes on to {n_tokens} tokens"] * (n_tokens > 900)
    print("\n".join([*wrong, *(f"{library}: {n} checks" for library, n in n_checks.items())]))
    print(f"{sum(n_checks.values())} checks, {len(wrong)} wrong ({own})")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
