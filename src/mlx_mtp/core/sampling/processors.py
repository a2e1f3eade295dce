"""Samplers and logits processors on a window, some positions of which will be rejected.

A function can be called for any position, and for drafts that are then rejected. An object may keep state between calls, so
its sequence decodes without drafts: the object is called once for every token, in order.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

S = TypeVar("S")
T = TypeVar("T")


def keeps_state(f: Callable[..., Any]) -> bool:
    """Whether a sampler or logits processor may keep state between calls: by its attribute ``keeps_state``, if it has one.

    Else an object whose class defines ``__call__`` in Python may, and so may a method. A function, a compiled function and a
    ``partial`` of one do not.
    """
    while isinstance(f, functools.partial):
        f = f.func
    if isinstance(said := getattr(f, "keeps_state", None), bool):
        return said
    return inspect.ismethod(f) or inspect.isfunction(type(f).__call__)


def until_error(f: Callable[[S], T], positions: Iterable[S]) -> list[T]:
    """Call a sampler or processor for the positions of a window, up to the first one for which it raises.

    A window may end there: if the text comes to that position, it is the first of a later window, where the error is raised.
    """
    results: list[T] = []
    for position in positions:
        try:
            with restoring_random_state():
                results.append(f(position))
        except Exception:
            if not results:
                raise
            break
    return results


def seed_of(state: mx.array) -> int:
    """The seed that sets MLX's random state to these two words."""
    high, low = np.array(state).tolist()
    return high << 32 | low


@contextmanager
def restoring_random_state() -> Iterator[None]:
    """Restore MLX's random state after an exception: one in a compiled sampler leaves a state that cannot be used."""
    state = mx.random.state[0]  # type: ignore[index]
    try:
        yield
    except Exception:
        mx.random.seed(seed_of(state))
        raise
