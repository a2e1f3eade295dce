"""``mlx_mtp launch``: a coding agent in the foreground, with a server that runs already or is started for it.

A server that is started has a lease, a file with its API key. Each of its clients locks it (shared), and the server ends once
it can lock it alone: the system releases the locks of a process however it ends.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from http.client import HTTPException
from itertools import count
from pathlib import Path
from secrets import token_urlsafe
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, NamedTuple
from urllib.request import ProxyHandler, Request, build_opener

import psutil
from huggingface_hub.utils import WeakFileLock

from .cli.display import one_line_errors, say, table
from .cli.parser import parse
from .errors import MTPError, require
from .files import SERVERS, cache_file, keep, kept, make_folder, read_own
from .server.agents import CLIENTS, settings_of

NAME = "mlx_mtp launch"
LIMIT = 30  # seconds for a client to print its version, or for a server to answer
SHOWN = 10  # lines of the log of a server that has died
KEEP = b"\nkeep"  # behind the key in a lease
FOLDER = cache_file("servers").resolve()  # of leases and logs
LOCAL = build_opener(ProxyHandler({}))
AGENTS = {name: client for name, client in CLIENTS.items() if client.install}


class Server(NamedTuple):
    pid: int
    entry: dict[str, Any]  # in the file of all servers
    key: str | None
    context: int | None  # the tokens of the longest text
    lease: Path | None  # of one that was started for clients


def make_parser() -> argparse.ArgumentParser:
    require("server", NAME)
    from .server.command_line import add_flags

    parser = argparse.ArgumentParser(
        prog=NAME,
        description="Start a coding agent. It uses a server that runs with this model and these flags, or one is started.",
    )
    add_flags(parser)
    parser.add_argument("client", choices=AGENTS, help="Without it, the clients and their versions are listed.")
    parser.add_argument("--keep", action="store_true", help="Keep the server when its last client ends.")
    parser.usage = "%(prog)s CLIENT [the server's flags] [-- the client's arguments]"
    return parser


def describe(name: str) -> list[str]:
    """A row of the list: the client's version, the tokens of its first request, and its place or how to install it."""
    client, version = AGENTS[name], "-"
    if (path := shutil.which(name)) is not None:
        version = "?"
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=LIMIT)
            if (found := re.search(r"\d+(\.\d+)+", done.stdout)) is not None:
                version = found[0]
    return [name, version, f"{client.n_tokens:,} tokens", path or client.install]


@one_line_errors(NAME)
def main() -> None:
    """Run a client with a server for the flags, and exit with the client's status. Without words, list the clients."""
    if not (words := sys.argv[1:]):
        with ThreadPoolExecutor() as pool:
            rows = [["client", "version", "first request", "command"], *pool.map(describe, AGENTS)]
        return print("\n".join(table(rows)))
    end = words.index("--") if "--" in words else len(words)
    words, arguments, parser = words[:end], words[end + 1 :], make_parser()
    try:
        args = parse(parser, words)
    except MTPError as e:
        raise MTPError(f"{e} (The client's own arguments follow --.)") from e
    if (path := shutil.which(args.client)) is None:
        raise MTPError(f"{args.client} is not installed: {AGENTS[args.client].install}")
    from .server.options import address_of, check, flags_of

    options = check(args)
    defaults = flags_of(parser.parse_args([args.client])) | {"keep": args.keep}
    given = {name: value for name, value in flags_of(args).items() if name == "model" or value != defaults[name]}
    words.remove(args.client)
    make_folder(FOLDER, "the cache folder")
    with WeakFileLock(FOLDER / ".lock"):  # clients that begin at once share a server
        server = find(given, options.api_key) or start([word for word in words if word != "--keep"], options.api_key)
        if args.keep and server.lease is not None:
            server.lease.write_bytes(f"{server.key}".encode() + KEEP)
    options.api_key = server.key
    url = server.entry["url"]
    with TemporaryDirectory(prefix="mlx_mtp-") as folder:  # only its user can read it
        client = AGENTS[args.client]
        variables, own, text = settings_of(client, address_of(options, url, server.context, Path(folder)))
        if client.file:
            file = Path(folder, client.file)
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        env = {name: value for name, value in os.environ.items() if name not in client.unset} | variables
        status = run(path, [args.client, *own, *arguments], env)
    if connect(server.pid, server.entry, server.key) is None:
        log = "" if server.lease is None else server.lease.with_suffix(".log").read_text(errors="replace")
        say("\n".join([f"The server at {url} has died.", *log.splitlines()[-SHOWN:]]), sys.stderr)
    elif args.keep:
        say(f"The server stays at {url}: `kill {server.pid}` ends it.", sys.stderr)
    sys.exit(status)


def find(given: dict[str, Any], key: str | None) -> Server | None:
    """A server of this user with these flags."""
    for pid, entry in read_own(cache_file(SERVERS)).items():
        is_same = all(entry["flags"].get(name) == value for name, value in given.items())
        if not is_of(int(pid), entry):
            keep(SERVERS, pid, None)
        elif is_same and (server := connect(int(pid), entry, key)) is not None:
            say(f"Using the server at {entry['url']}", sys.stderr)
            return server
    return None


def is_of(pid: int, entry: dict[str, Any]) -> bool:
    """Whether a record is of the process that has its number now, and not of one before it."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).create_time() == entry.get("started"))
    return False


def connect(pid: int, entry: dict[str, Any], key: str | None) -> Server | None:
    """A server, whose lease this process now holds; ``None`` if it is ending, does not answer or has another key."""
    file = Path(entry["flags"]["api_key_file"] or os.devnull)
    lease = file if file.parent == FOLDER else None
    with suppress(OSError, ValueError, HTTPException):
        if lease is not None:
            flock(os.open(lease, os.O_RDONLY), LOCK_SH | LOCK_NB)
        key = key or file.read_text(encoding="utf-8-sig").partition("\n")[0] or None
        request = Request(f"{entry['url']}/v1/models/default_model", headers={"Authorization": f"Bearer {key}"})
        with LOCAL.open(request, timeout=LIMIT) as answer:
            model = json.load(answer)
        if model.get("instance") == entry["flags"]["instance"]:  # no other server at this port
            return Server(pid, entry, key, model["max_input_tokens"], lease)
    return None


def start(words: Sequence[str], key: str | None) -> Server:
    """Start a server and wait for it. It prints its errors itself."""
    if key is not None:
        raise MTPError("No server runs with this API key. One that is started has a key of its own: leave it out.")
    for i in count():
        lease = FOLDER / f"{i}.key"
        file = os.open(lease, os.O_RDONLY | os.O_CREAT, 0o600)
        with suppress(BlockingIOError):  # another server has it
            flock(file, LOCK_EX | LOCK_NB)
            break
    flock(file, LOCK_SH)
    lease.write_text(token_urlsafe())
    log = lease.with_suffix(".log")
    log.unlink(missing_ok=True)
    say(f"Starting a server, whose log is {log}", sys.stderr)
    program = [sys.executable, "-P", "-c", "from mlx_mtp.launch import serve; serve()"]
    command = [*program, "--port", "0", *words, "--api-key-file", str(lease)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    while not is_of(process.pid, entry := kept(SERVERS, str(process.pid)) or {}):
        if (status := process.poll()) is not None:
            sys.exit(status)
        time.sleep(0.1)
    if (server := connect(process.pid, entry, None)) is None:
        raise MTPError(f"The server has died: see {log}.")
    return server


def serve() -> None:
    """Run a server that was started, whose lease is the last word of its command."""
    from .server.serve import main

    lease = Path(sys.argv[-1])
    file = os.open(lease, os.O_RDONLY)

    def end_after_clients() -> None:
        flock(file, LOCK_EX)  # from now on no client gets it
        if os.read(file, 1000).endswith(KEEP):
            flock(file, LOCK_SH)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=end_after_clients, daemon=True).start()
    main(lease.with_suffix(".log"))


def run(path: str, command: Sequence[str], env: dict[str, str]) -> int:
    """Run a program in the foreground -> its exit status as a shell says it."""
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)  # a signal before a wait, or in another thread, does not interrupt the wait
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):  # the terminal sends them to the program as well
        signal.signal(number, lambda *_: None)  # it would inherit SIG_IGN
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pid = os.posix_spawn(path, [*command], env)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    while True:
        done, status = os.waitpid(pid, os.WUNTRACED | os.WNOHANG)
        if not done:
            os.read(signals, 1)
        elif os.WIFSTOPPED(status):
            os.kill(os.getpid(), signal.SIGSTOP)  # the shell continues both
        else:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
