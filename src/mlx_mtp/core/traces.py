"""Compiled functions, and the number of traces that they make."""

import threading
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx.utils import tree_flatten

Function = Callable[..., Any]


class _Made(threading.local):
    """The traces that a thread has made, since MLX keeps traces by thread."""

    def __init__(self) -> None:
        self.n = 0
        self.of: WeakKeyDictionary[Function, set[Hashable]] = WeakKeyDictionary()


_made = _Made()


def n_traces() -> int:
    """The number of traces that this thread has made: each takes milliseconds, or seconds if its kernels are compiled."""
    return _made.n


def compiled(function: Function) -> Function:
    """``mx.compile(function)``, whose traces are counted."""

    def traced(*args: Any) -> Any:
        # MLX calls this to make a trace, or always if compilation is disabled.
        leaves: Any = tree_flatten(args)
        arguments = ((name, x.shape, x.dtype) if isinstance(x, mx.array) else (name, x) for name, x in leaves)
        # The name of the stream, since equal streams differ in their hashes.
        signature = str(mx.default_stream(mx.default_device())), *arguments
        known = _made.of.setdefault(function, set())
        _made.n += signature not in known
        known.add(signature)
        return function(*args)

    return mx.compile(traced)
