"""Messages between the ranks that run one model, so that all of them generate the same tokens.

Rank 0 broadcasts its random state before a generation, and the seconds of its steps with the verify passes: they arrive when
the tokens of a pass are read, so steps without drafts stay asynchronous. Each rank chooses the same draft lengths by them.
"""

import zlib
from collections import deque
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import Sampler as AnySampler

from ...errors import MTPError
from ..distributed import Ranks, differing_ranks
from ..pacing.step_times import StepTimes
from ..sampling.sampler import SeededSampler, TextSampler, thread_seed

T = TypeVar("T")


class Exchange:
    """Keeps ``times`` equal to rank 0's."""

    def __init__(self, ranks: Ranks, times: StepTimes):
        self.ranks = ranks
        self.times = times
        self.unsent: deque[float] = deque()  # this rank's seconds of steps
        self.received: deque[float] = deque()  # rank 0's
        self.steps: deque[Any] = deque()  # steps whose seconds have not arrived yet
        self.checksum = 0  # a checksum of the tokens received so far, of 24 bits, which float32 holds
        self.sent: deque[mx.array] = deque()  # the message of each pass whose tokens are not received yet

    def agree(self, prompt: list[int], n_cached: int, sampler: AnySampler | None) -> AnySampler | None:
        """Give all ranks rank 0's random state, seed and times -> the sampler. Raises MTPError if their texts differ."""
        numbers: list[float] = [_checksum(prompt, 0), n_cached % 2**24]
        by_rank: Any = self.ranks.gather(numbers, mx.array(0)).tolist()
        if others := differing_ranks(by_rank):
            raise MTPError(f"{others} were given other prompts or prompt caches than rank 0.")
        seeded = sampler if isinstance(sampler, SeededSampler | TextSampler) else None
        agreed: Any = self.ranks.broadcast((thread_seed(), seeded, self.times))
        seed, seeded, times = agreed
        mx.random.seed(seed)
        self.times.copy_from(times)
        return sampler if seeded is None else seeded

    def swap(self, step: T, seconds: float) -> list[tuple[T, float]]:
        """Send the seconds of a step with the next pass -> the steps whose seconds of rank 0 have arrived, and these."""
        self.steps.append(step)
        self.unsent.append(seconds)
        known = [(self.steps.popleft(), received) for received in self.received]
        self.received.clear()
        return known

    def send(self, hidden: mx.array) -> list[mx.array]:
        """The message to evaluate with a pass with this output [B, T, H]."""
        seconds = self.unsent.popleft() if self.unsent else 0.0  # 0 for none: every step takes longer
        self.sent.append(self.ranks.gather([seconds, self.checksum], hidden))  # [R, 2]
        return [self.sent[-1]]

    def receive(self, tokens: list[int]) -> None:
        """Call when the tokens of the oldest pass are read. Raises RuntimeError if the ranks have chosen other tokens."""
        by_rank: Any = self.sent.popleft().tolist()
        if others := differing_ranks([checksum for _, checksum in by_rank]):
            same = "use the same versions, files and kind of machine on all ranks"
            raise RuntimeError(f"{others} have chosen other tokens than rank 0: {same}.")
        if by_rank[0][0] > 0:
            self.received.append(by_rank[0][0])
        self.checksum = _checksum(tokens, self.checksum)

    def abandon(self) -> None:
        """Receive the messages of the passes in flight, whose tokens are not used."""
        while self.sent:
            self.receive([])


def _checksum(tokens: list[int], before: int) -> int:
    return zlib.crc32(np.array(tokens, np.uint32).tobytes(), before) & 0xFFFFFF
