"""Connections between rank 0 and the other ranks, separate from MLX's backend."""

import json
import os
import secrets
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from select import select
from time import monotonic

from .ranks import Ranks

Connection = tuple[socket.socket, int, str]  # the rank at the other end, and its host
LONGEST_HELLO = 500  # bytes


def connect(ranks: Ranks, sockets: ExitStack, timeout: float) -> list[Connection]:
    """Connect the other ranks to rank 0 -> on rank 0 the connections to all others, on other ranks the one to rank 0.

    Args:
        sockets (ExitStack): Closes the connections.
        timeout (float): Seconds.

    Raises:
        ConnectionError: Not all of them are connected in time, or a connection is lost. Every rank raises it.
    """
    try:
        return _connect(ranks, sockets, timeout)
    except RuntimeError as e:  # MLX's ring does not name the rank
        lost = f"Rank {1 - ranks.rank}" if ranks.size == 2 else f"One of the {ranks.size} ranks"
        raise ConnectionError(f"{lost} was lost before all ranks were connected: {e}") from e


def _connect(ranks: Ranks, sockets: ExitStack, timeout: float) -> list[Connection]:
    others: list[Connection] = []
    error, host = None, socket.gethostname()
    with ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in _listen()] if ranks.rank == 0 else []
        addresses = [listener.getsockname()[:2] for listener in listeners]
        # The token authenticates the ranks.
        addresses, host_of_0, token = ranks.broadcast((addresses, host, secrets.token_hex(16)))
        try:
            if ranks.rank == 0:
                _accept(listeners, ranks.size, token, others, timeout)
            else:
                others.append((_join(ranks.rank, addresses, timeout), 0, host_of_0))
                others[0][0].sendall(f"{token} {ranks.rank} {host}\n".encode())
        except OSError as e:
            at = ", ".join(f"{name} port {port}" for name, port in addresses)
            error = f"{e.strerror or e} (rank 0 is {host_of_0} at {at})"
        for sock, *_ in others:
            sockets.enter_context(sock)
        missed = ranks.broadcast(error)
    if error := error or missed:
        raise ConnectionError(f"{error}. Check that the firewalls of the machines allow it.")
    return others


def _accept(listeners: list[socket.socket], size: int, token: str, others: list[Connection], timeout: float) -> None:
    end = monotonic() + timeout
    while absent := set(range(1, size)) - {rank for _, rank, _ in others}:
        ready, *_ = select(listeners, [], [], max(0, end - monotonic()))
        if not ready:
            raise ConnectionError(f"Rank {min(absent)} has not connected to rank 0")
        sock = ready[0].accept()[0]
        sock.settimeout(1.0)
        with suppress(OSError, ValueError), sock.makefile("rb") as hello:
            given, rank, host = hello.readline(LONGEST_HELLO).split()
            if secrets.compare_digest(given, token.encode()):
                sock.settimeout(None)
                others.append((sock, int(rank), host.decode()))
                continue
        sock.close()


def _join(rank: int, addresses: list[tuple[str, int]], timeout: float) -> socket.socket:
    reasons = []
    for address in addresses:
        try:
            sock = socket.create_connection(address, timeout / 2 / len(addresses))
        except OSError as e:
            reasons.append(e.strerror or str(e))
        else:
            sock.settimeout(None)
            return sock
    raise ConnectionError(f"Rank {rank} cannot connect to rank 0: {', '.join(reasons)}")


def _listen() -> list[socket.socket]:
    """Sockets that listen at rank 0's addresses."""
    listeners = {}
    for name in _addresses():
        with suppress(OSError):  # an address of another machine
            family, *_, (address, *_) = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
            if address not in listeners:
                listeners[address] = socket.create_server((address, 0), family=family)
    return [*listeners.values()]


def _addresses() -> list[str]:
    """Rank 0's addresses, as other ranks reach them: those given to ``mlx.launch``, or with MPI all addresses found."""
    if hostfile := os.environ.get("MLX_HOSTFILE"):
        return [address.rpartition(":")[0] for address in json.loads(Path(hostfile).read_text())[0]]
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        return [coordinator.rpartition(":")[0]]
    if name := os.environ.get("NCCL_HOST_IP"):
        return [name]
    names = [socket.gethostname(), "127.0.0.1"]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("192.0.2.1", 9))  # sends nothing, but chooses the address that faces outward
        names.insert(0, sock.getsockname()[0])
    return names
