"""A server on a free port of loopback, in one process or in several ranks."""

import http.client
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_mtp.server.options import check_model
from mlx_mtp.server.serve import Server as HTTPServer
from mlx_mtp.server.serve import listen

from .engine import Engine
from .launch import ROOT, connected, free_ports


@dataclass
class Server:
    processes: list[subprocess.Popen]  # by rank; none where it runs in this one
    port: int
    log: Path
    engine: Engine | None = None  # where it runs in this process

    @property
    def process(self) -> subprocess.Popen:
        """The one that answers."""
        return self.processes[0]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def request(self, path: str, body=None, headers=None, method=None, timeout=60) -> tuple[int, Any]:
        """(status, content); a body that is a dictionary is sent as JSON, and content that is JSON is parsed."""
        raw = json.dumps(body).encode() if isinstance(body, dict) else body
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as connection:
            connection.request(method or ("GET" if raw is None else "POST"), path, raw, headers or {})
            response = connection.getresponse()
            text = response.read().decode()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    def stream(self, path: str, body: dict) -> Generator[dict[str, Any], None, None]:
        """The events of a stream as they come; closing the iterator hangs up.

        Raises:
            RuntimeError: The request is refused, or the stream breaks off.
        """
        # Much may run beside it.
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=3600)) as connection:
            connection.request("POST", path, json.dumps(body | {"stream": True}))
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {response.read().decode()}")
            for line in response:
                if line == b"data: [DONE]\n":
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
            raise RuntimeError("The stream breaks off.")

    def complete(self, prompt: str, max_tokens: int, **body: Any) -> dict[str, Any]:
        """The answer to a request for a completion."""
        status, content = self.request("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **body})
        assert status == 200, content
        return content

    def begin(self, prompt: str, max_tokens: int = 5000, stream: bool = True) -> socket.socket:
        """Send a request -> the connection, once something is being generated."""
        raw = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw)
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(head + raw)
        deadline = time.monotonic() + 60
        while self.metrics()["mlx_mtp_requests_in_flight"] == 0:
            assert time.monotonic() < deadline
        return connection

    def resources(self) -> dict[str, int]:
        """The numbers of /proc/PID/status: VmRSS and the like in KB, Threads."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        fields = (line.split() for line in lines if line.startswith(("Vm", "Threads")))
        return {name.removesuffix(":"): int(n) for name, n, *_ in fields}

    def talk(self, raw: bytes, is_complete: bool = False) -> bytes:
        """Send bytes -> all bytes that come back.

        Unless they are a complete request, the connection is then closed for sending, as by a client that hangs up.
        """
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as s:
            s.sendall(raw)
            if not is_complete:
                with suppress(OSError):  # the server may have closed the connection already
                    s.shutdown(socket.SHUT_WR)
            return s.makefile("rb").read()

    def metrics(self) -> dict[str, float]:
        _, text = self.request("/metrics")
        return {name: float(value) for name, value in (line.split(" ") for line in text.splitlines() if line[0] != "#")}

    def until_idle(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while self.metrics()["mlx_mtp_requests_in_flight"] > 0:
            assert time.monotonic() < deadline, "requests are still being generated"
            time.sleep(0.02)

    def stop(self, how: int = signal.SIGINT) -> int:
        """Send a signal -> the exit status."""
        self.process.send_signal(how)
        return self.process.wait(60)

    def statuses(self) -> list[int]:
        """Wait until all ranks have ended -> their exit statuses."""
        return [process.wait(60) for process in self.processes]


@contextmanager
def serve(
    log: Path, *flags: str, module: str = "mlx_mtp.server", ranks: int = 1, src: Path | None = None
) -> Iterator[Server]:
    """
    Args:
        ranks (int): In how many processes, connected by MLX's ring as ``mlx.launch`` connects them.
        src (Path, optional): The source of another version to run.
    """
    # mlx-lm's server logs the port that it was given.
    port = free_ports(1)[0] if "mlx_lm" in module else 0
    command = [sys.executable, "-m", module, "--port", str(port), *flags]
    envs: list[dict[str, str]] = [{} if src is None else {"PYTHONPATH": str(src)}]
    if ranks > 1:
        envs = connected(ranks, log.with_name("hosts"))
    with open(log, "w") as file:
        options = {"cwd": ROOT, "stdout": file, "stderr": file, "preexec_fn": _heed_signals}
        processes = [
            subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1", **env}, **options) for env in envs
        ]
    try:
        for _ in range(1200):
            if match := re.search(r"on port (\d+)\.\.\.", log.read_text()):
                break
            assert all(process.poll() is None for process in processes), log.read_text()
            time.sleep(0.1)
        yield Server(processes, int(match[1]), log)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _heed_signals() -> None:
    """A script starts its background jobs with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def serve_here(log: Path, *flags: str) -> Iterator[Server]:
    """As ``serve``, in threads of this process, which has imported everything: where no test asks anything of the process.

    A request may say what the model says, see ``scripted_server``.
    """
    root, file = logging.root, logging.FileHandler(log)
    level = root.level
    root.addHandler(file)
    root.setLevel("INFO")
    try:
        with Engine("--port", "0", *flags) as engine:
            options = engine.frontend.options
            check_model(options, engine.frontend.models)
            server = HTTPServer(options, engine.engine)
            server.capture_signals = nullcontext  # those are the main thread's
            with listen(options.host, options.port) as sockets:
                thread = threading.Thread(target=server.run, args=(sockets,))
                thread.start()
                try:
                    yield Server([], sockets[0].getsockname()[1], log, engine)
                finally:
                    server.should_exit = True
                    thread.join()
    finally:
        root.setLevel(level)
        root.removeHandler(file)
        file.close()


def server_of(flags: Callable[[Path], list[str]]) -> Any:
    """A fixture of a module: a server with the flags that are made in a folder, which logs no traceback."""
    import pytest  # processes do without

    @pytest.fixture(scope="module")
    def server(tmp_path_factory: Any) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("server")
        with serve_here(folder / "log", *flags(folder)) as s:
            yield s
            text = s.log.read_text()
            assert "Traceback" not in text, text

    return server
