"""Run a program in several processes, as ``mlx.launch`` does, and collect what each of them reports."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = Path(sys.executable).parent / "mlx.launch"
_ports = count(31000 + os.getpid() % 1000 * 8, 8)  # the next launch's first one


def run(n: int, *program: str, timeout: float = 120, stdin: str = "") -> subprocess.CompletedProcess:
    """Run a program in ``n`` processes; after ``timeout`` seconds all of them are killed.

    ``mlx.launch`` passes ``stdin`` to each, and never ends it. Its own exit status is always 0.
    """
    local = ["-n", str(n), "--backend", "ring", "--starting-port", str(next(_ports))]
    read_end, open_end = os.pipe()  # it stays open: mlx.launch spins once its input has ended
    os.write(open_end, stdin.encode())
    options = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "text": True, "start_new_session": True}
    options |= {"stdin": read_end, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([str(LAUNCH), *local, "--", *program], **options)
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

    A module reports by ``report(name, value)``. ``mlx.launch`` itself would take a quarter of a core.
    """
    command = [sys.executable, "-m", f"tests.support.ranks.{module}", *args]
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/out", "a+") as out, ExitStack() as stack:
        processes = []
        for env in connected(n, Path(folder) / "hosts"):
            options = {"cwd": ROOT, "env": os.environ | env, "stdout": out, "stderr": out}
            processes.append(stack.enter_context(subprocess.Popen(command, **options)))
            stack.callback(processes[-1].kill)
        statuses = [process.wait(deadline - time.monotonic()) for process in processes]
        out.seek(0)
        text = out.read()
    assert statuses == [0] * n, text
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [{line["name"]: line["value"] for line in lines if line["rank"] == r} for r in range(n)]


def connected(n: int, hosts: Path) -> list[dict[str, str]]:
    """What ``n`` processes need in their environments so that MLX's ring connects them, as ``mlx.launch`` does.

    Args:
        n (int): The number of processes.
        hosts (Path): The file to write for them.
    """
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(n)]))
    return [{"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(r), "OMP_NUM_THREADS": "1"} for r in range(n)]


def free_ports(n: int) -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [s.getsockname()[1] for s in servers]


def report(name: str, value) -> None:
    sys.stdout.write(json.dumps({"rank": int(os.environ["MLX_RANK"]), "name": name, "value": value}) + "\n")
    sys.stdout.flush()
