"""The watcher of a rank: a small process that ends the rank when another rank is lost.

``watch.py`` starts it as a script. It imports the standard library only and shares no lock with the rank, which may compile,
tokenize or read weights for any length of time. The watchers form a star around rank 0's watcher. They send each other a beat,
and report when their rank is lost:

    the rank has died              the socket to it is closed, or it is no longer the parent
    it is stopped                  the system reports it as stopped for longer than ``patience``
    it has raised an exception     it reports the exception
    its machine is lost            its watcher is silent for longer than ``patience``, or the connection is closed

A message is a line of JSON: a list of its kind and its arguments.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from select import select
from time import monotonic
from typing import Any

LAST_WORDS = 2.0  # seconds for a rank to end by itself
LONGEST = 10_000  # bytes of a message


class Fault(Exception):
    """
    Args:
        rank (int): The lost rank.
        what (str): A sentence that names it.
        is_exception (bool): Whether the rank has raised an exception, which it prints itself. Default: ``False``.
        age (float): Seconds since it was found. Default: ``0.0``.
    """

    def __init__(self, rank: int, what: str, is_exception: bool = False, age: float = 0.0):
        super().__init__(what)
        self.rank, self.what, self.is_exception, self.found = rank, what, is_exception, monotonic() - age


class Link:
    """A connection to a rank, or to its watcher."""

    def __init__(self, sock: socket.socket, rank: int, host: str):
        self.sock, self.rank, self.name = sock, rank, f"Rank {rank} ({host})"
        self.heard, self.rest = monotonic(), b""
        self.has_failed = False  # whether it has reported a fault

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, *message: Any) -> None:
        with suppress(OSError):  # a closed connection is noticed by reading
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[Any]:
        """The messages that have arrived.

        Raises:
            OSError: The connection is closed.
        """
        data = self.sock.recv(LONGEST)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if not data or len(self.rest) > LONGEST:
            raise ConnectionError("closed")
        self.heard = monotonic()
        return [json.loads(line) for line in lines]

    def drain(self, seconds: float) -> None:
        """Wait until the connection is closed, or for at most this time."""
        end = monotonic() + seconds
        with suppress(OSError):
            while (left := end - monotonic()) > 0:
                self.sock.settimeout(left)
                self.read()


class Watcher:
    """
    Args:
        own (Link): The link to the watched rank, the parent process.
        others (List[Link]): Rank 0's links to all others, or the link to rank 0.
        beat (float): Seconds between two beats.
        patience (float): Seconds of silence, or of being stopped, after which a rank is lost.
        parent (int): The process id of the rank; it may have died before this process has begun.
    """

    def __init__(self, own: Link, others: list[Link], beat: float, patience: float, parent: int):
        self.own, self.rank, self.others = own, own.rank, others
        self.beat, self.patience, self.parent = beat, patience, parent
        self.present = {link.rank for link in (own, *others)}  # on rank 0: the ranks that have not left
        self.is_over = False
        self.running_at = monotonic()  # when the parent was last seen running

    def watch(self) -> None:
        """Watch until all ranks have left.

        Raises:
            Fault: One of them is lost.
        """
        due = monotonic()
        while not self.is_over:
            for link in select([self.own, *self.others], [], [], max(0, due - monotonic()))[0]:
                self._hear(link)
            late = monotonic() - due
            if late > self.patience:  # the others have given up on this rank, or will
                raise Fault(self.rank, f"{self.own.name} does not answer: it was stopped for {late:.0f} s.")
            if late >= 0:
                due = monotonic() + self.beat
                self._check_others()
                self._check_parent()

    def _hear(self, link: Link) -> None:
        try:
            messages = link.read()
        except OSError as e:
            link.has_failed = True
            raise Fault(link.rank, f"{link.name} has died.") from e
        for kind, *rest in messages:
            link.has_failed = kind in ("fault", "failed")
            if kind == "fault":
                raise Fault(*rest)
            if kind == "failed":
                raise Fault(self.rank, f"{self.own.name} has failed: {rest[0]}", is_exception=True)
            if kind == "bye":
                self._leave(link)

    def _leave(self, link: Link) -> None:
        """Leave: the others report to rank 0, which replies once all have left."""
        self.present.discard(link.rank)
        self.is_over = not self.present if self.rank == 0 else link is not self.own
        if self.is_over if self.rank == 0 else link is self.own:
            for other in self.others:
                other.send("bye")

    def _check_others(self) -> None:
        for link in self.others:
            link.send("beat")
            silence = monotonic() - link.heard
            if silence > self.patience:
                raise Fault(link.rank, f"{link.name} does not answer: it has been silent for {silence:.0f} s.")

    def _check_parent(self) -> None:
        if os.getppid() != self.parent:  # a process that it has forked may keep the socket open
            raise Fault(self.rank, f"{self.own.name} has died.")
        if not is_stopped(self.parent):
            self.running_at = monotonic()
        silence = monotonic() - self.running_at
        if silence > self.patience:
            raise Fault(self.rank, f"{self.own.name} does not answer: it has been stopped for {silence:.0f} s.")

    def end(self, fault: Fault) -> None:
        """Report a fault to the others, and end the rank."""
        self._tell(fault, [link for link in self.others if not link.has_failed])
        if fault.is_exception or fault.rank == self.rank:
            fault = self._cause(fault)
        self._tell(fault, self.others)  # also to the rank that reported it: this rank has now reported everything
        ends_itself = fault.is_exception and self.own.has_failed
        if not ends_itself and self.rank == (1 if fault.rank == 0 else 0):  # one line for all ranks
            print(f"mlx_mtp: error: {fault.what}", file=sys.stderr, flush=True)
        if ends_itself:
            self.close(fault.rank)
            self.own.send("over")
        else:
            self._shut_down()
            if fault.is_exception:  # it is printed first: mlx.launch ends all ranks as soon as one has ended
                self.own.drain(2 * self.beat)
            self._end_rank(fault.what)
            self.close(fault.rank)

    def _tell(self, fault: Fault, links: list[Link]) -> None:
        for link in links:
            link.send("fault", fault.rank, fault.what, fault.is_exception, monotonic() - fault.found)

    def _cause(self, fault: Fault) -> Fault:
        """The first loss of a rank, or else the fault: a loss makes the others' collectives fail, and ``mlx.launch`` ends them.

        Waits for reports of all ranks, for a beat: this rank may be about to raise the same exception as another.
        """
        end, losses = monotonic() + self.beat, [] if fault.is_exception else [fault]
        while waiting := [link for link in (self.own, *self.others) if not link.has_failed]:
            ready = select(waiting, [], [], max(0, end - monotonic()))[0]
            for link in ready:
                try:
                    self._hear(link)
                except Fault as told:
                    if not told.is_exception:
                        losses.append(told)
            if not ready:
                break
        return min(losses, key=lambda loss: loss.found, default=fault)

    def _end_rank(self, why: str) -> None:
        self.own.send("end", why)
        if not is_stopped(self.parent):
            self.own.drain(LAST_WORDS)
        if os.getppid() == self.parent:
            os.kill(self.parent, signal.SIGKILL)

    def _shut_down(self) -> None:
        for link in self.others:
            with suppress(OSError):
                link.sock.shutdown(socket.SHUT_WR)

    def close(self, lost: int | None = None) -> None:
        """Close the connections once the others have shut theirs down, without waiting for a lost rank."""
        self._shut_down()
        end = monotonic() + self.beat + LAST_WORDS
        for link in self.others:
            if link.rank != lost:
                link.drain(end - monotonic())
            link.sock.close()


def is_stopped(pid: int) -> bool:
    """Whether the system has stopped a process (SIGSTOP, SIGTSTP)."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        return stat.read_text().rpartition(")")[2].split()[0] == "T"
    ps = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return ps.stdout.startswith("T")


def main() -> None:
    beat, patience, parent, own, *others = json.loads(sys.argv[1])  # a link: its file descriptor, rank and host
    links = [Link(socket.socket(fileno=fd), rank, host) for fd, rank, host in (own, *others)]
    watcher = Watcher(links[0], links[1:], beat, patience, parent)
    try:
        watcher.watch()
        watcher.close()
        watcher.own.send("over")
    except Fault as fault:
        watcher.end(fault)


if __name__ == "__main__":
    main()
