"""From the clients to the generation thread: requests that arrive, and clients that leave."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Queue

from ...batch.generator import PromptResponse, Response
from ..request import ApiError, Request

IDLE = 0.1  # seconds that an idle server waits for a request before it looks for other changes


@dataclass
class Changes:
    """The requests that came and went since the last step.

    Args:
        arrived (List[Request]): New requests, in order.
        gone (Set[int]): The numbers of requests with disconnected clients.
    """

    arrived: list[Request] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.arrived or self.gone)


class Clients:
    """
    Attributes:
        open (Set[Request]): Requests whose answers are awaited.
        is_stopping (bool): Whether the server ends.
    """

    def __init__(self) -> None:
        self.arriving: Queue[Request] = Queue()
        self.open: set[Request] = set()
        self.is_stopping = False

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
        """The changes since the last step; ``None`` when the server ends.

        Args:
            known (Iterable[Request]): The requests that wait or run.
            is_idle (bool): Whether none runs: it then waits a moment for one.
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
