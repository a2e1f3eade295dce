"""The processes that run one model together, and how rank 0 tells the others what it has chosen.

Whatever depends on a clock, a random number, a file or a client is rank 0's choice. The ranks run the same program, so each of
them comes to the same call at the same point.

MLX runs a collective on the stream it is called on, and two that are pending on different streams corrupt each other. So all
of this belongs on the stream that the model runs on: call it within ``with mx.stream(...)``, as the model is called.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx

T = TypeVar("T")


class Ranks:
    """
    Args:
        group (mx.distributed.Group): Of two or more processes.
    """

    def __init__(self, group: mx.distributed.Group):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def gather(self, numbers: list[float], after: mx.array) -> mx.array:
        """Every rank's numbers, [R, n] float32, by rank. It does not wait: evaluate it with a pass of the model.

        Args:
            after (mx.array): An output of that pass. Stages of a pipeline run different graphs: this is what makes the
              exchange follow those of the pass on each of them.
        """
        mine: Any = mx.depends(mx.array(numbers, mx.float32), after)
        return mx.distributed.all_gather(mine[None], group=self.group)

    def share(self, value: T) -> T:
        """Rank 0's value, which can be pickled, on every rank. It waits for all of them."""
        data = mx.array(list(pickle.dumps(value)) if self.rank == 0 else [], mx.uint8)
        n: Any = mx.distributed.all_sum(mx.array(data.size), group=self.group).item()
        if self.rank != 0:
            data = mx.zeros(n, mx.uint8)
        received: Any = mx.distributed.all_sum(data, group=self.group)
        value = pickle.loads(bytes(received))
        return value

    def messages(self, message: str) -> list[str]:
        """Every rank's message, by rank. It waits for all of them."""
        text = message.encode()
        sizes: Any = mx.distributed.all_gather(mx.array([len(text)]), group=self.group).tolist()
        if not any(sizes):
            return [""] * self.size
        padded = mx.array(list(text.ljust(max(sizes))), mx.uint8)
        texts: Any = mx.distributed.all_gather(padded[None], group=self.group)  # [R, max(sizes)]
        return [bytes(row)[:n].decode() for row, n in zip(texts, sizes)]


def unlike_rank_0(values: Sequence[object]) -> str:
    """The ranks whose value, by rank, is not that of rank 0: ``"Ranks 1, 3"``; empty if there is none."""
    others = [str(rank) for rank, value in enumerate(values) if value != values[0]]
    return f"Ranks {', '.join(others)}" if others else ""


def from_rank_0(ranks: Ranks | None, call: Callable[[], T]) -> T:
    """What a call returns on rank 0, or the ValueError or OSError that it raises there, on every rank.

    The other ranks do not make the call. Without ranks it is simply made.
    """
    if ranks is None:
        return call()
    value, error = None, None
    if ranks.rank == 0:
        try:
            value = call()
        except (ValueError, OSError) as e:
            error = e
    value, error = ranks.share((value, error))
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


@contextmanager
def together(ranks: Ranks | None) -> Iterator[None]:
    """What each rank does by itself, without an exchange: where it fails on one, it fails on all.

    Raises:
        ValueError: It failed on other ranks alone; the message is that of the first.
    """
    if ranks is None:
        yield
        return
    error = None
    try:
        yield
    except (ValueError, OSError) as e:
        error = e
    messages = ranks.messages("" if error is None else str(error) or type(error).__name__)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message:
            raise ValueError(f"Rank {rank}: {message}")
