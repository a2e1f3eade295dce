"""The generation thread where several ranks run the model: rank 0 has the clients, and all ranks do the same steps.

What a step does depends on the requests and on what was generated before. So rank 0 tells the others which requests have come
and which are given up, and each rank runs the whole engine on that: scheduler, prompt cache, samplers and stop words. Every few
turns the ranks exchange some numbers. Nobody waits for them: they are queued behind the passes before them and read at the next
exchange. Only where rank 0 has news are these sent as well.
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
from .batch import Event, Progress, Token
from .caches import Caches
from .engine import News, ResponseGenerator
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
        self.untold = News()  # rank 0's
        self.checksum = 0  # of what was generated
        super().__init__(provider, caches, metrics)

    # What rank 0 tells

    def _news(self) -> News | None:
        self.n_turns += 1
        if self.jobs and self.n_turns < EVERY:
            return News()
        is_reading, self.n_turns = self.n_turns > EVERY, 0
        self.n_idle = 0 if self.jobs else self.n_idle + 1
        if self.ranks.rank == 0:
            new = self._look(wait=not self.jobs and not self.untold)
            self.untold = News(self.untold.arrived + new.arrived, new.gone)
        news = self._hear()
        if news is None:
            return None
        self._tell()
        if not is_reading:
            return news
        # No pass is in flight behind which the exchange would wait, and a chunk of a prompt would delay what it says.
        more = self._hear()
        return None if more is None else News(news.arrived + more.arrived, news.gone | more.gone)

    def _tell(self) -> None:
        """Begin an exchange."""
        if self.n_idle > REST_AFTER and self.ranks.rank != 0:
            time.sleep(REST)  # before the exchange begins: MLX's ring waits in a loop that takes all of a core
        mine = [bool(self.untold), self._stop, self._is_full(), self.checksum]
        self.sent = mx.distributed.all_gather(mx.array([mine], mx.uint32), group=self.ranks.group)
        mx.async_eval(self.sent)

    def _hear(self) -> News | None:
        """Read the last exchange."""
        if self.sent is None:
            return News()
        sent: Any = self.sent.tolist()
        self.sent = None
        has_news, stop, is_full, checksum = zip(*sent)
        if others := unlike_rank_0(checksum):
            raise RuntimeError(f"{others} have generated other tokens than rank 0.")
        if any(stop):
            self.waiting += self.untold.arrived
            return None
        if any(is_full):
            self.prompt_cache.trim_to(n_sequences=len(self.prompt_cache) - 1)
        return self._share() if has_news[0] else News()

    def _share(self) -> News:
        """Rank 0's news, on every rank."""
        mine, self.untold = self.untold, News()
        requests, gone = self.ranks.share(([entry[1:] for entry in mine.arrived], mine.gone))
        return mine if self.ranks.rank == 0 else News([(NoClient(), *r) for r in requests], gone)

    # What depends on the rank

    def _make_room(self) -> None:
        """Nothing: the caches of a pipeline's ranks differ in size, and all ranks drop the same ones."""

    def _memory_left(self) -> int:
        """Any number: a prompt that one rank has memory for and another has not would part them."""
        return 1 << 62

    def _is_full(self) -> bool:
        """Whether a prompt cache must be dropped."""
        if self.scheduled is None or len(self.prompt_cache) == 0:
            return False
        return bool(self.prompt_cache.nbytes + self.scheduler.nbytes > self.max_cache_bytes)

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
        what = event.token if isinstance(event, Token) else type(event).__name__
        self.checksum = zlib.crc32(f"{self.jobs[event.sequence].request.number} {what} ".encode(), self.checksum)
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
