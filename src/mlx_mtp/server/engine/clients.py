"""From the clients to the generation thread: requests that arrive, and clients that leave.

Where several ranks run the model, rank 0 has the clients, and all ranks do the same steps. A step depends on the requests and
on the tokens generated before. So rank 0 tells the others which requests have arrived and which have been abandoned, and each
rank runs the whole engine on that: batch generator, prompt cache, samplers and stop words. Every few turns the ranks exchange
some numbers, without waiting: they are queued behind the passes before them and read at the next exchange. Only where rank 0
has changes are these sent as well.
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

IDLE = 0.1  # seconds that an idle server waits for a request before it looks for other changes
EVERY = 4  # turns between two exchanges while tokens are generated
REST_AFTER = 100  # exchanges without a request, about ten seconds,
REST = 0.08  # seconds that a rank rests between two of them; those of an idle server are 0.1 s apart
ALONE = 10.0  # seconds that a rank waits for the others to fail as it has


@dataclass
class Changes:
    """The requests that came and went since the last step."""

    arrived: list[Request] = field(default_factory=list)  # in order
    gone: set[int] = field(default_factory=set)  # the numbers of requests with disconnected clients

    def __bool__(self) -> bool:
        return bool(self.arrived or self.gone)


class Clients:
    def __init__(self) -> None:
        self.arriving: Queue[Request] = Queue()
        self.open: set[Request] = set()  # requests whose answers are awaited
        self.is_stopping = False  # whether the server ends

    # Any thread

    def add(self, request: Request) -> None:
        """Queue a request whose client waits for the answer."""
        self.open.add(request)
        self.arriving.put(request)

    def leave(self, request: Request) -> None:
        """The client has its answer, or has disconnected."""
        self.open.discard(request)

    def fail_all(self, error: ApiError) -> None:
        """End all open answers, without the generation thread."""
        for request in self.open.copy():
            request.client.put(error)

    # The generation thread

    def changes(self, known: Iterable[Request], is_idle: bool) -> Changes | None:
        """The changes since the last step; ``None`` when the server ends. Where no request runs, it waits a moment for one.

        Args:
            known (Iterable[Request]): The requests that wait or run.
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
        """Called with the result of each step of the batch generator."""


class SharedClients(Clients):
    """The clients of rank 0, on every rank."""

    def __init__(self, ranks: Ranks):
        super().__init__()
        self.ranks = ranks
        self.n_turns = 0  # since the last exchange
        self.n_idle = 0  # exchanges since there was a request
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
        self._tell()
        if not is_prefilling:
            return changes
        # No pass is in flight behind which the exchange would wait, and a chunk of a prompt would delay what it says.
        more = self._exchange()
        return None if more is None else Changes(changes.arrived + more.arrived, changes.gone | more.gone)

    def after_step(self, prefilled: list[PromptResponse], generated: list[Response]) -> None:
        if prefilled:
            self.n_turns = EVERY  # prefilling took long
        for uid, what in [(r.uid, "prefilled") for r in prefilled] + [(r.uid, r.token) for r in generated]:
            self.checksum = zlib.crc32(f"{uid} {what} ".encode(), self.checksum)

    def _tell(self) -> None:
        """Begin an exchange."""
        if self.n_idle > REST_AFTER and self.ranks.rank != 0:
            time.sleep(REST)  # before the exchange begins: MLX's ring waits in a loop that takes all of a core
        mine = [bool(self.unsent), self.is_stopping, self.checksum]
        self.sent = mx.distributed.all_gather(mx.array([mine], mx.uint32), group=self.ranks.group)
        mx.async_eval(self.sent)

    def _exchange(self) -> Changes | None:
        """Read the last exchange."""
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


def seed_alike(ranks: Ranks | None) -> None:
    """Give all ranks one random state, rank 0's choice. A server in one process keeps MLX's own."""
    if ranks is not None:
        mx.random.seed(ranks.broadcast(time.time_ns()))


def reseed(ranks: Ranks | None) -> None:
    """Give MLX a new random state, after a failure: all ranks have had it alike, or this one ends."""
    if ranks is None:
        mx.random.seed(time.time_ns())
        return
    alone = Timer(ALONE, _end_alone, [ranks])
    alone.daemon = True
    alone.start()
    seed_alike(ranks)
    alone.cancel()


def _end_alone(ranks: Ranks) -> None:
    error = f"Rank {ranks.rank} has failed, and the others have not."
    print(f"mlx_mtp server: error: {error}", file=sys.__stderr__, flush=True)
    os._exit(1)
