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
    """What clients have done. With what was generated, all that the next steps depend on.

    Args:
        arrived (List[Request]): New requests, in order.
        gone (Set[int]): The numbers of requests whose clients have hung up, or do not want more.
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
        """A client waits for an answer."""
        self.open.add(request)
        self.arriving.put(request)

    def leave(self, request: Request) -> None:
        """The client waits no more."""
        self.open.discard(request)

    def fail_all(self, error: ApiError) -> None:
        """End all open answers, whatever the generation thread is waiting for."""
        for request in self.open.copy():
            request.client.put(error)

    # The generation thread

    def changes(self, known: Iterable[Request], is_idle: bool) -> Changes | None:
        """What clients have done since the last step; ``None`` where the server ends.

        Args:
            known (Iterable[Request]): The requests that wait or run.
            is_idle (bool): Whether none runs. It then waits a moment for one.
        """
        return None if self.is_stopping else self.look(known, wait=is_idle)

    def look(self, known: Iterable[Request], wait: bool) -> Changes:
        """What the clients of this process have done."""
        arrived: list[Request] = []
        with suppress(Empty):
            arrived.append(self.arriving.get(block=wait, timeout=IDLE))
            while True:
                arrived.append(self.arriving.get_nowait())
        return Changes(arrived, {request.number for request in (*known, *arrived) if request.is_gone})

    def after_step(self, read: list[PromptResponse], generated: list[Response]) -> None:
        """A step of the batch generator has made this."""
