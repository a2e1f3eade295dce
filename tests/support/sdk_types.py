"""Values of the types that OpenAI's and Anthropic's Python packages declare for requests."""

import types
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

from typing_extensions import get_type_hints, is_typeddict

numbers = count()  # of words


def values_of(t: Any, depth: int = 0) -> list[Any]:
    """Values of a type, such that each alternative of a union and each field occurs in one of them, at any depth."""
    origin, args = get_origin(t), get_args(t)
    if origin in (Union, types.UnionType):
        return [value for alternative in args for value in values_of(alternative, depth)]
    if origin in (Annotated, Required, NotRequired):
        return values_of(args[0], depth)
    if origin is Literal:
        return [args[0]]
    if t in (str, object, Any):
        return [f"word{next(numbers)}"]
    if isinstance(origin, type) and issubclass(origin, dict):
        return [{"key": f"word{next(numbers)}"}]
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return [[value] for value in values_of(args[0], depth)]
    if not is_typeddict(t) or depth > 5:
        return [t(1)] if t in (int, float, bool) else []
    fields = {name: found for name, hint in get_type_hints(t).items() if (found := values_of(hint, depth + 1))}
    if "definition" in fields:
        fields["definition"] = ['start: "a"']  # a grammar
    n = max(map(len, fields.values()), default=0)
    return [{name: values[i % len(values)] for name, values in fields.items()} for i in range(n)]


def names_of(t: Any, is_read: Callable[[str], bool], within: tuple[Any, ...] = ()) -> Iterator[str]:
    """The names of all fields and types in a type of requests, within those that are read."""
    if not is_typeddict(t):
        if not (isinstance(origin := get_origin(t), type) and issubclass(origin, dict)):
            for inner in get_args(t):
                yield from names_of(inner, is_read, within)
    elif t not in within:
        hints = get_type_hints(t)
        kinds = literals(hints.get("type"))
        yield from kinds
        for name, hint in hints.items() if not kinds or any(map(is_read, kinds)) else ():
            yield name
            if is_read(name):
                yield from names_of(hint, is_read, (*within, t))


def literals(t: Any) -> list[str]:
    """The strings that a type allows."""
    return [t] if isinstance(t, str) else [x for inner in get_args(t) for x in literals(inner)]


def kinds_of(t: Any) -> list[str]:
    """The types of the alternatives of a union of pydantic's models."""
    fields = getattr(t, "model_fields", {})
    return (
        literals(fields["type"].annotation)
        if "type" in fields
        else [x for inner in get_args(t) for x in kinds_of(inner)]
    )
