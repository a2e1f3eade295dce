"""A tool's JSON schema: the types of a call's arguments, and what its grammar needs.

Types are judged by ``type``, listed values, references and combinations alone, as a wrong value must reach the tool.
"""

import ast
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from itertools import combinations
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
# The keywords that say something of values, or of the schema. All others are annotations.
KEYWORDS = {
    "$anchor", "$defs", "$dynamicRef", "$id", "$recursiveRef", "$ref", "$schema", "additionalItems",
    "additionalProperties", "allOf", "anyOf", "const", "contains", "definitions", "dependencies", "dependentRequired",
    "dependentSchemas", "discriminator", "else", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "if", "items",
    "maxContains", "maximum", "maxItems", "maxLength", "maxProperties", "minContains", "minimum", "minItems", "minLength",
    "minProperties", "multipleOf", "not", "oneOf", "pattern", "patternProperties", "prefixItems", "properties",
    "propertyNames", "required", "then", "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "x-lark",
}  # fmt: skip
MAX_OPTIONS = 64  # of ``oneOf`` that are compared, each with each
NAMING = {"$ref", "allOf", "const", "enum", "type"}  # the keywords of ``propertyNames`` that list the names
OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "anyOf", "oneOf", "allOf", "prefixItems"}
OF_SCHEMA = {
    "items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "unevaluatedItems",
    "unevaluatedProperties",
}  # fmt: skip
LONGEST_NUMBER = 400  # characters
WORDS = {"null": ("null", "none"), "boolean": ("true", "false")}


def whole(value: Any) -> Any:
    """A float without a fraction as an integer, which it is in JSON Schema, JavaScript, Lua and R; another value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def standard(schema: Any, root: str = "#", parts: list[Json] | None = None) -> Any:
    """A client's schema as the standard has it, with references relative to ``root``: a keyword that is null is absent,
    OpenAPI's ``nullable`` and Python's names of types are types, an unknown ``format`` is dropped. So are annotations, but for
    those beside the whole schema, where references may lead. ``parts`` gets the schema and all within it.
    """
    if not isinstance(schema, dict):
        return schema
    parts = [] if parts is None else parts
    found: Json = {key: whole(value) for key, value in schema.items() if value is not None or key == "const"}
    found = {key: value for key, value in found.items() if key in KEYWORDS or not parts}
    parts.append(found)
    for key in found.keys() & (OF_SCHEMAS | OF_SCHEMA):
        if isinstance(value := found[key], list):
            found[key] = [standard(part, root, parts) for part in value]
        elif isinstance(value, dict) and key in OF_SCHEMAS:
            found[key] = {name: standard(part, root, parts) for name, part in value.items() if part is not None}
        else:
            found[key] = standard(value, root, parts)
    for key in [key for key, values in NOTHING.items() if found.get(key) in values]:
        del found[key]
    if (names := _strings(found.get("type"))) and found["type"] != []:
        names = [PYTHON.get(name, name) for name in names] + ["null"] * (schema.get("nullable") is True)
        found["type"] = names if len(names) > 1 else names[0]
    if isinstance(found.get("format"), str) and found["format"] not in FORMATS:
        del found["format"]
    if isinstance(ref := found.get("$ref"), str) and ref.startswith("#"):
        found["$ref"] = root + ref[1:]
    return found


class Schema:
    """The JSON schema of a tool's parameters, as the client wrote it. A keyword of a wrong type says nothing."""

    ROOT = "#/$defs/root"

    def __init__(self, schema: Any, root: str = ROOT):
        self.all_parts = list[Json]()  # the schema and all within it
        self.root = standard({} if schema is None else schema, root, self.all_parts)
        # Beside a part of the schema, for its references
        self.definitions = {"$defs": {"root": self.root}} if root == self.ROOT else self.root
        self._types: dict[int, frozenset[str]] = {}  # of a part of the schema, by its id
        self._texts: dict[int, list[str] | None] = {}
        self._apart: dict[tuple[int, int], bool] = {}  # of two parts

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

    def parts(self, schema: Any, is_certain: bool = False) -> list[Json]:
        """A schema and those that it is made of: all that may hold, or all that must hold."""
        found = dict[int, Json]()
        todo = [schema]
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

    def are_apart(self, a: Any, b: Any) -> bool:
        """Whether no value is valid for both, as far as it is easily seen, also behind references."""
        if (id(a), id(b)) not in self._apart:
            self._apart[id(a), id(b)] = False  # within themselves, they add nothing
            types = self.types(a) & self.types(b)
            self._apart[id(a), id(b)] = not types or self._is_apart(a, b) or self._is_apart(b, a)
        return self._apart[id(a), id(b)]

    def _is_apart(self, a: Any, b: Any) -> bool:
        """Whether they are by listed values, the first one's alternatives, or a property that it requires."""
        if not (isinstance(a, dict) and isinstance(b, dict)):
            return False
        with suppress(TypeError):  # an object or an array is listed
            if (mine := listed(a)) and (others := listed(b)) and set(mine).isdisjoint(others):
                return True
        names = _strings(a.get("required")) if self.types(a) & self.types(b) == {"object"} else []
        return any(all(self.are_apart(option, b) for option in options) for options in self.factors(a)) or any(
            self.are_apart(_property(a, name), _property(b, name)) for name in names
        )

    def properties(self) -> dict[str, list[Any]]:
        """The schemas of each property; a value must be valid for one of them at least."""
        found: dict[str, list[Any]] = {}
        for part in self.parts(self.root):
            for name, schema in _as(dict, part.get("properties")).items():
                found.setdefault(name, []).append(schema)
        return found

    def required(self) -> list[str]:
        names = [name for part in self.parts(self.root, is_certain=True) for name in _as(list, part.get("required"))]
        return [name for name in names if isinstance(name, str)]

    def undeclared(self) -> list[Any]:
        """The schemas of properties that no schema declares. Those of ``patternProperties`` may have any value."""
        found = [part["additionalProperties"] for part in self.parts(self.root) if "additionalProperties" in part]
        found += [True for part in self.parts(self.root) if _as(dict, part.get("patternProperties"))]
        return [schema for schema in found if schema is not False]

    def types_of_property(self, name: str) -> frozenset[str]:
        """The types that the property of this name may have. A property without a schema is a string."""
        schemas = self.properties().get(name) or self.undeclared()
        try:
            return frozenset().union(*map(self.types, schemas)) or STRING
        except RecursionError:  # a chain of references
            return STRING


def enforceable(schema: Any, root: str = Schema.ROOT) -> Schema:
    """A schema as llguidance enforces it: a property that discriminates is required, ``oneOf`` of options without common values
    is ``anyOf``, and ``propertyNames`` that list the names are properties.
    """
    found = Schema(deepcopy(schema), root)
    for part in found.all_parts:
        name = _as(dict, part.pop("discriminator", None)).get("propertyName")
        for option in (x for options in _as(list, part.get("oneOf")) for x in found.parts(options)):
            if name in _as(dict, option.get("properties")):
                option["required"] = [*dict.fromkeys([*_as(list, option.get("required")), name])]
        names = found.texts(of_names := part.get("propertyNames", True))
        if (
            names is not None
            and "patternProperties" not in part
            and not any(x.keys() - NAMING for x in found.parts(of_names))
        ):
            part |= {"properties": {name: _property(part, name) for name in names}, "additionalProperties": False}
            del part["propertyNames"]
    for part in found.all_parts:
        options = [_as(dict, x) for x in _as(list, part.get("oneOf"))]
        options = [found.resolve(x["$ref"]) if x.keys() == {"$ref"} else x for x in options]
        is_judged = 0 < len(options) <= MAX_OPTIONS and "anyOf" not in part
        if is_judged and all(found.are_apart(a, b) for a, b in combinations(options, 2)):
            part["anyOf"] = part.pop("oneOf")
    return found


def _property(schema: Json, name: str) -> Any:
    others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    return _as(dict, schema.get("properties")).get(name, others)


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
