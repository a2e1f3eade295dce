"""A tool's JSON schema: the types of a call's arguments, and what its grammar needs.

Types are judged by ``type``, listed values, references and combinations alone, as a wrong value must reach the tool.
"""

import ast
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import unquote

T = TypeVar("T")
Json = dict[str, Any]

STRING = frozenset({"string"})
ANY = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", tuple: "array", dict: "object"}
PYTHON = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
# The formats that llguidance enforces
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
NOTHING: dict[str, tuple[Any, ...]] = {  # values of keywords that say nothing, and that llguidance refuses
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
}
OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "anyOf", "oneOf", "allOf", "prefixItems"}
OF_SCHEMA = {"items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not"}
LONGEST_NUMBER = 400  # characters
WORDS = {"null": ("null", "none"), "boolean": ("true", "false")}


def whole(value: Any) -> Any:
    """A float without a fraction as an integer, which it is in JSON Schema, JavaScript, Lua and R; another value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def standard(schema: Any, root: str = "#") -> Any:
    """A client's schema as the standard has it, with references relative to ``root``: a keyword that is null is absent,
    OpenAPI's ``nullable`` and Python's names of types are types, an unknown ``format`` is dropped.
    """
    if not isinstance(schema, dict):
        return schema
    found: Json = {key: whole(value) for key, value in schema.items() if value is not None or key == "const"}
    for key in [key for key, values in NOTHING.items() if found.get(key) in values]:
        del found[key]
    for key in found.keys() & (OF_SCHEMAS | OF_SCHEMA):
        if isinstance(value := found[key], list):
            found[key] = [standard(part, root) for part in value]
        elif isinstance(value, dict) and key in OF_SCHEMAS:
            found[key] = {name: standard(part, root) for name, part in value.items() if part is not None}
        else:
            found[key] = standard(value, root)
    if (names := _strings(found.get("type"))) and found["type"] != []:
        names = [PYTHON.get(name, name) for name in names] + ["null"] * (found.get("nullable") is True)
        found["type"] = names if len(names) > 1 else names[0]
    if isinstance(found.get("format"), str) and found["format"] not in FORMATS:
        del found["format"]
    if isinstance(ref := found.get("$ref"), str) and ref.startswith("#"):
        found["$ref"] = root + ref[1:]
    return found


class Schema:
    """The JSON schema of a tool's parameters, as the client wrote it. A keyword of a wrong type says nothing."""

    ROOT = "#/$defs/root"

    def __init__(self, schema: Any):
        self.root = standard({} if schema is None else schema, self.ROOT)
        self.definitions = {"$defs": {"root": self.root}}  # beside a part of the schema, for its references
        self._types: dict[int, frozenset[str]] = {}  # of a part of the schema, by its id
        self._texts: dict[int, list[str] | None] = {}

    def resolve(self, ref: Any) -> Any:
        """The schema that a reference points to; any schema if it points to none."""
        found: Any = self.definitions if isinstance(ref, str) and ref.startswith("#") else None
        for name in str(ref).split("/")[1:]:
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            is_index = isinstance(found, list) and name.isdecimal() and int(name) < len(found)
            found = found[int(name)] if is_index else found.get(name) if isinstance(found, dict) else None
        return True if found is None else found

    def types(self, schema: Any) -> frozenset[str]:
        if not isinstance(schema, dict):
            return frozenset() if schema is False else ANY
        if id(schema) not in self._types:
            self._types[id(schema)] = frozenset()  # within itself, it adds nothing
            types = ANY
            if names := ANY.intersection(_strings(schema.get("type"))):
                types &= _with_integers(names)
            if (values := listed(schema)) is not None:
                types &= _with_integers(frozenset(TYPES.get(type(value), "null") for value in values))
            for options in self.factors(schema):
                types &= frozenset().union(*map(self.types, options))
            self._types[id(schema)] = types
        return self._types[id(schema)]

    def factors(self, schema: Json) -> Iterator[list[Any]]:
        """Alternatives of a schema: one of each must hold as well."""
        if "$ref" in schema:
            yield [self.resolve(schema["$ref"])]
        for part in _as(list, schema.get("allOf")):
            yield [part]
        for key in ("anyOf", "oneOf"):
            if options := _as(list, schema.get(key)):
                yield options

    def parts(self, is_certain: bool = False) -> list[Json]:
        """The schema and those that it is made of: all that may hold, or all that must hold."""
        found, todo = dict[int, Json](), [self.root]
        for part in todo:  # which grows
            if isinstance(part, dict) and id(part) not in found:
                found[id(part)] = part
                for options in self.factors(part):
                    todo += options if not is_certain or len(options) == 1 else []
        return list(found.values())

    def texts(self, schema: Any) -> list[str] | None:
        """The strings that a schema allows, if it lists them."""
        if not isinstance(schema, dict):
            return None if schema else []
        if id(schema) not in self._texts:
            self._texts[id(schema)] = []
            lists = [] if (values := listed(schema)) is None else [[x for x in values if isinstance(x, str)]]
            for options in self.factors(schema):
                found = [self.texts(option) for option in options if "string" in self.types(option)]
                if all(texts is not None for texts in found):
                    lists.append([x for texts in found for x in texts or ()])
            in_all = set.intersection(*map(set, lists)) if lists else set()
            self._texts[id(schema)] = [x for x in dict.fromkeys(lists[0]) if x in in_all] if lists else None
        return self._texts[id(schema)]

    def properties(self) -> dict[str, list[Any]]:
        """The schemas of each property; a value must be valid for one of them at least."""
        found: dict[str, list[Any]] = {}
        for part in self.parts():
            for name, schema in _as(dict, part.get("properties")).items():
                found.setdefault(name, []).append(schema)
        return found

    def required(self) -> list[str]:
        names = [name for part in self.parts(is_certain=True) for name in _as(list, part.get("required"))]
        return [name for name in names if isinstance(name, str)]

    def undeclared(self) -> list[Any]:
        """The schemas of properties that no schema declares. Those of ``patternProperties`` may have any value."""
        found = [part["additionalProperties"] for part in self.parts() if "additionalProperties" in part]
        found += [True for part in self.parts() if _as(dict, part.get("patternProperties"))]
        return [schema for schema in found if schema is not False]

    def types_of_property(self, name: str) -> frozenset[str]:
        """The types that the property of this name may have. A property without a schema is a string."""
        schemas = self.properties().get(name) or self.undeclared()
        try:
            return frozenset().union(*map(self.types, schemas)) or STRING
        except RecursionError:  # a chain of references
            return STRING


def listed(schema: Json) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _with_integers(types: frozenset[str]) -> frozenset[str]:
    return frozenset(types | {"integer"} if "number" in types else types)


def _as(kind: type[T], value: Any) -> T:
    return value if isinstance(value, kind) else kind()


def _strings(value: Any) -> list[str]:
    return [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, str)]


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
    """Convert a parameter's text to the JSON of a value of one of these types, or of the text if it has none or is a number
    beyond the range of a float: a wrong type tells the model more than a lost call.
    """
    word = text.strip()
    # A model without a value for a number writes null even where the schema does not allow it.
    if word.lower() in WORDS["null"] and ("null" in types or "string" not in types):
        return "null"
    if word.lower() in WORDS["boolean"] and "boolean" in types:
        return word.lower()
    for read in (parse_json, ast.literal_eval) if word[:1] in "{[(" else (parse_json,):
        # Errors of the parsers (ValueError, SyntaxError, RecursionError, MemoryError), or of values that JSON lacks.
        with suppress(Exception):
            value = read(word)
            value = value if "number" in types else whole(value)
            if TYPES.get(type(value)) in types - STRING:
                return json.dumps(value, allow_nan=False)
    return json.dumps(text, ensure_ascii=False)


def _finite(text: str) -> float | str:
    return x if math.isfinite(x := float(text)) else text


# Parses JSON whose strings may contain line breaks; a number too large for a float becomes a string.
parse_json = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=str).decode
