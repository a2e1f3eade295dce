"""A parameter's text, as a model wrote it, as JSON of the type that its schema asks for.

Qwen's format writes every value as text, without quotes: only the schema tells whether ``5`` is a number. A text becomes the
first of these that its schema allows and that it spells: null, a boolean, a number, an object or an array. Everything else
arrives as a string, unchanged: a wrong type tells the model more than a call that is lost.

- null and booleans are also read as Python writes them (``None``, ``True``), and objects and arrays as Python's literals.
- Numbers keep their digits. One that is too large for a float would be infinite to the client, and arrives as a string.
- A schema without types allows all of them. A parameter without a schema is a string.
"""

import ast
import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from .schema import STRING, type_of

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
WORDS = {"null": ("null", "none"), "boolean": ("true", "false")}
LONGEST_NUMBER = 400  # characters


def is_string(start: str, types: frozenset[str]) -> bool:
    """Whether a text that begins with ``start`` is a string, whatever follows."""
    if types == STRING:
        return True
    start = start[: LONGEST_NUMBER + 1].strip().lower()
    if "string" not in types or not start:
        return False
    if any(word.startswith(start) for name in types & WORDS.keys() for word in WORDS[name]):
        return False
    if types & {"integer", "number"} and len(start) <= LONGEST_NUMBER and not start.strip("0123456789+-.e"):
        return False
    return not (types & {"object", "array"} and start[0] in "{[(")


def to_json(text: str, types: frozenset[str]) -> str:
    """A parameter's text -> its JSON, of one of the types that its schema allows."""
    word = text.strip()
    # A model that has no value for a number writes null, whatever the schema says; as a string it would be no better.
    if word.lower() in WORDS["null"] and ("null" in types or "string" not in types):
        return "null"
    if word.lower() in WORDS["boolean"] and "boolean" in types:
        return word.lower()
    if types & {"integer", "number"} and (number := _number(word, types)) is not None:
        return number
    if types & {"object", "array"} and word[:1] in ("{", "[", "("):
        for read in (parse_json, ast.literal_eval):
            if (found := _structure(read, word, types)) is not None:
                return found
    return json.dumps(text, ensure_ascii=False)


def _number(word: str, types: frozenset[str]) -> str | None:
    if len(word) > LONGEST_NUMBER or NUMBER.fullmatch(word) is None or not math.isfinite(float(word)):
        return None
    if "number" in types or not set(word) & set(".eE"):
        return word
    if float(word) == 0:
        return "0"
    value = Decimal(word)
    return str(int(value)) if value == value.to_integral_value() else None


def _structure(read: Callable[[str], Any], text: str, types: frozenset[str]) -> str | None:
    # ValueError, SyntaxError, TypeError, RecursionError or MemoryError: of the parsers, or of a value that JSON lacks.
    try:
        value = read(text)
        value = list(value) if isinstance(value, tuple) else value
        return json.dumps(value, allow_nan=False) if type_of(value) in types & {"object", "array"} else None
    except Exception:
        return None


def parse_json(text: str) -> Any:
    """JSON -> its value; a ValueError if it is none. Strings may have line breaks; numbers beyond floats become strings."""
    values = parse_json_values(text)
    if len(values) != 1:
        raise ValueError(f"{len(values)} values where one belongs")
    return values[0]


def parse_json_values(text: str) -> list[Any]:
    """Values of JSON, one after another."""
    values = []
    while text := text.strip():
        value, end = DECODER.raw_decode(text)
        values.append(value)
        text = text[end:]
    return values


def _finite(text: str) -> float | str:
    return x if math.isfinite(x := float(text)) else text


DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=str)
