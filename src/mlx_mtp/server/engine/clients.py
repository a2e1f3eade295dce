"""The clients of the generation thread: requests that arrive, and clients that disconnect.

If several ranks run the model, rank 0 has the clients, and all ranks run the same steps. A step depends on the requests and on
the tokens generated before. So rank 0 sends the arrived requests and the disconnected clients to the other ranks, and each rank
runs the whole engine: batch generator, prompt cache, samplers and stop words. Every few turns the ranks exchange some numbers;
requests and disconnects are broadcast only if rank 0 has any.
"""

import os
import sys
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from queue import Empty, Queue
from threading import Timer
from typing import Any, NamedTuple

import mlx.core as mx

from ...batch.generator import PromptResponse, Response
from ...distributed.ranks import Ranks, differing_ranks
from ..request import ApiError, Request

IDLE = 0.1  # seconds that an idle server waits for a request before it checks for other changes
EVERY = 4  # turns between two exchanges while tokens are generated: one waits for the pass in flight
REST_AFTER = 100  # exchanges without a request, about ten seconds, until a rank sleeps between two exchanges
REST = 0.08  # seconds of that sleep; the exchanges of an idle server are 0.1 s apart
ALONE = 10.0  # seconds that a failed rank waits for the others to fail as well


class Changes(NamedTuple):
    """The requests and disconnects since the last step."""

    arrived: list[Request]  # in order
    gone: set[int]  # the numbers of requests whose clients have disconnected


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
        self.checksum = 0  # a checksum of the generated tokens

    def changes(self, known: Iterable[Request], is_idle: bool) -> Changes | None:
        self.n_turns += 1
        if not is_idle and self.n_turns < EVERY:
            return Changes([], set())
        self.n_turns, self.n_idle = 0, self.n_idle + 1 if is_idle else 0
        mine = Changes([], set())
        if self.ranks.rank == 0:
            mine = self.look(known, wait=is_idle)
        elif self.n_idle > REST_AFTER:
            time.sleep(REST)  # MLX's ring waits in a busy loop
        numbers = mx.array([[any(mine), self.is_stopping, self.checksum]], mx.uint32)
        sent: Any = mx.distributed.all_gather(numbers, group=self.ranks.group).tolist()  # [R, 3]
        has_changes, stop, checksum = zip(*sent)
        if others := differing_ranks(checksum):
            raise RuntimeError(f"{others} have generated other tokens than rank 0.")
        if any(stop):
            return None
        shared = self.ranks.broadcast(mine) if has_changes[0] else mine
        return mine if self.ranks.rank == 0 else shared

    def after_step(self, prefilled: list[PromptResponse], generated: list[Response]) -> None:
        if prefilled:
            self.n_turns = EVERY  # prefilling took long
        for uid, token in [(r.uid, "prefilled") for r in prefilled] + [(r.uid, r.token) for r in generated]:
            self.checksum = zlib.crc32(f"{uid} {token} ".encode(), self.checksum)


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
