"""Conversion of a parameter's text to JSON of the type in its schema.

Qwen's format has all values as text without quotes, so the schema decides whether ``5`` is a number. A text is parsed as the
first of these types that its schema allows: null, a boolean, a number, an object or an array. A text that cannot be parsed
becomes a string, unchanged: a wrong type tells the model more than a lost call.

- Python's ``None``, ``True`` and ``False``, and its literals of lists and dictionaries, are accepted as well.
- Numbers keep their digits. A number beyond the range of a float becomes a string, since clients would read it as infinite.
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
    """Whether a text that begins with ``start`` is a string regardless of the rest."""
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
    """Convert a parameter's text to JSON of one of the types that its schema allows."""
    word = text.strip()
    # A model without a value for a number writes null even where the schema does not allow it.
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
    # Errors of the parsers (ValueError, SyntaxError, TypeError, RecursionError, MemoryError), or of values that JSON lacks.
    try:
        value = read(text)
        value = list(value) if isinstance(value, tuple) else value
        return json.dumps(value, allow_nan=False) if type_of(value) in types & {"object", "array"} else None
    except Exception:
        return None


def parse_json(text: str) -> Any:
    """Parse JSON, or raise a ValueError. Strings may contain line breaks; numbers too large for a float become strings."""
    values = parse_json_values(text)
    if len(values) != 1:
        raise ValueError(f"{len(values)} values instead of one")
    return values[0]


def parse_json_values(text: str) -> list[Any]:
    """Parse a sequence of JSON values."""
    values = []
    while text := text.strip():
        value, end = DECODER.raw_decode(text)
        values.append(value)
        text = text[end:]
    return values


def _finite(text: str) -> float | str:
    return x if math.isfinite(x := float(text)) else text


DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=str)
