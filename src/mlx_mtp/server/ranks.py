"""The generation thread where several ranks run the model: rank 0 has the clients, and all ranks do the same steps.

What a step does depends on the requests and on what was generated before. So rank 0 tells the others which requests have come
and which are given up, and each rank runs the whole engine on that: scheduler, prompt cache, samplers and stop words. Every few
turns the ranks exchange some numbers. Nobody waits for them: they are queued behind the passes before them and read at the next
exchange. Only where rank 0 has changes are these sent as well.
"""

import _thread
import os
import sys
import time
import zlib
from threading import Timer
from typing import Any

import mlx.core as mx

from ..distributed.ranks import Ranks, unlike_rank_0
from .batch import Event, NewToken, Progress
from .caches import Caches
from .engine import Changes, ResponseGenerator
from .metrics import Metrics
from .provider import ModelProvider
from .request import ApiError

EVERY = 4  # turns between two exchanges while tokens are generated
REST_AFTER = 100  # exchanges without a request, about ten seconds,
REST = 0.08  # seconds that a rank rests between two of them; those of an idle server are 0.1 s apart
ALONE = 10.0  # seconds that a rank waits for the others to fail as it has


class NoClient:
    """Where the responses of a rank go that has no clients."""

    def put(self, response: Any) -> None:
        pass


class RankGenerator(ResponseGenerator):
    """
    Args:
        ranks (Ranks): Who runs the model.
    """

    def __init__(self, ranks: Ranks, provider: ModelProvider, caches: Caches, metrics: Metrics):
        self.ranks = ranks
        self.n_turns = 0  # since the last exchange
        self.n_idle = 0  # exchanges since there was a request
        self.sent: mx.array | None = None  # at the last exchange by each rank, [R, 4]
        self.unsent = Changes()  # rank 0's
        self.checksum = 0  # of what was generated
        super().__init__(provider, caches, metrics)

    # What rank 0 tells

    def _changes(self) -> Changes | None:
        self.n_turns += 1
        if self.jobs and self.n_turns < EVERY:
            return Changes()
        is_reading, self.n_turns = self.n_turns > EVERY, 0
        self.n_idle = 0 if self.jobs else self.n_idle + 1
        if self.ranks.rank == 0:
            new = self._look(wait=not self.jobs and not self.unsent)
            self.unsent = Changes(self.unsent.arrived + new.arrived, new.gone)
        changes = self._exchange()
        if changes is None:
            return None
        self._tell()
        if not is_reading:
            return changes
        # No pass is in flight behind which the exchange would wait, and a chunk of a prompt would delay what it says.
        more = self._exchange()
        return None if more is None else Changes(changes.arrived + more.arrived, changes.gone | more.gone)

    def _tell(self) -> None:
        """Begin an exchange."""
        if self.n_idle > REST_AFTER and self.ranks.rank != 0:
            time.sleep(REST)  # before the exchange begins: MLX's ring waits in a loop that takes all of a core
        mine = [bool(self.unsent), self._stop, self._is_full(), self.checksum]
        self.sent = mx.distributed.all_gather(mx.array([mine], mx.uint32), group=self.ranks.group)
        mx.async_eval(self.sent)

    def _exchange(self) -> Changes | None:
        """Read the last exchange."""
        if self.sent is None:
            return Changes()
        sent: Any = self.sent.tolist()
        self.sent = None
        has_changes, stop, is_full, checksum = zip(*sent)
        if others := unlike_rank_0(checksum):
            raise RuntimeError(f"{others} have generated other tokens than rank 0.")
        if any(stop):
            self.waiting += self.unsent.arrived
            return None
        if any(is_full):
            self.prompt_cache.trim_to(n_sequences=len(self.prompt_cache) - 1)
        return self._share() if has_changes[0] else Changes()

    def _share(self) -> Changes:
        """Rank 0's changes, on every rank."""
        mine, self.unsent = self.unsent, Changes()
        requests, gone = self.ranks.share(([entry[1:] for entry in mine.arrived], mine.gone))
        return mine if self.ranks.rank == 0 else Changes([(NoClient(), *r) for r in requests], gone)

    # What depends on the rank

    def _make_room(self) -> None:
        """mlx-lm's caches of a pipeline's ranks differ in size, and all ranks drop the same ones."""
        if self.caches.lru is None:
            super()._make_room()

    def _memory_left(self) -> int:
        """Any number: a prompt that one rank has memory for and another has not would part them."""
        return 1 << 62

    def _is_full(self) -> bool:
        """Whether one of mlx-lm's caches must be dropped."""
        lru = self.caches.lru
        if self.scheduled is None or lru is None or len(lru) == 0:
            return False
        return bool(lru.nbytes + self.scheduler.nbytes > self.max_cache_bytes)

    def _reseed(self) -> None:
        """After a failure, which all ranks have had alike, or this one ends."""
        alone = Timer(ALONE, self._end_alone)
        alone.daemon = True
        alone.start()
        self._seed()
        alone.cancel()

    def _seed(self) -> None:
        mx.random.seed(self.ranks.share(time.time_ns()))

    def _end_alone(self) -> None:
        error = f"Rank {self.ranks.rank} has failed, and the others have not."
        print(f"mlx_mtp.server: error: {error}", file=sys.__stderr__, flush=True)
        os._exit(1)

    # Every rank

    def _handle(self, event: Event) -> None:
        if isinstance(event, Progress):
            self.n_turns = EVERY  # reading a part of a prompt took long
        what = event.token if isinstance(event, NewToken) else type(event).__name__
        self.checksum = zlib.crc32(f"{self.jobs[event.generation].request.number} {what} ".encode(), self.checksum)
        super()._handle(event)

    def _close_scheduler(self) -> None:
        super()._close_scheduler()
        mx.synchronize()  # the others wait for this rank's part of a pass

    def _generate(self) -> None:
        self._seed()
        super()._generate()

    def _run_generate(self) -> None:
        try:
            self._generate()
        except BaseException as e:
            self.error = e
            self._generation_failed = True
            if not self.loaded.done():
                self.loaded.set_exception(e)
            self.fail_all(ApiError(503, f"The server is stopping: {e}"))
        if self.ranks.rank == 0 and self.loaded.exception() is None and not self._stop:
            _thread.interrupt_main()  # it serves HTTP
