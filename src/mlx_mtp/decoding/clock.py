"""How long each step of a generation took, and whether others ran in between."""

from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Generic, TypeVar

from ..layers.compiled import n_traces
from ..pacing.timing import Timing
from .exchange import Exchange

T = TypeVar("T")


class Clock(Generic[T]):
    """Tells how long each step took: by this process's own time, or where several ranks run the model by rank 0's, later.

    A caller may take turns between generations that are open at once. The device runs in order what all of them have queued,
    so a step may also wait for another generation's.

    Args:
        timing (Timing): The model's, which says whose turn it was.
        exchange (Exchange, optional): With the other ranks. ``None`` for one process.
    """

    def __init__(self, timing: Timing, exchange: Exchange | None):
        self.timing, self.turn = timing, object()
        timing.turn = self.turn  # a prompt comes first
        self.is_alone = True  # since the step before
        self.last: float | None = None  # when that was over
        self.n_traces = 0  # that were made up to then
        # Steps whose time is not known here: each with whether it is clear, and whether no other generation ran in between.
        self.steps: deque[tuple[T, bool, bool]] = deque()
        self.unsent: deque[float] = deque() if exchange is None else exchange.unsent
        self.received = self.unsent if exchange is None else exchange.received  # one process knows its own at once

    def take_turn(self) -> None:
        """Call when the device was given work, before the caller can turn to another generation."""
        self.is_alone = self.is_alone and self.timing.turn is self.turn
        self.timing.turn = self.turn

    def interrupt(self) -> None:
        """Something else than steps took time."""
        self.last = None

    def record(self, step: T, is_clear: bool) -> bool:
        """A step is over -> whether it will be among the ``known``: not the first, and the first after an interruption.

        Args:
            step (T): Handed back by ``known``.
            is_clear (bool): Whether the time until now is that of such a step, as far as the steps beside it tell.
        """
        now, before = perf_counter(), self.last
        self.take_turn()
        is_clear = (
            is_clear and self.n_traces == n_traces()
        )  # a step of a new shape is traced, and its kernels are compiled
        self.n_traces = n_traces()
        if before is not None:
            self.steps.append((step, is_clear, self.is_alone))
            self.unsent.append(now - before)
        self.last, self.is_alone = now, True
        return before is not None

    def known(self) -> Iterator[tuple[T, float | None, bool]]:
        """The oldest steps whose time is known now: (step, its seconds, ``None`` where they are not clear, whether no other
        generation ran in between)"""
        while self.received:
            (step, is_clear, is_alone), seconds = self.steps.popleft(), self.received.popleft()
            yield step, seconds if is_clear else None, is_alone
