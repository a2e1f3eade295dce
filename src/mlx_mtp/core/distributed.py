"""The ranks that run one model, which ``mlx.launch`` starts: rank 0 broadcasts its choices, and all ranks gather numbers.

Whatever depends on a clock, a random number, a file or a client is rank 0's choice. The ranks run the same program, so each of
them makes the same calls in the same order. ``None`` in place of ``Ranks`` is a single process.

MLX runs a collective on the stream it is called on, and two that are pending on different streams corrupt each other. So call
all of these functions on the stream that the model runs on, within ``with mx.stream(...)``.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx

from ..errors import MTPError

T = TypeVar("T")
LOST = "Another rank has ended: see its error, or the line of mlx.launch."


class Ranks:
    """Two or more processes."""

    def __init__(self, group: mx.distributed.Group):
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def gather(self, numbers: list[float], after: mx.array) -> mx.array:
        """Gather every rank's numbers, [R, n] float32, by rank. Does not wait: evaluate the result with a pass of the model."""
        # Stages of a pipeline run different graphs: ``after``, an output of the pass, orders the collective after its own.
        mine: Any = mx.depends(mx.array(numbers, mx.float32), after)
        return mx.distributed.all_gather(mine[None], group=self.group)

    def broadcast(self, value: T, root: int = 0) -> T:
        """Return the value of rank ``root``, which must be picklable, on every rank. Waits for all ranks."""
        data = mx.array(list(pickle.dumps(value)) if self.rank == root else [], mx.uint8)
        n: Any = mx.distributed.all_sum(mx.array(data.size), group=self.group).item()
        if self.rank != root:
            data = mx.zeros(n, mx.uint8)
        received: Any = mx.distributed.all_sum(data, group=self.group)
        return pickle.loads(bytes(received))


def synchronize(stream: mx.Stream | mx.ThreadLocalStream) -> None:
    """Wait for a model's stream and all collectives. Those of a GPU's stream run on the default stream of the CPU."""
    mx.synchronize(stream)
    mx.synchronize(mx.default_stream(mx.cpu))


def differing_ranks(values: Sequence[object]) -> str:
    """Name the ranks whose value differs from rank 0's, ``"Ranks 1, 3"``, given the value of each; empty if there are none."""
    others = [str(rank) for rank, value in enumerate(values) if value != values[0]]
    return f"Ranks {', '.join(others)}" if others else ""


# Calls whose result or error all ranks share, such as those of loading a model


def is_loss(error: BaseException) -> bool:
    """Whether a collective failed because another rank has ended (with MLX's ring; other backends wait for ``mlx.launch``)."""
    return isinstance(error, RuntimeError) and "connection to a peer was lost" in str(error)


def from_rank_0(ranks: Ranks | None, call: Callable[[], T]) -> T:
    """Make a call on rank 0 alone, and return its result, or raise its ValueError or OSError, on every rank."""
    if ranks is None:
        return call()
    value, error = None, None
    if ranks.rank == 0:
        try:
            value = call()
        except (ValueError, OSError) as e:
            error = e
    value, error = ranks.broadcast((value, error))
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def any_rank(ranks: Ranks | None, value: bool) -> bool:
    """Whether the value is true on any rank."""
    return value if ranks is None else any([ranks.broadcast(value, root) for root in range(ranks.size)])


@contextmanager
def raise_on_all(ranks: Ranks | None) -> Iterator[None]:
    """A context for work of each rank by itself, without collectives: if it fails on one rank, the others raise an MTPError."""
    if ranks is None:
        yield
        return
    error = None
    try:
        yield
    except (ValueError, OSError) as e:
        error = e
    message = None if error is None else str(error) or type(error).__name__
    messages = [ranks.broadcast(message, root) for root in range(ranks.size)]
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise MTPError(f"Rank {rank}: {message}")
