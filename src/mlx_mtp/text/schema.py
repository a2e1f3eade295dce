"""A client's JSON schema as a graph, for the types of a call's arguments (``tool_calls``) and for the grammar of calls.

References are edges of the graph, so a definition is parsed once however often it is used, and may contain itself. A null
keyword is ignored. A malformed keyword is dropped and listed in ``malformed``; a keyword that the grammars cannot enforce is
dropped and listed in ``unenforced``. Grammars refuse the former, and for ``strict`` tools the latter.

The parser accepts drafts 4 to 2020-12, OpenAPI's ``nullable``, and Python's names of types. A ``format`` is enforced if
llguidance supports it, and is an annotation otherwise, as in the standard.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any
from urllib.parse import unquote

import regex

Json = dict[str, Any]

STRING = frozenset({"string"})
ANY = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
PYTHON = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
FORMATS = (  # the formats that llguidance enforces
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
)
UNENFORCED = (
    *("not", "if", "uniqueItems", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
HARMLESS: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
}
DEPTH = 64  # levels of nested schemas; a reference starts again at 0
MOST_LEAVES = 256  # alternatives of one schema
MOST_WORK = 1 << 18  # combinations to try for all schemas
ROUNDS = 16  # over schemas that contain themselves
MAX_MATCHED = 256  # characters of a text that a pattern is matched against
PATTERN_SECONDS = 0.02  # a match that takes longer counts as possible


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_list(value: Any, of: type) -> bool:
    return isinstance(value, list) and all(isinstance(x, of) for x in value)


NUMBER = _is_number, "a number"
COUNT = _is_count, "a whole number from 0"
BOUND: Any = (lambda x: _is_number(x) or isinstance(x, bool)), "a number"
TEXT: Any = (lambda x: isinstance(x, str)), "a string"
KEYWORDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # about a value itself
    "type": (lambda x: isinstance(x, str) or (_is_list(x, str) and x != []), "a type or a list of types"),
    "enum": (lambda x: isinstance(x, list) and x != [], "a list of values"),
    "const": (lambda x: True, "a value"),
    "required": (lambda x: _is_list(x, str), "a list of names"),
    "multipleOf": (lambda x: _is_number(x) and x > 0, "a number above 0"),
    **dict.fromkeys(("minimum", "maximum"), NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), BOUND),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), COUNT),
    **dict.fromkeys(("pattern", "format"), TEXT),
}
OF_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_TYPE = {  # the keywords that restrict the values of a type
    "integer": OF_NUMBER,
    "number": OF_NUMBER,
    "string": ("minLength", "maxLength", "pattern"),
    "array": ("minItems", "maxItems"),
    "object": ("required", "minProperties", "maxProperties"),
}


@dataclass(eq=False)
class Node:
    """A schema and its subschemas."""

    path: str  # where it is, for errors
    own: Json = field(default_factory=dict)  # its keywords in KEYWORDS; type as a set
    properties: dict[str, "Node"] | None = None
    patterns: dict[str, "Node"] = field(default_factory=dict)
    others: "Node | None" = None  # additionalProperties
    items: "Node | None" = None
    prefix: "list[Node]" = field(default_factory=list)
    parts: "list[Node]" = field(default_factory=list)  # schemas that must hold as well: allOf and $ref
    options: "dict[str, list[Node]]" = field(default_factory=dict)  # anyOf and oneOf: one of each must hold
    is_false: bool = False  # nothing is valid
    is_target: bool = False  # whether a reference points to it

    @property
    def is_plain(self) -> bool:
        """Whether it has no keywords other than its parts and options."""
        has_children = self.properties is not None or self.patterns or self.others or self.items or self.prefix
        return not (self.own or has_children or self.is_false)

    @property
    def types(self) -> frozenset[str]:
        """The types that it allows, ignoring its parts and options."""
        types = self.own.get("type", ANY)
        return types if self.values is None else types & _with_integers({type_of(value) for value in self.values})

    @property
    def values(self) -> list[Any] | None:
        """The values that it lists."""
        return [self.own["const"]] if "const" in self.own else self.own.get("enum")

    def restricts(self, kind: str) -> bool:
        """Whether it allows only some values of a type, ignoring its parts and options."""
        of_object = bool(self.properties or self.patterns or self.others is not None)
        children = {"object": of_object, "array": bool(self.prefix or self.items is not None)}
        names = OF_TYPE.get(kind, ())
        return self.values is not None or children.get(kind, False) or any(name in self.own for name in names)

    def named(self, name: str) -> "list[Node]":
        """The schemas of the property of this name, ignoring its parts and options."""
        found = [node] if (node := (self.properties or {}).get(name)) is not None else []
        found += [node for pattern, node in self.patterns.items() if may_match(pattern, name)]
        return found or ([self.others] if self.others is not None else [])


Leaf = tuple[Node, ...]  # schemas that must all hold, ignoring their parts and options


class Schema:
    """The graph of a JSON schema.

    Args:
        schema (Any): The JSON schema of the client.
        path (str): Where it is, for errors. Default: ``"schema"``.
    """

    def __init__(self, schema: Any, path: str = "schema"):
        self.malformed: list[str] = []
        self.unenforced: list[str] = []
        self._raw = schema
        self._nodes: dict[int, Node] = {}  # by the id of their JSON object
        self._todo: list[tuple[Node, Json, int]] = []
        self._leaves: dict[Node, list[Leaf] | None] = {}
        self._work = 0
        self.root = self._node({} if schema is None else schema, path, 0)
        while self._todo:
            self._read(*self._todo.pop())

    # Parsing

    def _node(self, raw: Any, path: str, depth: int) -> Node:
        if id(raw) in self._nodes and isinstance(raw, dict):
            return self._nodes[id(raw)]
        node = Node(path, is_false=raw is False)
        if isinstance(raw, dict) and depth <= DEPTH:
            self._nodes[id(raw)] = node
            self._todo.append((node, raw, depth))
        elif isinstance(raw, dict):
            self.malformed.append(f"{path[:200]} is deeper than {DEPTH} schemas")
        elif not isinstance(raw, bool):
            self.malformed.append(f"{path} is not a schema, which is an object")
        return node

    def _read(self, node: Node, raw: Json, depth: int) -> None:
        def one(value: Any, *where: str | int) -> Node:
            return self._node(value, ".".join(map(str, (node.path, *where))), depth + 1)

        def some(key: str, is_required: bool = False) -> list[Node]:
            if not isinstance(value := raw[key], list) or (is_required and not value):
                self.malformed.append(f"{node.path}.{key} is not a list of schemas")
                return []
            return [one(part, key, i) for i, part in enumerate(value)]

        def by_name(key: str) -> dict[str, Node]:
            if not isinstance(value := raw[key], dict):
                self.malformed.append(f"{node.path}.{key} is not an object")
                return {}
            return {name: one(part, key, name) for name, part in value.items() if part is not None}

        given = {key for key, value in raw.items() if value is not None}
        for key in [key for key in KEYWORDS if key in given or (key == "const" and key in raw)]:
            self._read_own(node, key, raw[key])
        _read_bounds(node.own)
        if raw.get("nullable") is True and "type" in node.own:
            node.own["type"] |= {"null"}
        if "properties" in given:
            node.properties = by_name("properties")
        if "patternProperties" in given:
            node.patterns = by_name("patternProperties")
        if "additionalProperties" in given and raw["additionalProperties"] is not True:
            node.others = one(raw["additionalProperties"], "additionalProperties")
        elif "additionalProperties" in given:
            node.others = Node(f"{node.path}.additionalProperties")
        rest = "items"
        if "prefixItems" in given:
            node.prefix = some("prefixItems")
        elif isinstance(raw.get("items"), list):
            node.prefix, rest = some("items"), "additionalItems"
        if rest in given:
            node.items = one(raw[rest], rest)
        if "$ref" in given:
            self._read_reference(node, raw["$ref"])
        if "allOf" in given:
            node.parts += some("allOf", is_required=True)
        node.options = {key: some(key, is_required=True) for key in ("anyOf", "oneOf") if key in given}
        for key in UNENFORCED:
            if key in given and raw[key] not in HARMLESS.get(key, ()):
                self.unenforced.append(f"{node.path}.{key}")

    def _read_own(self, node: Node, key: str, value: Any) -> None:
        is_right, what = KEYWORDS[key]
        if not is_right(value):
            self.malformed.append(f"{node.path}.{key} is not {what}")
        elif key == "type":
            names = [value] if isinstance(value, str) else value
            types = {PYTHON.get(name, name) for name in names}
            if not types <= ANY:
                self.unenforced.append(f"{node.path}.type {min(types - ANY)[:50]!r}")
            else:
                node.own[key] = _with_integers(types)
        elif key != "format" or value in FORMATS:
            node.own[key] = value

    def _read_reference(self, node: Node, ref: Any) -> None:
        if not isinstance(ref, str):
            self.malformed.append(f"{node.path}.$ref is not a string")
            return
        found = self._raw
        if ref.startswith("#/") or ref == "#":
            for name in ref.split("/")[1:]:
                name = unquote(name).replace("~1", "/").replace("~0", "~")
                is_index = isinstance(found, list) and name.isdecimal() and int(name) < len(found)
                found = found[int(name)] if is_index else found.get(name) if isinstance(found, dict) else None
        else:
            found = None
        if not isinstance(found, dict | bool):
            self.unenforced.append(f"{node.path}.$ref to {ref[:100]!r}, which the schema does not hold,")
            return
        target = self._node(found, ref, 0)
        target.is_target = True
        node.parts.append(target)

    # Queries

    def leaves(self, node: Node) -> list[Leaf] | None:
        """The alternatives of a schema, each a list of schemas that must all hold. ``None``: too many.

        Alternatives with the same schemas count once.
        """
        if node not in self._leaves:
            todo = [n for n in _in_place(node) if n not in self._leaves]
            self._leaves |= {n: [] for n in todo}
            for _ in range(ROUNDS):
                before = [self._leaves[n] for n in todo]
                for n in todo:
                    self._leaves[n] = self._combine(n)
                if [self._leaves[n] for n in todo] == before:
                    break
            else:
                self._leaves |= dict.fromkeys(todo)
        return self._leaves[node]

    def _combine(self, node: Node) -> list[Leaf] | None:
        if node.is_false:
            return []
        factors = [[part] for part in node.parts] + list(node.options.values())
        found: list[Leaf] = [()] if factors and node.is_plain else [(node,)]
        for factor in factors:
            options: list[Leaf] = []
            for option in factor:
                if (leaves := self._leaves[option]) is None:
                    return None
                options += leaves
            options = _distinct(options)
            self._work += len(found) * len(options)
            if len(options) > MOST_LEAVES or self._work > MOST_WORK:
                return None
            found = _distinct((*a, *b) for a in found for b in options)
            if len(found) > MOST_LEAVES:
                return None
        return found

    def overlapping(self, node: Node) -> str | None:
        """The path of a ``oneOf`` of this schema with two options that may both hold, if there is one."""
        for n in _in_place(node):
            for a, b in combinations(n.options.get("oneOf", ()), 2):
                ways = self.leaves(a), self.leaves(b)
                if None in ways or not all(_are_apart(x, y) for x in ways[0] or [] for y in ways[1] or []):
                    return f"{n.path}.oneOf"
        return None

    def types(self, node: Node) -> frozenset[str]:
        """The types of the values that a schema allows; all types if it has no restriction, or contradicts itself."""
        leaves = self.leaves(node)
        return ANY if leaves is None else frozenset(chain(*map(types_of, leaves))) or ANY

    def declares(self, name: str) -> bool:
        """Whether the schema has a property of this name."""
        return any(name in (node.properties or {}) for leaf in self.leaves(self.root) or [] for node in leaf)

    def types_of_property(self, name: str) -> frozenset[str]:
        """The types that the property of this name may have. A property without a schema is a string."""
        found: set[str] = set()
        for leaf in self.leaves(self.root) or []:
            nodes = [n for node in leaf for n in node.named(name)]
            if nodes and all(self.leaves(n) != [] for n in nodes):
                found |= frozenset.intersection(*map(self.types, nodes))
        return frozenset(found) or STRING


def types_of(leaf: Leaf) -> frozenset[str]:
    return ANY.intersection(*(node.types for node in leaf))


def _are_apart(a: Leaf, b: Leaf) -> bool:
    """Whether no value is valid for both, judged by types, listed values, or those of a property that both require."""
    if not types_of(a) & types_of(b) or _have_apart_values(a, b):
        return True
    if not types_of(a) & types_of(b) <= {"object"}:
        return False
    required = [{name for node in leaf for name in node.own.get("required", ())} for leaf in (a, b)]
    named = [
        [tuple(n for node in leaf for n in node.named(name)) for leaf in (a, b)] for name in required[0] & required[1]
    ]
    return any(_have_apart_values(x, y) for x, y in named)


def _have_apart_values(a: Leaf, b: Leaf) -> bool:
    lists = [[node.values for node in leaf if node.values is not None] for leaf in (a, b)]
    return any(not any(x == y for x in one for y in other) for one in lists[0] for other in lists[1])


def document(root: Node, types: frozenset[str] | None = None) -> Json:
    """A schema as JSON for llguidance, with the definitions that it needs.

    Args:
        types (FrozenSet[str], optional): The schema's types to allow. Default: ``None``, all.
    """
    names: dict[Node, str] = {}

    def child(node: Node) -> Any:
        if node.is_false or not node.is_target:
            return not node.is_false and write(node)
        return {"$ref": f"#/$defs/{names.setdefault(node, f's{len(names)}')}"}

    def write(node: Node) -> Json:
        if node.is_plain and len(node.parts) == 1 and not node.options:
            return child(node.parts[0]) or {"not": {}}
        written = {**node.own} | ({"type": _names(node.own["type"])} if "type" in node.own else {})
        if node.properties is not None:
            written["properties"] = {name: child(n) for name, n in node.properties.items()}
        if node.patterns:
            written["patternProperties"] = {name: child(n) for name, n in node.patterns.items()}
        if node.others is not None:
            written["additionalProperties"] = child(node.others)
        if node.prefix:
            written["prefixItems"] = [child(n) for n in node.prefix]
        if node.items is not None:
            written["items"] = child(node.items)
        if node.parts:
            written["allOf"] = [child(n) for n in node.parts]
        return written | {key: [child(n) for n in options] for key, options in node.options.items()}

    whole: Json = child(root) or {"not": {}}
    if types is not None:
        whole = {"allOf": [whole, {"type": _names(types)}]}
    definitions: Json = {}
    while len(definitions) < len(names):
        for node, name in [(node, name) for node, name in names.items() if name not in definitions]:
            definitions[name] = write(node)
    return {**whole, **({"$defs": definitions} if definitions else {})}


def _names(types: frozenset[str]) -> list[str]:
    return sorted(types - {"integer"} if "number" in types else types)


def _read_bounds(own: Json) -> None:
    """Convert the exclusive bounds of draft 4, which are booleans beside the bound."""
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(own.get(key), bool) and own.pop(key) and bound in own:
            own[key] = own.pop(bound)


def _in_place(node: Node) -> Iterator[Node]:
    """A schema and its parts and options, which apply to the same value, in postorder."""
    seen, todo = {node}, [(node, False)]
    while todo:
        n, is_left = todo.pop()
        if is_left:
            yield n
            continue
        todo.append((n, True))
        more = [m for m in dict.fromkeys((*n.parts, *chain(*n.options.values()))) if m not in seen]
        seen.update(more)
        todo += [(m, False) for m in more]


def _distinct(leaves: Iterable[Leaf]) -> list[Leaf]:
    return list({frozenset(leaf): tuple(dict.fromkeys(leaf)) for leaf in leaves}.values())


def may_match(pattern: str, text: str) -> bool:
    """Whether a pattern matches a text, or the match fails or takes too long."""
    try:
        return regex.search(pattern, text[:MAX_MATCHED], timeout=PATTERN_SECONDS) is not None
    except (regex.error, TimeoutError, RecursionError, OverflowError, MemoryError):
        return True


def _with_integers(types: set[str]) -> frozenset[str]:
    return frozenset(types | {"integer"} if "number" in types else types)


def type_of(value: Any) -> str:
    """The name of a JSON value's type."""
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"
