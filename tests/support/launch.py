"""Run a program in several processes, as ``mlx.launch`` does, and collect what each of them reports."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = Path(sys.executable).parent / "mlx.launch"
_ports = count(31000 + os.getpid() % 1000 * 8, 8)  # the next launch's first one


def command(n: int, *program: str) -> list[str]:
    """The command line that runs a program in ``n`` processes of this machine."""
    return [str(LAUNCH), "-n", str(n), "--backend", "ring", "--starting-port", str(next(_ports)), "--", *program]


def run(n: int, *program: str, timeout: float = 120, stdin: str = "") -> subprocess.CompletedProcess:
    """Run a program in ``n`` processes; after ``timeout`` seconds all of them are killed.

    ``mlx.launch`` passes ``stdin`` to each, and never ends it. Its own exit status is always 0.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    read_end, open_end = os.pipe()  # it stays open: mlx.launch spins once its input has ended
    os.write(open_end, stdin.encode())
    pipes = {"stdin": read_end, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options = {"cwd": ROOT, "env": env, "text": True, "start_new_session": True}
    process = subprocess.Popen(command(n, *program), **options, **pipes)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        os.close(read_end)
        os.close(open_end)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def launch(n: int, module: str, *args: str, timeout: float = 120) -> list[dict]:
    """Run a module of ``tests/support/ranks`` in ``n`` processes -> what each has reported, by rank.

    A module reports by ``report(name, value)``.
    """
    done = run(n, sys.executable, "-m", f"tests.support.ranks.{module}", *args, timeout=timeout)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert "exited with code" not in done.stderr, done.stdout + done.stderr
    return [{line["name"]: line["value"] for line in lines if line["rank"] == r} for r in range(n)]


def report(name: str, value) -> None:
    sys.stdout.write(json.dumps({"rank": int(os.environ["MLX_RANK"]), "name": name, "value": value}) + "\n")
    sys.stdout.flush()
