"""The clients of the generation thread: requests that arrive, and clients that disconnect.

If several ranks run the model, rank 0 has the clients, and all ranks run the same steps. A step depends on the requests and on
the tokens generated before. So rank 0 sends the arrived requests and the disconnected clients to the other ranks, and each rank
runs the whole engine: batch generator, prompt cache, samplers and stop words. Every few turns the ranks exchange some numbers.
This exchange does not block: it is queued after the passes before it, and read at the next exchange. The changes themselves are
broadcast only if rank 0 has any.
"""

import os
import sys
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Queue
from threading import Timer
from typing import Any

import mlx.core as mx

from ...batch.generator import PromptResponse, Response
from ...distributed.ranks import Ranks, differing_ranks
from ..request import ApiError, Request

IDLE = 0.1  # seconds that an idle server waits for a request before it checks for other changes
EVERY = 4  # turns between two exchanges while tokens are generated
REST_AFTER = 100  # exchanges without a request, about ten seconds, until a rank sleeps between two exchanges
REST = 0.08  # seconds of that sleep; the exchanges of an idle server are 0.1 s apart
ALONE = 10.0  # seconds that a failed rank waits for the others to fail as well


@dataclass
class Changes:
    """The requests and disconnects since the last step."""

    arrived: list[Request] = field(default_factory=list)  # in order
    gone: set[int] = field(default_factory=set)  # the numbers of requests whose clients have disconnected

    def __bool__(self) -> bool:
        return bool(self.arrived or self.gone)


class Clients:
    """The clients of a server in one process."""

    def __init__(self) -> None:
        self.arriving: Queue[Request] = Queue()
        self.open: set[Request] = set()  # requests whose clients wait for an answer
        self.is_stopping = False

    # Any thread

    def add(self, request: Request) -> None:
        """Queue a request whose client waits for the answer."""
        self.open.add(request)
        self.arriving.put(request)

    def leave(self, request: Request) -> None:
        """Call when a client has its answer or has disconnected."""
        self.open.discard(request)

    def fail_all(self, error: ApiError) -> None:
        """End all open answers with an error, in any thread."""
        for request in self.open.copy():
            request.send(error)

    # The generation thread

    def changes(self, known: Iterable[Request], is_idle: bool) -> Changes | None:
        """The changes since the last step; ``None`` when the server stops.

        Args:
            known (Iterable[Request]): The waiting and the running requests.
            is_idle (bool): Whether no request runs. Then it waits briefly for one to arrive.
        """
        return None if self.is_stopping else self.look(known, wait=is_idle)

    def look(self, known: Iterable[Request], wait: bool) -> Changes:
        """The changes among the clients of this process."""
        arrived: list[Request] = []
        with suppress(Empty):
            arrived.append(self.arriving.get(block=wait, timeout=IDLE))
            while True:
                arrived.append(self.arriving.get_nowait())
        return Changes(arrived, {request.number for request in (*known, *arrived) if request.is_gone})

    def after_step(self, prefilled: list[PromptResponse], generated: list[Response]) -> None:
        """Call after each step of the batch generator, with its responses."""


class SharedClients(Clients):
    """The clients of rank 0, shared with every rank."""

    def __init__(self, ranks: Ranks):
        super().__init__()
        self.ranks = ranks
        self.n_turns = 0  # since the last exchange
        self.n_idle = 0  # exchanges since the last request
        self.sent: mx.array | None = None  # each rank's numbers at the last exchange, [R, 3]
        self.unsent = Changes()  # rank 0's
        self.checksum = 0  # a checksum of the generated tokens

    def changes(self, known: Iterable[Request], is_idle: bool) -> Changes | None:
        self.n_turns += 1
        if not is_idle and self.n_turns < EVERY:
            return Changes()
        is_prefilling, self.n_turns = self.n_turns > EVERY, 0
        self.n_idle = self.n_idle + 1 if is_idle else 0
        if self.ranks.rank == 0:
            new = self.look(known, wait=is_idle and not self.unsent)
            self.unsent = Changes(self.unsent.arrived + new.arrived, new.gone)
        changes = self._exchange()
        if changes is None:
            return None
        self._start_exchange()
        if not is_prefilling:
            return changes
        # No pass is in flight that the exchange would wait for, and the next chunk of a prompt would delay its changes.
        more = self._exchange()
        return None if more is None else Changes(changes.arrived + more.arrived, changes.gone | more.gone)

    def after_step(self, prefilled: list[PromptResponse], generated: list[Response]) -> None:
        if prefilled:
            self.n_turns = EVERY  # prefilling took long
        for uid, token in [(r.uid, "prefilled") for r in prefilled] + [(r.uid, r.token) for r in generated]:
            self.checksum = zlib.crc32(f"{uid} {token} ".encode(), self.checksum)

    def _start_exchange(self) -> None:
        if self.n_idle > REST_AFTER and self.ranks.rank != 0:
            time.sleep(REST)  # before the exchange: MLX's ring waits in a busy loop
        mine = [bool(self.unsent), self.is_stopping, self.checksum]
        self.sent = mx.distributed.all_gather(mx.array([mine], mx.uint32), group=self.ranks.group)
        mx.async_eval(self.sent)

    def _exchange(self) -> Changes | None:
        """The changes of the last exchange; ``None`` if a rank stops."""
        if self.sent is None:
            return Changes()
        sent: Any = self.sent.tolist()
        self.sent = None
        has_changes, stop, checksum = zip(*sent)
        if others := differing_ranks(checksum):
            raise RuntimeError(f"{others} have generated other tokens than rank 0.")
        if any(stop):
            return None
        return self._broadcast() if has_changes[0] else Changes()

    def _broadcast(self) -> Changes:
        """Rank 0's changes, on every rank."""
        mine, self.unsent = self.unsent, Changes()
        shared = self.ranks.broadcast(mine)
        return mine if self.ranks.rank == 0 else shared


def seed_equally(ranks: Ranks | None) -> None:
    """Seed all ranks with rank 0's random seed. A server in one process keeps MLX's random state."""
    if ranks is not None:
        mx.random.seed(ranks.broadcast(time.time_ns()))


def reseed(ranks: Ranks | None) -> None:
    """Seed MLX again after a failure. A rank ends its process if the others have not failed."""
    if ranks is None:
        mx.random.seed(time.time_ns())
        return
    alone = Timer(ALONE, _end_alone, [ranks])
    alone.daemon = True
    alone.start()
    seed_equally(ranks)
    alone.cancel()


def _end_alone(ranks: Ranks) -> None:
    error = f"Rank {ranks.rank} has failed, but the other ranks have not."
    print(f"mlx_mtp server: error: {error}", file=sys.__stderr__, flush=True)
    os._exit(1)
