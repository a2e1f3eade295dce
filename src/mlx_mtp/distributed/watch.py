"""Ends all ranks when one of them is lost: it has died, is stopped, has failed or cannot be reached.

The others would wait for it in a collective for ever, where Python cannot interrupt them. A thread cannot watch either, since
Python's lock may be held or the process stopped. So each rank has a watching process: ``watcher.py``.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from .connect import connect
from .ranks import Ranks

LONGEST_ERROR = 500  # characters of an exception's message to the other ranks


@contextmanager
def watch(
    ranks: Ranks | None, beat: float = 1.0, patience: float = 5.0, on_loss: Sequence[Callable[[str], None]] = ()
) -> Iterator[None]:
    """
    Watch all ranks: when one is lost, the others end within ten seconds, with exit status 1 and one line on stderr that names
    the lost rank.

    An exception on one rank ends the others, too. At the end each rank waits until all others have reached the end, so exit
    status 0 means that all ranks have succeeded. A running process is never lost, however long it compiles, reads weights or
    holds Python's lock.

    Args:
        ranks (Ranks, optional): The ranks that run the program. A single process, ``None``, is not watched.
        beat (float): Seconds between two signs of life. Default: ``1.0``.
        patience (float): Seconds of silence, or of being stopped, after which a rank is lost. Default: ``5.0``.
        on_loss (Sequence[Callable[[str], None]]): Called in another thread before this process is ended, with a sentence that
          names the lost rank. All calls together have two seconds. Default: ``()``.

    Raises:
        ConnectionError: The ranks cannot connect to rank 0.
    """
    if ranks is None:
        yield
        return
    with ExitStack() as sockets:
        others = connect(ranks, sockets, 2 * patience)
        ours, theirs = (sockets.enter_context(sock) for sock in socket.socketpair())
        links = [(theirs.fileno(), ranks.rank, socket.gethostname())]
        links += [(sock.fileno(), rank, host) for sock, rank, host in others]
        script = Path(__file__).with_name("watcher.py")
        # In a separate session: Ctrl-C is for the rank.
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", script, json.dumps([beat, patience, os.getpid(), *links])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[fd for fd, *_ in links],
            start_new_session=True,
        )
        for sock in (theirs, *(sock for sock, *_ in others)):
            sock.close()  # the watcher's
        is_over = Event()
        Thread(target=_follow, args=(ours, ranks.rank, is_over, on_loss), daemon=True).start()
        last = ["bye"]
        try:
            yield
        except BaseException as e:
            if not isinstance(e, SystemExit) or e.code:
                last = ["failed", " ".join(f"{type(e).__name__}: {e}".split())[:LONGEST_ERROR]]
            raise
        finally:
            with suppress(OSError):  # without its watcher the process ends: see _follow
                ours.sendall(json.dumps(last).encode() + b"\n")
            is_over.wait()
            watcher.wait()


def _follow(sock: socket.socket, rank: int, is_over: Event, on_loss: Sequence[Callable[[str], None]]) -> None:
    """End the process when its watcher requests it or is lost."""
    try:
        with sock.makefile() as messages:
            message = messages.readline()
    except OSError:
        message = ""
    kind, *rest = json.loads(message) if message else ("lost",)
    if kind == "over":
        is_over.set()
        return
    error = rest[0] if rest else f"The watcher of rank {rank} ({socket.gethostname()}) has died."
    if kind == "lost":
        print(f"mlx_mtp: error: {error}", file=sys.stderr, flush=True)
    for tell in on_loss:
        tell(error)
    os._exit(1)  # the main thread may wait in a collective
