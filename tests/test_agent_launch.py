"""``mlx_mtp launch``: a client in the foreground and its server, with a script in place of the client, which exits with 3."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mlx_mtp import launch
from mlx_mtp.checkpoint import DEMO
from mlx_mtp.files import SERVERS, cache_file, keep, kept, read_own
from mlx_mtp.server.agents import CLIENTS
from mlx_mtp.server.options import flags_of
from tests.support.commands import refusal, run_command
from tests.support.models import TRAINED
from tests.support.server_process import serve_here

CLIENT = f"""#!{sys.executable} -S
import json, os, sys, urllib.request
env = os.environ
if sys.argv[1:] == ["--version"]:
    print("1.2.3 (a client)")
    sys.exit()
body = {{"model": env["ANTHROPIC_MODEL"], "max_tokens": 2, "messages": [{{"role": "user", "content": "a"}}]}}
headers = {{"Authorization": "Bearer " + env["ANTHROPIC_AUTH_TOKEN"], "Content-Type": "application/json"}}
url = env["ANTHROPIC_BASE_URL"]
request = urllib.request.Request(url + "/v1/messages", json.dumps(body).encode(), headers)
answered = urllib.request.urlopen(request).status
context = int(env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"])
option, file, *argv = sys.argv[1:]
with open(file) as f:
    own = json.load(f)
said = dict(url=url, argv=argv, key=headers["Authorization"], answered=answered, context=context, own=own, env=dict(env))
said |= dict(file=file, mode=os.stat(os.path.dirname(file)).st_mode & 0o777)
print(json.dumps(said), flush=True)
if "wait" in sys.argv:
    sys.stdin.readline()
if "kill" in sys.argv:
    os.kill(int(sys.argv[-1]), 9)
sys.exit(3)
"""


@pytest.fixture(autouse=True)
def _client(tmp_path, monkeypatch):
    """It is installed, and HOME is empty, also afterwards."""
    file = tmp_path / "bin" / "claude"
    file.parent.mkdir()
    file.write_text(CLIENT)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:/usr/bin:/bin")
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    handlers = {number: signal.getsignal(number) for number in (2, 3, 15, 20, 1, signal.SIGCHLD)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert [*home.iterdir()] == []


def run(capfd, *words) -> tuple[int, dict, str]:
    """The command in this process -> its exit status, what the client has printed, and stderr."""
    status, out, err = run_command(launch.main, capfd, "claude", *words)
    return status, json.loads(out) if out else {}, err


COMMAND = [sys.executable, "-m", "mlx_mtp", "launch", "claude", "--model", TRAINED]


def launched() -> tuple[subprocess.Popen, dict]:
    """The command in a process of its own, whose client waits for a line -> it, and what the client has printed."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([*COMMAND, "--", "wait"], text=True, **pipes)
    return process, json.loads(process.stdout.readline())


def server_at(url) -> int:
    (pid,) = [pid for pid, entry in read_own(cache_file(SERVERS)).items() if entry["url"] == url]
    return int(pid)


def test_clients_share_a_server_which_ends_with_the_last():
    """Also where the last one is killed."""
    (first, said), (second, again) = launched(), launched()
    assert (said["url"], said["key"]) == (again["url"], again["key"])
    assert (said["answered"], said["argv"], said["context"]) == (200, ["wait"], 8192)
    pid = server_at(said["url"])
    _, err = first.communicate("\n", timeout=60)
    assert (first.returncode, err.count("\n"), "Starting a server, whose log is " in err) == (3, 1, True)
    log, deadline = Path(err.split()[-1]), time.monotonic() + 60
    time.sleep(0.5)
    assert psutil.pid_exists(pid)
    second.kill()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server goes on"
        time.sleep(0.05)
    assert '"POST /v1/messages" 200' in log.read_text()
    assert str(pid) not in read_own(cache_file(SERVERS))
    second.communicate("\n", timeout=60)


def test_a_server_is_kept_and_its_death_is_told(capfd):
    done = subprocess.run([*COMMAND, "--keep", "--", "a", "--", "-b c"], capture_output=True, text=True)
    said = json.loads(done.stdout)
    pid = server_at(said["url"])
    assert (done.returncode, said["argv"]) == (3, ["a", "--", "-b c"])
    assert done.stderr.endswith(f"The server stays at {said['url']}: `kill {pid}` ends it.\n")
    status, again, err = run(capfd, "--model", TRAINED, "--", "kill", str(pid))
    assert (status, again["url"], again["key"]) == (3, said["url"], said["key"])
    used, death, *log = err.splitlines()
    assert used == f"[INFO] Using the server at {said['url']}"
    assert death == f"[INFO] The server at {said['url']} has died."
    assert any('"POST /v1/messages" 200' in line for line in log)  # the first client's: the second's may be lost


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One of the user's, in this process."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "key").write_text("sesame")
    flags = ["--model", TRAINED, "--api-key-file", str(folder / "key"), "--max-tokens", "9"]
    with serve_here(folder / "log", *flags) as server:
        options, started = server.engine.frontend.options, psutil.Process().create_time()
        entry = {"url": f"http://127.0.0.1:{server.port}", "flags": flags_of(options), "started": started}
        keep(SERVERS, str(os.getpid()), entry)
        yield server
        keep(SERVERS, str(os.getpid()), None)


def test_a_server_of_the_user_is_found_by_its_model_and_its_flags(server, monkeypatch, capfd):
    found = f"http://127.0.0.1:{server.port}"
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("another one is started"))
    killed = {"url": "http://127.0.0.1:9", "flags": {"model": os.path.realpath(TRAINED)}}
    keep(SERVERS, "999999999", killed)
    for flags in ([], ["--max-tokens", "9"]):
        status, said, err = run(capfd, "--model", TRAINED, *flags)
        assert (status, said["url"], said["key"]) == (3, found, "Bearer sesame")
        assert err == f"[INFO] Using the server at {found}\n"
    monkeypatch.setattr(launch, "start", lambda *_: sys.exit(9))
    for flags in ([TRAINED, "--max-tokens", "8"], [str(DEMO)], [TRAINED, "--api-key", "b"]):
        assert run(capfd, "--model", *flags)[0] == 9
    assert {"999999999", str(os.getpid())} & read_own(cache_file(SERVERS)).keys() == {str(os.getpid())}


@pytest.mark.parametrize("wrong", ["started", "instance"])
def test_a_record_is_of_the_process_and_of_the_server_at_its_url(server, monkeypatch, capfd, wrong):
    """Not of a process that had its number before a reboot, nor of a server that had its port; the first goes."""
    entry = kept(SERVERS, str(os.getpid()))
    old = entry | {"started": entry["started"] - 1} if wrong == "started" else entry
    keep(
        SERVERS, str(os.getpid()), old | {"flags": entry["flags"] | ({"instance": "b"} if wrong == "instance" else {})}
    )
    stranger = SimpleNamespace(pid=os.getpid(), poll=lambda: 9)  # has ended, and its number is that of the record
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *_, **__: stranger)
    assert run(capfd, "--model", TRAINED)[0] == (9 if wrong == "started" else 2)
    assert (kept(SERVERS, str(os.getpid())) is None) == (wrong == "started")
    keep(SERVERS, str(os.getpid()), entry)


def test_what_the_server_cannot_run_is_its_own_sentence(capfd):
    status, said, err = run(capfd, "--model", TRAINED, "--max-memory", "1MB")
    assert (status, said) == (2, {})
    assert err.splitlines()[-1].startswith(f"mlx_mtp server: error: {TRAINED} does not fit: it needs ")


CLIENT_IN_TERMINAL = """
import os, signal, sys
interrupts = []
say = lambda line: os.write(1, f"{line}\\n".encode())  # a signal within print cannot print
signal.signal(signal.SIGINT, lambda *_: (interrupts.append(1), say("interrupted")))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(len(interrupts)))
signal.signal(signal.SIGWINCH, lambda *_: say("{} {}".format(*os.get_terminal_size())))
say(f"begun {os.getpid()}")
while True:
    signal.sigtimedwait([], 0.1)  # a signal that comes before a wait without an end would not end it
"""


def test_the_client_has_the_terminal():
    """Ctrl-C and the size of the window are its own, the command stops and goes on with it, and SIGTERM is passed on."""
    command = [sys.executable, "-S", "-c", CLIENT_IN_TERMINAL]
    run = f"sys.exit(run(sys.executable, {command!r}, dict(os.environ)))"
    program = f"import os, sys; from mlx_mtp.launch import run; {run}"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", program])
    with open(terminal, "rb", buffering=0) as out:
        client = int(out.readline().split()[1])
        termios.tcsetwinsize(terminal, (33, 99))
        assert out.readline().split() == [b"99", b"33"]
        for _ in range(2):
            os.write(terminal, b"\x03")
            assert out.readline().endswith(b"interrupted\r\n")
        os.kill(client, signal.SIGSTOP)  # as the client does after Ctrl-Z
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        os.killpg(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2


def test_what_the_environment_says_of_vendors_and_proxies_is_not_the_clients(server, monkeypatch, capfd):
    """Downloads keep the proxy. The settings that outrank files are in a file that only the user can read, and goes."""
    monkeypatch.setenv("CLAUDE_CODE_USE_BEDROCK", "1")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "corp.example")
    said = run(capfd, "--model", TRAINED)[1]
    assert "CLAUDE_CODE_USE_BEDROCK" not in said["env"]
    assert said["env"]["HTTPS_PROXY"] == "http://127.0.0.1:9"
    assert said["env"]["NO_PROXY"] == said["env"]["no_proxy"] == "corp.example,127.0.0.1,localhost,::1"
    assert (said["mode"], Path(said["file"]).exists()) == (0o700, False)
    told = said["own"]["env"]
    assert (told["ANTHROPIC_BASE_URL"], told["CLAUDE_CODE_USE_BEDROCK"]) == (said["url"], "")
    assert told["NO_PROXY"] == said["env"]["NO_PROXY"]


def test_clients_are_listed_and_a_missing_one_is_named(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    rows = {row.split()[0]: row.split(maxsplit=4)[1:] for row in run_command(launch.main, capsys)[1].splitlines()}
    assert rows.keys() == {"client", *CLIENTS} - {"zed"}
    assert rows["claude"] == ["1.2.3", "18,700", "tokens", shutil.which("claude")]
    assert rows["codex"] == ["-", "8,300", "tokens", "npm install -g @openai/codex"]
    for words, message in (
        (["codex"], "codex is not installed: npm install -g @openai/codex"),
        (["claude", "-p", "a"], "unrecognized arguments: -p a (The client's own arguments follow --.)"),
        (["claude", "--max-tokens", "0"], "--max-tokens must be 1 or more, or -1 for no limit, not 0."),
    ):
        assert refusal(launch.main, capsys, *words) == f"mlx_mtp launch: error: {message}\n"
