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
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..distributed.ranks import Ranks

CHECKED_EVERY = 64  # passes, where no seconds travel


class Paced(Protocol):
    """A ``Pace`` of one sequence or of several."""

    @property
    def depth(self) -> Any: ...

    untold: deque[float]

    def hear(self, seconds: float) -> None: ...


class Exchange:
    """
    Args:
        ranks (Ranks): Who runs the model.
        pace (Paced): Learns from rank 0's seconds, if it has a depth to choose.
    """

    def __init__(self, ranks: Ranks, pace: Paced):
        self.ranks, self.pace = ranks, pace
        self.checksum = 0  # of the tokens known, 24 bits, which float32 holds
        self.n_passes = 0
        self.sent: deque[mx.array | None] = deque()  # with the passes whose tokens are not known yet

    def begin(self, prompt: mx.array, n_cached: int, sampler: Any) -> None:
        """Make sure that all ranks continue the same text, and with rank 0's random state, seed and times.

        Args:
            prompt (mx.array): [T]
            n_cached (int): The number of tokens in the prompt cache.
            sampler (Sampler, optional): Its seed, if it has one, becomes rank 0's.

        Raises:
            ValueError: The prompts or the prompt caches differ.
        """
        tokens: Any = prompt.tolist()
        self._check([_checksum(tokens, 0), n_cached % 2**24], "were given other prompts or prompt caches than rank 0")
        depth, seed = self.pace.depth, getattr(sampler, "seed", None)
        high, low = np.array(mx.random.state[0]).tolist()  # type: ignore[index]
        state, seed, learned = self.ranks.share((high << 32 | low, seed, None if depth is None else vars(depth)))
        mx.random.seed(state)  # which sets the state to just these two words
        if seed is not None:
            sampler.seed = seed
        if depth is not None:
            vars(depth).update(learned)

    def _check(self, numbers: list[float], what: str) -> None:
        rows: Any = self.ranks.gather(numbers, mx.array(0)).tolist()
        if others := [str(r) for r, row in enumerate(rows) if row != rows[0]]:
            raise ValueError(f"Ranks {', '.join(others)} {what}.")

    def send(self, hidden: mx.array) -> list[mx.array]:
        """What to evaluate with a pass that has this output: the next untold seconds, and the checksum."""
        message = None
        if self.pace.depth is not None or self.n_passes % CHECKED_EVERY == 0:
            seconds = self.pace.untold.popleft() if self.pace.untold else 0.0
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
            if others := [str(r) for r, row in enumerate(rows) if row[1] != rows[0][1]]:
                raise RuntimeError(
                    f"Ranks {', '.join(others)} have chosen other tokens than rank 0: run the same versions, the same files "
                    "and the same kind of machine everywhere."
                )
            if rows[0][0] > 0:
                self.pace.hear(rows[0][0])
        self.checksum = _checksum(tokens, self.checksum)


def _checksum(tokens: list[int], before: int) -> int:
    return zlib.crc32(np.array(tokens, np.uint32).tobytes(), before) & 0xFFFFFF
