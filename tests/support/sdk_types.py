"""Values of the types that OpenAI's and Anthropic's Python packages declare for requests."""

import types
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

from typing_extensions import get_type_hints, is_typeddict


def values_of(t: Any) -> list[Any]:
    """Values of a type, such that each alternative of a union and each field occurs in one of them, at any depth."""
    return list(_Values().of(t))


class _Values:
    def __init__(self) -> None:
        self.numbers = count()

    def of(self, t: Any, depth: int = 0) -> Iterator[Any]:
        origin, args = get_origin(t), get_args(t)
        if origin in (Union, types.UnionType):
            for alternative in args:
                if alternative is not type(None):
                    yield from self.of(alternative, depth)
        elif origin in (Annotated, Required, NotRequired):
            yield from self.of(args[0], depth)
        elif origin is Literal:
            yield from args[:1]
        elif isinstance(origin, type) and issubclass(origin, dict):
            yield {"key": self.word()}
        elif isinstance(origin, type) and issubclass(origin, Iterable):
            yield from ([value] for value in self.of(args[0], depth))
        elif is_typeddict(t):
            yield from self.dictionaries(t, depth)
        elif t in (str, object, Any):
            yield self.word()
        elif t in (int, float, bool):
            yield t(1)

    def dictionaries(self, t: Any, depth: int) -> Iterator[dict[str, Any]]:
        if depth > 5:
            return
        fields = {name: list(self.of(hint, depth + 1)) for name, hint in get_type_hints(t).items()}
        fields = {name: values for name, values in fields.items() if values}
        if "definition" in fields:
            fields["definition"] = ['start: "a"']  # a grammar
        for i in range(max(map(len, fields.values()), default=0)):
            yield {name: values[i % len(values)] for name, values in fields.items()}

    def word(self) -> str:
        return f"word{next(self.numbers)}"
