"""Choose the number of prompt tokens to prefill between two steps, so that running answers continue during prefill.

Prefill and decoding share one device. While answers run, the target for the gap between two of their tokens limits the length
of a chunk, and steps follow each chunk until decoding has had its share of the time. Without running answers, a prompt is
prefilled at full speed, in chunks short enough to notice a disconnect within a second. Sizes are a power of two apart, so that
shapes repeat. Nothing here reads a clock.
"""

import math

from ...errors import MTPError
from ..distributed.ranks import Ranks
from ..layers.passes import on_metal

MAX_TOKEN_GAP = 0.5  # seconds
MIN_DECODE_SHARE = 0.33


class PrefillBudget:
    """Chooses the number of prompt tokens to prefill before each step, by the times of the chunks and steps so far.

    A size fits if its tokens, at the speed of the last chunk, take no longer than allowed. Longer chunks are faster per token,
    never slower, so the size may grow until it no longer fits. A speed is valid for texts up to twice as long as the measured
    one. Without a measured speed the chunk is short. On Metal, no chunk is to take longer than ``LONGEST``. Of several ranks,
    rank 0 chooses.
    """

    SHORTEST, UNMEASURED = 16, 64  # tokens of a chunk, unless the step size is less
    IDLE_CHUNK = 0.7  # seconds of a chunk while no answer runs, so that a disconnect is noticed within a second
    LONGEST = 2.0  # seconds of a chunk on Metal, where macOS stops passes that take long
    CHOOSE_EVERY = 8  # steps between two choices on several ranks, which wait for each other to choose
    FADING = 0.8  # of the mean time of a step

    def __init__(
        self,
        prefill_step_size: int,
        max_token_gap: float = MAX_TOKEN_GAP,
        min_decode_share: float = MIN_DECODE_SHARE,
        ranks: Ranks | None = None,
    ):
        if not max_token_gap > 0:
            raise MTPError(f"max_token_gap must be more than 0 seconds, not {max_token_gap}.")
        if not 0 <= min_decode_share < 1:
            raise MTPError(f"min_decode_share must be from 0 to below 1, not {min_decode_share}.")
        self.longest = self.LONGEST if on_metal() else math.inf
        self.max_token_gap, self.ranks = max_token_gap, ranks
        self.decode_per_prefill = min_decode_share / (1 - min_decode_share)  # seconds of decoding for one of prefill
        sizes = [prefill_step_size >> i for i in range(prefill_step_size.bit_length())]
        self.sizes = [n for n in sizes if n >= min(self.SHORTEST, prefill_step_size)]  # the greatest first
        self.chunk = 0  # the size chosen last
        self.seconds_per_token: float | None = None
        self.n_measured = 0  # tokens of the text up to the chunk that showed the speed
        self.step_seconds = 0.0  # of a step, in the mean
        self.owed = 0.0  # seconds of decoding due before the next chunk
        self.n_steps = 0  # before the next choice

    def next(self, n_cached: int, is_running: bool) -> int:
        """The number of prompt tokens to prefill before the next step, after ``n_cached`` others; 0 if a step is due."""
        if is_running and self.n_steps > 0:
            self.n_steps -= 1
            return 0
        choice = self._choose(n_cached, is_running)
        self.chunk, self.n_steps = choice if self.ranks is None else self.ranks.broadcast(choice)
        return self.chunk

    def _choose(self, n_cached: int, is_running: bool) -> tuple[int, int]:
        """(tokens to prefill, steps until the next choice)"""
        seconds, speed = self.seconds(is_running), self.seconds_per_token
        if self.owed > 0:
            n = 1 if self.ranks is None else min(self.owed / max(self.step_seconds, 1e-6), self.CHOOSE_EVERY)
            return 0, math.ceil(n) - 1
        if seconds < math.inf and (speed is None or n_cached > 2 * max(self.n_measured, self.sizes[0])):
            fitting = [n for n in self.sizes if n <= self.UNMEASURED]
        else:
            fitting = [n for n in self.sizes if n * (speed or 0.0) <= min(seconds, self.longest)]
        return [*fitting, self.sizes[-1]][0], 0

    def seconds(self, is_running: bool) -> float:
        """The seconds that work on a prompt may take before the next step; 0 if a step is due."""
        if not is_running:
            self.owed = 0.0
            return max(self.IDLE_CHUNK, self.max_token_gap)
        return 0.0 if self.owed > 0 else self.max_token_gap - self.step_seconds

    def record_chunk(self, n: int, n_cached: int, seconds: float) -> None:
        """Count a chunk of prefill: its tokens, after ``n_cached`` others, and its seconds."""
        self.record(seconds)
        # The short rest of a prompt takes longer per token than a full chunk.
        if 2 * n > self.chunk or (self.seconds_per_token is not None and seconds < n * self.seconds_per_token):
            self.seconds_per_token, self.n_measured = seconds / n, n_cached + n

    def record(self, seconds: float) -> None:
        """Count the seconds of other work on a prompt."""
        self.owed = seconds * self.decode_per_prefill

    def record_step(self, seconds: float) -> None:
        self.owed -= seconds
        is_first = self.step_seconds == 0
        self.step_seconds = seconds if is_first else self.FADING * self.step_seconds + (1 - self.FADING) * seconds
