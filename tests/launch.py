"""Run a script in several processes, as ``mlx.launch`` does, and collect what each of them reports."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

TESTS = Path(__file__).parent
LAUNCH = Path(sys.executable).parent / "mlx.launch"
_ports = count(31000 + os.getpid() % 1000 * 8, 8)  # the next launch's first one


def command(n: int, *program: str) -> list[str]:
    """The command line that runs a program in ``n`` processes of this machine."""
    return [str(LAUNCH), "-n", str(n), "--backend", "ring", "--starting-port", str(next(_ports)), "--", *program]


def run(n: int, *program: str, timeout: float = 120, stdin: str | None = None) -> subprocess.CompletedProcess:
    """Run a program in ``n`` processes; after ``timeout`` seconds all of them are killed."""
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command(n, *program), env=env, text=True, start_new_session=True, **pipes)
    try:
        out, err = process.communicate(stdin, timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def launch(n: int, script: str, *args: str, timeout: float = 120) -> list[dict]:
    """Run a script of ``tests/ranks`` in ``n`` processes -> what each has reported, by rank.

    A script reports by ``report(name, value)``.
    """
    done = run(n, sys.executable, str(TESTS / "ranks" / script), *args, timeout=timeout)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout + done.stderr
    return [{line["name"]: line["value"] for line in lines if line["rank"] == r} for r in range(n)]


def report(name: str, value) -> None:
    sys.stdout.write(json.dumps({"rank": int(os.environ["MLX_RANK"]), "name": name, "value": value}) + "\n")
    sys.stdout.flush()
