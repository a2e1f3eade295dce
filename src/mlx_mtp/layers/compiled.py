"""Functions of a module and arrays, compiled once for each kind of module and each shape.

MLX builds a new graph for every token. With Python calls for each operation, this takes as long as a small model takes to run.
A function of ``mx.compile`` is traced once; then its graph is copied without Python, with fused elementwise operations.

The module is an argument, so its weights are arguments of the trace: layers of one kind share a trace, and new weights take
effect at once. All other attributes are fixed in the trace and define the kind of the module: its class, its numbers, and those
of its submodules. If a submodule is replaced, its arrays usually do not fit the trace, and the kind is looked up again. If it
is replaced by a module of another class whose arrays have the same names and shapes, ``forget_kind`` must be called, as
``update_modules`` does.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import mlx.nn as nn

# Traces that a thread keeps, the latest used ones; each takes some 100 KB, and a few milliseconds to make.
MOST_TRACES = 512

Function = Callable[..., Any]  # (module, *arrays, **numbers) -> arrays; numbers are fixed in the trace


class Kind:
    """A module without its arrays: the common part of the modules of one kind.

    Args:
        template (nn.Module, optional): A module of the kind, without arrays; ``None`` for modules that cannot be traced.
    """

    def __init__(self, template: Any):
        self.template = template

    def __deepcopy__(self, memo: Any) -> "Kind":
        return self


UNTRACEABLE = Kind(None)
_kinds: WeakValueDictionary[Hashable, Kind] = WeakValueDictionary()


class Compilable:
    """A module that looks up its kind again after modules in it are replaced. List it before ``nn.Module`` in the bases."""

    def forget_kind(self) -> None:
        vars(self).pop("_kind", None)

    def update_modules(self, *args: Any, **kwargs: Any) -> Any:
        self.forget_kind()
        return super().update_modules(*args, **kwargs)  # type: ignore[misc]


class _Traces(threading.local):
    """The traces of a thread, since MLX keeps traces by thread and stream."""

    def __init__(self) -> None:
        self.latest: OrderedDict[Hashable, Function] = OrderedDict()
        self.n_made = 0


_traces = _Traces()


def n_traces() -> int:
    """The number of traces that this thread has made. A step that makes a trace takes longer than later steps."""
    return _traces.n_made


def run(function: Function, module: Any, *inputs: mx.array, **numbers: int) -> Any:
    """``function(module, *inputs, **numbers)``, compiled.

    Args:
        function (Callable): A pure function that returns arrays. It may call the modules in ``module``.
        module (nn.Module): The module. The call is not compiled if it is in training, or has an attribute that a trace cannot
          have, such as a distributed group.
        inputs (mx.array): At least one array. Traces are looked up by the shape of the first.
        numbers (int): Numbers, which are fixed in the trace.
    """
    kind = UNTRACEABLE if module.training else vars(module).get("_kind") or _kind_of(module)
    if kind is UNTRACEABLE:
        return function(module, *inputs, **numbers)
    key, latest = (kind, function, inputs[0].shape, *numbers.values()), _traces.latest
    trace = latest.get(key)
    if trace is None:
        trace = latest[key] = _make_trace(kind, function, numbers)
        _traces.n_made += 1
        if len(latest) > MOST_TRACES:
            latest.popitem(last=False)
    else:
        latest.move_to_end(key)
    try:
        return trace(module, inputs)
    except _AnotherKind:
        module._kind = None
        return run(function, module, *inputs, **numbers)


def _make_trace(kind: Kind, function: Function, numbers: dict[str, int]) -> Function:
    def traced(arrays: Any, inputs: Any) -> Any:
        return function(_filled(kind.template, arrays), *inputs, **numbers)

    return mx.compile(traced)


class _AnotherKind(Exception):
    """A module has another kind than recorded."""


class _UntraceableError(Exception):
    """A module has an attribute that a trace cannot have."""


class _TrainingError(Exception):
    """A module is in training."""


def _kind_of(module: Any) -> Kind:
    try:
        description = _describe(module)
    except _TrainingError:
        return UNTRACEABLE
    except _UntraceableError:
        module._kind = UNTRACEABLE
        return UNTRACEABLE
    kind = _kinds.get(description)
    if kind is None:
        kind = _kinds[description] = Kind(_without_arrays(module))
    module._kind = kind
    return kind


def _own(module: nn.Module) -> dict[str, Any]:
    """A module's attributes other than arrays, modules and lists of them."""
    return {name: x for name, x in vars(module).items() if name not in ("_no_grad", "_kind")}


def _describe(x: Any) -> Hashable:
    """A description that is equal for modules of one kind."""
    if isinstance(x, mx.array):
        return mx.array
    if isinstance(x, nn.Module):
        if x.training:
            raise _TrainingError
        return type(x), _describe(_own(x)), _describe({**x})
    if isinstance(x, dict):
        return tuple((name, _describe(value)) for name, value in x.items())
    if isinstance(x, list | tuple):
        return type(x), *map(_describe, x)
    if x is None or isinstance(x, bool | int | float | str | bytes):
        return type(x), x
    raise _UntraceableError


def _without_arrays(x: Any) -> Any:
    if isinstance(x, mx.array):
        return None
    if isinstance(x, nn.Module):
        return _copy(x, {name: _without_arrays(value) for name, value in x.items()})
    if isinstance(x, dict):
        return {name: _without_arrays(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(map(_without_arrays, x))
    return x


def _filled(template: Any, arrays: Any) -> Any:
    """Fill a template with a module's arrays, which ``mx.compile`` passes in plain dictionaries and lists."""
    if isinstance(template, dict):  # a module is one
        if not isinstance(arrays, dict) or template.keys() != arrays.keys():
            raise _AnotherKind
        items = {name: _filled(template[name], x) for name, x in arrays.items()}
        return _copy(template, items) if isinstance(template, nn.Module) else items
    if isinstance(template, list | tuple):
        if not isinstance(arrays, list | tuple) or len(template) != len(arrays):
            raise _AnotherKind
        return type(template)(map(_filled, template, arrays))
    if isinstance(arrays, dict | list | tuple):
        raise _AnotherKind
    return arrays


def _copy(module: nn.Module, items: dict[str, Any]) -> nn.Module:
    """A module with the same attributes but other arrays and modules."""
    copy = type(module).__new__(type(module))
    vars(copy).update(_own(module), _no_grad=set())
    dict.update(copy, items)
    return copy
