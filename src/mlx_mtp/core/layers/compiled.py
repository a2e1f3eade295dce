"""Functions of a module and arrays, compiled once for each kind of module and each shape.

The module is an argument, so its weights are arguments of the trace: layers of one kind share a trace, and new weights take
effect at once. All other attributes are fixed in the trace and define the kind of the module: its class, its numbers, and those
of its submodules.
"""

import copy
import functools
import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import is_dataclass
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...errors import MTPError
from ..traces import compiled

# Traces that a thread keeps, the latest used ones; each takes some 100 KB, and a few milliseconds to make.
MAX_TRACES = 512
IN_TRAINING = (nn.Dropout, nn.Dropout2d, nn.Dropout3d, nn.BatchNorm)  # modules that are no pure functions in training

log = logging.getLogger(__name__)

Function = Callable[..., Any]  # (module, *arrays, **numbers) -> arrays; numbers are fixed in the trace


class UnknownAttribute(NotImplementedError):
    """A module has an attribute of which the kind cannot be told."""


class Kind:
    """The common part of the modules of one kind: a copy of a module, whose arrays are all different ones, without them."""

    def __init__(self, module: nn.Module):
        arrays = _arrays_of(module)
        self.placeholders = {name: mx.array(0) for name in arrays}
        self.template = copy.deepcopy(module, {id(x): self.placeholders[name] for name, x in arrays.items()})

    def filled(self, arrays: dict[str, mx.array]) -> nn.Module:
        if arrays.keys() != self.placeholders.keys():
            raise MTPError("The modules of a model cannot be replaced while it generates: end the generation before.")
        return copy.deepcopy(self.template, {id(x): arrays[name] for name, x in self.placeholders.items()})


_kinds: WeakValueDictionary[Hashable, Kind] = WeakValueDictionary()


class _Traces(threading.local):
    """The traces of a thread, since MLX keeps traces by thread and stream."""

    def __init__(self) -> None:
        self.get = functools.lru_cache(MAX_TRACES)(_make_trace)


def _make_trace(kind: Kind, function: Function, shape: tuple[int, ...], **numbers: int | None) -> Function:
    @functools.wraps(function)
    def of_arrays(module: Any, inputs: Any) -> Any:  # mx.compile passes a module as a plain dictionary
        return function(kind.filled(_arrays_of(module)), *inputs, **numbers)

    return compiled(of_arrays)


_traces = _Traces()


class Compiler:
    """Runs functions of modules compiled, for one generation: it looks at a module at its first call."""

    def __init__(self) -> None:
        # The kinds by the ids of modules, which are kept: otherwise a later module may have the same id.
        self.kinds: dict[int, tuple[Any, Kind | None]] = {}

    def forget(self) -> None:
        """Look at all modules again, at the beginning of a generation."""
        self.kinds = {}

    def run(self, function: Function, module: Any, *inputs: mx.array, **numbers: int | None) -> Any:
        """``function(module, *inputs, **numbers)``, compiled if a trace can have the module.

        Traces are looked up by the shape of the first input.
        """
        if id(module) not in self.kinds:
            self.kinds[id(module)] = module, _kind_of(module)
        _, kind = self.kinds[id(module)]
        if kind is None:
            return function(module, *inputs, **numbers)
        return _traces.get(kind, function, inputs[0].shape, **numbers)(module, inputs)


def _kind_of(module: Any) -> Kind | None:
    try:
        description = _describe(module)
    except UnknownAttribute as e:
        _warn(type(module).__name__, type(e.args[0]).__name__)
        return None
    except NotImplementedError:
        return None
    if (kind := _kinds.get(description)) is None:
        arrays = _arrays_of(module).values()
        if len({id(x) for x in arrays}) < len(arrays):
            return None
        kind = _kinds[description] = Kind(module)
    return kind


@functools.cache
def _warn(module: str, attribute: str) -> None:
    """Warn once of a module that no trace can have."""
    log.warning(
        f"[WARNING] {module} is not compiled, since it has an attribute of type {attribute}: its steps take longer."
    )


def _arrays_of(module: Any) -> dict[str, mx.array]:
    leaves: Any = tree_flatten(module)
    return {name: x for name, x in leaves if isinstance(x, mx.array)}


def _describe(x: Any) -> Hashable:
    """A description that is equal for modules of one kind; a NotImplementedError for one that a trace cannot have."""
    if isinstance(x, mx.array):
        return mx.array
    if isinstance(x, nn.Module):
        if x.training and isinstance(x, IN_TRAINING):
            raise NotImplementedError  # it is no pure function
        attributes = {name: value for name, value in vars(x).items() if name != "_no_grad"}
        return type(x), _describe(attributes), _describe({**x})
    if is_dataclass(x):  # such as the arguments of a model
        return type(x), _describe(vars(x))
    if isinstance(x, dict):
        return tuple((name, _describe(value)) for name, value in x.items())
    if isinstance(x, list | tuple):
        return type(x), *map(_describe, x)
    if x is None or isinstance(x, bool | int | float | str | bytes):
        return type(x), x
    if isinstance(x, mx.distributed.Group):
        raise NotImplementedError  # its module is never compiled
    raise UnknownAttribute(x)
