"""The times of a generation's steps, and whether other generations ran in between."""

from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Generic, TypeVar

from ..layers.compiled import n_traces
from ..pacing.timing import Timing
from .exchange import Exchange

T = TypeVar("T")


class Clock(Generic[T]):
    """Measures how long each step took. Where several ranks run the model, all of them use rank 0's seconds, which come later.

    A caller may alternate between generations that are open at once. The device runs their passes in the order in which they
    were queued, so a step may also wait for a pass of another generation.

    Args:
        timing (Timing): The times of the model, and the generation that last submitted work to the device.
        exchange (Exchange, optional): Sends seconds to the other ranks. Default: ``None`` for one process.
    """

    def __init__(self, timing: Timing, exchange: Exchange | None):
        self.timing, self.turn = timing, object()
        timing.turn = self.turn  # the prefill of this generation submits work first
        self.is_alone = True  # no other generation has submitted work since the last step
        self.last: float | None = None  # the time at which the last step was over
        self.n_traces = 0  # the traces made up to that time
        # Steps that wait for their seconds: (step, whether its time is clear, whether no other generation ran in between).
        self.steps: deque[tuple[T, bool, bool]] = deque()
        self.unsent: deque[float] = deque() if exchange is None else exchange.unsent
        # One process uses its own seconds at once.
        self.received = self.unsent if exchange is None else exchange.received

    def take_turn(self) -> None:
        """Call after submitting work to the device, before the caller can run another generation."""
        self.is_alone = self.is_alone and self.timing.turn is self.turn
        self.timing.turn = self.turn

    def interrupt(self) -> None:
        """Do not measure the next step: other work, such as prefill, took time since the last one."""
        self.last = None

    def record(self, step: T, is_clear: bool) -> bool:
        """Call when a step is over.

        Args:
            step (T): The step, which ``timed`` yields with its seconds.
            is_clear (bool): Whether the time since the last step was spent only on this step, judged by the steps around it.

        Returns:
            bool: Whether ``timed`` will yield the step. It does not yield the first one, nor the first after ``interrupt``.
        """
        now, before = perf_counter(), self.last
        self.take_turn()
        is_clear = is_clear and self.n_traces == n_traces()  # a new shape is traced, and its kernels are compiled
        self.n_traces = n_traces()
        if before is not None:
            self.steps.append((step, is_clear, self.is_alone))
            self.unsent.append(now - before)
        self.last, self.is_alone = now, True
        return before is not None

    def timed(self) -> Iterator[tuple[T, float | None, bool]]:
        """Yield the recorded steps whose seconds have arrived, the oldest first.

        Yields:
            Tuple[T, Optional[float], bool]: The step, its seconds, which are ``None`` where they are not clear, and whether no
            other generation ran in between.
        """
        while self.received:
            (step, is_clear, is_alone), seconds = self.steps.popleft(), self.received.popleft()
            yield step, seconds if is_clear else None, is_alone
