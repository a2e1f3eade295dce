"""Calls whose result or error all ranks share, such as those of loading a model, and the loss of a rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ...errors import MTPError
from .ranks import Ranks

T = TypeVar("T")
LOST = "Another rank has ended: see its error, or the line of mlx.launch."


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
