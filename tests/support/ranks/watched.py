"""One of the processes of tests/test_watch.py, which the test makes ranks of a group.

python -m tests.support.ranks.watched FD RANK SIZE BEAT PATIENCE DEED
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time
from typing import Any

from tests.support.ranks import bare  # noqa: F401

# isort: split

from mlx_mtp.distributed.watch import watch


class Ranks:
    """As ``mlx_mtp.distributed.ranks.Ranks``, but by way of the test."""

    def __init__(self, rank: int, size: int, sock: socket.socket):
        self.rank, self.size, self.sock, self.file = rank, size, sock, sock.makefile("rw")

    def broadcast(self, value: Any) -> Any:
        self.file.write(json.dumps(value) + "\n")
        self.file.flush()
        return json.loads(self.file.readline())


def wait() -> None:
    """For ever, and as in a collective no signal wakes it."""
    ctypes.CDLL(None).sigwait(ctypes.byref(ctypes.create_string_buffer(128)), ctypes.byref(ctypes.c_int()))


def fail() -> None:
    raise ValueError("no\nweights")


def hold_the_lock(seconds: int) -> None:
    """Hold Python's lock, and say so."""
    sys.setswitchinterval(1000)
    time.sleep(0)  # lets those go first who have asked for it
    libc = ctypes.PyDLL(None)  # its calls keep the lock
    libc.write(ranks.sock.fileno(), b"0\n", 2)
    libc.sleep(seconds)


DEEDS = {
    "wait": wait,
    "wait and tell": wait,
    "fail": fail,
    "fail late": lambda: (time.sleep(0.1), fail()),
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leave": lambda: None,
    "exit": lambda: sys.exit(0),
    "exit 2": lambda: sys.exit(2),
    "sleep": lambda: time.sleep(0.5),
    "hold the lock": lambda: hold_the_lock(10),
    "hold the lock for ever": lambda: hold_the_lock(600),
    "fork and wait": lambda: (os.fork() or (time.sleep(1), os._exit(0)), wait()),
}

if __name__ == "__main__":
    fd, rank, size, beat, patience, deed = sys.argv[1:]
    ranks = Ranks(int(rank), int(size), socket.socket(fileno=int(fd)))
    on_loss = [print, lambda _: sys.stdout.flush()] if deed == "wait and tell" else []
    with watch(ranks, float(beat), float(patience), on_loss):
        ranks.broadcast("inside")
        DEEDS[deed]()
    print("whole")
