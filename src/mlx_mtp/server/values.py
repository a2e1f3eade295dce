"""A parameter's text, as a model wrote it, as JSON of the type that its schema asks for.

Qwen's format writes every value as text, without quotes: what ``5`` is, only the schema can say. A text becomes the first of
these that its schema allows and that it spells: null, a boolean, a number, an object or an array. Everything else arrives as a
string, unchanged: a wrong type tells the model more than a call that is lost.

- null and booleans are also read as Python writes them (``None``, ``True``), and objects and arrays as Python's literals.
- Numbers keep their digits. One that is too large for a float would be infinite to the client, and arrives as a string.
- A schema that says nothing of types allows all of them. A parameter without a schema is a string.
"""

import ast
import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

STRING = frozenset({"string"})
ANY = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
PYTHON = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
WORDS = {"null": ("null", "none"), "boolean": ("true", "false")}
LONGEST_NUMBER = 400  # characters
DEPTH = 32  # of schemas within a schema; what is deeper allows everything


class Types:
    """The types that the schemas of one tool allow.

    Args:
        schema (Any): The JSON schema of the tool's parameters, as the client sent it.
    """

    def __init__(self, schema: Any):
        self.schema = schema if isinstance(schema, dict) else {}
        self._known: dict[int, frozenset[str]] = {}  # by the schema's id: each is read once, however often it is named

    def declares(self, name: str) -> bool:
        properties = self.schema.get("properties")
        return isinstance(properties, dict) and name in properties

    def of(self, name: str) -> frozenset[str]:
        """The names of the JSON types that this parameter may have."""
        if self.declares(name):
            return self.of_schema(self.schema["properties"][name])
        others = self.schema.get("additionalProperties")
        return self.of_schema(others) if isinstance(others, dict) else STRING

    def of_schema(self, schema: Any) -> frozenset[str]:
        """Those of a part of the tool's schema."""
        return self._types(schema, DEPTH)

    def _types(self, schema: Any, depth: int) -> frozenset[str]:
        if not isinstance(schema, dict) or depth == 0:
            return ANY
        if id(schema) not in self._known:
            self._known[id(schema)] = ANY  # a schema that refers to itself
            self._known[id(schema)] = self._read(schema, depth - 1) or ANY
        return self._known[id(schema)]

    def _read(self, schema: dict[str, Any], depth: int) -> frozenset[str]:
        types = ANY
        if "$ref" in schema:
            types &= self._types(self.target(schema["$ref"]), depth)
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            types &= _with_integers({PYTHON.get(name, name) for name in names if isinstance(name, str)} & ANY) or ANY
        for key in ("anyOf", "oneOf"):
            if options := _list(schema, key):
                types &= frozenset[str]().union(*(self._types(option, depth) for option in options))
        for part in _list(schema, "allOf"):
            types &= self._types(part, depth)
        if values := _list(schema, "enum") or [schema[key] for key in ("const",) if key in schema]:
            types &= _with_integers({_type_of(value) for value in values})
        return types | {"null"} if schema.get("nullable") is True else types

    def target(self, ref: Any) -> Any:
        """What a reference within the tool's own schema points to; ``None`` if there is nothing."""
        found: Any = self.schema
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        for name in ref[1:].split("/")[1:]:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return found


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _with_integers(types: set[str]) -> frozenset[str]:
    return frozenset(types | {"integer"} if "number" in types else types)


def _type_of(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"


def is_string(start: str, types: frozenset[str]) -> bool:
    """Whether a text that begins with ``start`` will be a string, however it goes on."""
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
    """A parameter's text -> its JSON.

    Args:
        text (str): Any text.
        types (FrozenSet[str]): What its schema allows.
    """
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
        return json.dumps(value, allow_nan=False) if _type_of(value) in types & {"object", "array"} else None
    except Exception:
        return None


def parse_json(text: str) -> Any:
    """JSON -> its value. Strings may have line breaks, and numbers that a float cannot hold become strings.

    Raises:
        ValueError: It is not JSON.
        RecursionError: It is too deep.
    """
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
