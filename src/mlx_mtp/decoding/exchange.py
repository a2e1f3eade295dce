"""What the ranks that run one model tell each other while they generate, so that all of them choose alike.

Each rank runs the whole loop. What a step drafts, accepts and yields is a function of the logits, which all ranks have, and of
two things that they do not share: a random state, which rank 0 tells once as a generation begins, and a clock. It is the
seconds of rank 0 that travel, and not its choice of a depth, because the choice depends on the text too, on what was accepted
and on what can be copied: from the same seconds each rank makes it anew, for the text as it is now.

The seconds travel with a verify pass as one more small collective, which nobody waits for: they count once the tokens of that
pass are read, so steps without drafts stay asynchronous. With them goes a checksum of the tokens chosen, which is compared.
"""

import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import Sampler as AnySampler

from ..distributed.ranks import Ranks, unlike_rank_0
from ..sampling.sampler import SeededSampler, TextSampler

CHECKED_EVERY = 8  # passes, where no seconds travel


class Times(Protocol):
    """``StepTimes``, or those of each size of batch."""

    def follow(self, other: Any) -> None: ...


class Exchange:
    """
    Args:
        ranks (Ranks): Who runs the model.
        times (Times, optional): Learn from rank 0's seconds. ``None`` where numbers of drafts are given.

    Attributes:
        unsent (deque[float]): This rank's seconds of steps, until they have been sent.
        received (deque[float]): Rank 0's, once they have arrived.
    """

    def __init__(self, ranks: Ranks, times: Times | None):
        self.ranks, self.times = ranks, times
        self.unsent: deque[float] = deque()
        self.received: deque[float] = deque()
        self.checksum = 0  # of the tokens known, 24 bits, which float32 holds
        self.n_passes = 0
        self.sent: deque[mx.array | None] = deque()  # with the passes whose tokens are not known yet

    def align(self, prompt: mx.array, n_cached: int, sampler: AnySampler | None) -> AnySampler | None:
        """Make sure that all ranks continue the same text, and with rank 0's random state, seed and times.

        Args:
            prompt (mx.array): [T]
            n_cached (int): The number of tokens in the prompt cache.
            sampler (Sampler, optional): This rank's.

        Returns:
            Sampler: The one to use: rank 0's where it has a seed, this rank's own elsewhere.

        Raises:
            ValueError: The prompts or the prompt caches differ.
        """
        tokens: Any = prompt.tolist()
        self._check([_checksum(tokens, 0), n_cached % 2**24], "were given other prompts or prompt caches than rank 0")
        seeded = sampler if isinstance(sampler, SeededSampler | TextSampler) else None
        state, seeded, times = self.ranks.share((_random_state(), seeded, self.times))
        mx.random.seed(state)
        if self.times is not None:
            self.times.follow(times)
        return sampler if seeded is None else seeded

    def _check(self, numbers: list[float], what: str) -> None:
        rows: Any = self.ranks.gather(numbers, mx.array(0)).tolist()
        if others := unlike_rank_0(rows):
            raise ValueError(f"{others} {what}.")

    def send(self, hidden: mx.array) -> list[mx.array]:
        """What to evaluate with a pass that has this output: the next unsent seconds, and the checksum."""
        message = None
        if self.times is not None or self.n_passes % CHECKED_EVERY == 0:
            seconds = self.unsent.popleft() if self.unsent else 0.0  # a step takes longer
            message = self.ranks.gather([seconds, self.checksum], hidden)  # [R, 2]
        self.n_passes += 1
        self.sent.append(message)
        return [] if message is None else [message]

    def receive(self, tokens: list[int]) -> None:
        """Call when the tokens of the oldest pass are known.

        Raises:
            RuntimeError: The ranks have chosen different tokens before.
        """
        message = self.sent.popleft()
        if message is not None:
            rows: Any = message.tolist()
            if others := unlike_rank_0([checksum for _, checksum in rows]):
                raise RuntimeError(
                    f"{others} have chosen other tokens than rank 0: run the same versions, the same files "
                    "and the same kind of machine everywhere."
                )
            if rows[0][0] > 0:
                self.received.append(rows[0][0])
        self.checksum = _checksum(tokens, self.checksum)

    def abandon(self) -> None:
        """Nobody will read the tokens of the passes in flight."""
        while self.sent:
            self.receive([])


@contextmanager
def same_random_state(ranks: Ranks | None, stream: mx.Stream | mx.ThreadLocalStream) -> Iterator[None]:
    """Inside, plain generation of mlx-lm draws the same on all ranks; it leaves nothing pending on its stream."""
    if ranks is None:
        yield
        return
    with mx.stream(stream):
        mx.random.seed(ranks.share(_random_state()))
    try:
        yield
    finally:
        mx.synchronize(stream)


def _random_state() -> int:
    """The seed that sets MLX's random state to what it is."""
    high, low = np.array(mx.random.state[0]).tolist()  # type: ignore[index]
    return high << 32 | low


def _checksum(tokens: list[int], before: int) -> int:
    return zlib.crc32(np.array(tokens, np.uint32).tobytes(), before) & 0xFFFFFF
