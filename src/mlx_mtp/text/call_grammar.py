"""The grammar of tool calls in Lark, as the chat templates of Qwen write them; see ``tool_calls``.

Arguments follow the schemas of their tools. A condition that a grammar cannot enforce is an error for ``strict`` tools and is
dropped for others. So each rule that llguidance may fail to parse is on a line of its own, with a free rule to replace it.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from llguidance import regex_to_lark
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools, qwen3_coder

from .schema import ANY, STRING, Json, Leaf, Node, Schema, document, may_match, types_of
from .tool_arguments import to_json
from .tool_calls import END, LONGEST_KEY, START

END_OF_PARAMETER = "\n</parameter>\n"
END_OF_VALUE = r'end_of_value[suffix="\n</parameter>\n"]: /(.|\n)*/'
KEY = rf"/[^\n<>]{{1,{LONGEST_KEY}}}/"
SPACE = r"[\s\x1c-\x1f]*"  # the characters that str.strip removes
SCALARS = {  # the texts that are parsed as these types
    "null": rf"(?i){SPACE}(null|none){SPACE}",
    "boolean": rf"(?i){SPACE}(true|false){SPACE}",
    "integer": rf"{SPACE}-?(0|[1-9][0-9]{{0,300}}){SPACE}",
    "number": rf"{SPACE}-?(0|[1-9][0-9]{{0,200}})(\.[0-9]{{1,99}})?([eE][-+]?[0-9]{{1,2}})?{SPACE}",
}
STRUCTURES = frozenset({"object", "array"})
STRUCTURE = rf"(?s){SPACE}[{{\[(].*"  # the texts of structures
# By property: the rule and the types of its value; None: no value is valid.
Values = dict[str, tuple[str, frozenset[str]] | None]
_quote = json.dumps  # writes a string in Lark


@dataclass(frozen=True)
class Rule:
    text: str  # on one line
    free: str | None = None  # replaces a text that llguidance cannot parse; None: an error instead
    path: str = ""  # the path of its schema, for errors


class Rules:
    """The rules of a grammar, by name, one on each line."""

    def __init__(self) -> None:
        self.by_name: dict[str, Rule] = {}
        self.is_strict = False  # whether rules added from here on have no free replacement

    def __len__(self) -> int:
        return len(self.by_name)

    def add(self, name: str, text: str, free: str | None = None, path: str = "") -> str:
        """Add a rule, see ``Rule``. Return its name."""
        self.by_name[name] = Rule(text, None if self.is_strict else free, path)
        return name

    def add_terminal(self, text: str, free: str, path: str) -> str:
        return self.add(f"T{len(self)}", text, free, path)

    def loosen(self, line: int) -> str | None:
        """Replace the rule on a line by its free one. Return the path of its schema if there is none."""
        name = list(self.by_name)[line - 1]
        rule = self.by_name[name]
        if rule.free is None:
            return rule.path
        self.by_name[name] = Rule(rule.free, None, rule.path)
        return None

    @property
    def lark(self) -> str:
        return "\n".join([*(f"{name}: {rule.text}" for name, rule in self.by_name.items()), END_OF_VALUE])


class CallGrammar:
    """The grammar of one or more calls of these functions.

    Args:
        tools (List[Dict[str, Any]]): The functions, in OpenAI's format.
        is_required (bool): Whether the answer consists of calls only, whose arguments follow their schemas. Otherwise only the
          arguments of ``strict`` functions follow them. Default: ``True``.

    Raises:
        ValueError: The model has another format of calls, a schema is malformed, or a strict schema cannot be enforced.
    """

    def __init__(self, tokenizer: TokenizerWrapper, tools: list[Json], is_required: bool = True):
        writers = {qwen3_coder.parse_tool_call: self._xml_call, json_tools.parse_tool_call: self._json_call}
        write = writers.get(tokenizer.tool_parser)
        if write is None:
            raise ValueError("no grammar describes the calls of this model: leave it out")
        self.rules = Rules()
        self._names: dict[tuple[Node, ...], str] = {}  # the rule of a value, by its schemas
        self._texts = {"value"}  # the rules that match any text
        begin, end = _mark(tokenizer, START), _mark(tokenizer, END)
        names = [f"call_{i}" for i in range(len(tools))]
        self.rules.add("start", r"/\n{0,2}/ calls" if is_required else "calls")
        self.rules.add("calls", r"call (/\n{0,2}/ call)* /\n?/")
        self.rules.add("call", " | ".join(names))
        self.rules.add("value", _free_value(tokenizer))
        for name, tool in zip(names, tools):
            self.rules.is_strict = is_strict = tool.get("strict") is True
            schema = _read(tool, is_strict) if is_required or is_strict else None
            self.rules.add(name, f"{begin} {write(tool['name'], schema)} {end}")

    @property
    def lark(self) -> str:
        return self.rules.lark

    # Calls

    def _json_call(self, name: str, schema: Schema | None) -> str:
        """A call in Qwen3-Next's format."""
        opening = f'\n{{"name": {json.dumps(name)}, "arguments": '
        arguments = '%json {"type": "object"}'
        if schema is not None:
            arguments = self._json(schema, schema.root, frozenset({"object"}))
        return f"{_quote(opening)} {arguments} {_quote('}' + chr(10))}"

    def _xml_call(self, name: str, schema: Schema | None) -> str:
        """A call in the format of Qwen3-Coder and Qwen3.5: each value on lines of its own, strings without quotes."""
        opening, end = f"\n<function={name}>\n", "</function>\n"
        leaves = None if schema is None else self._leaves(schema, schema.root)
        if schema is None or leaves is None:
            return f"{_quote(opening)} ({_parameter(KEY, 'value')})* {_quote(end)}"
        objects = [leaf for leaf in leaves if "object" in types_of(leaf)]
        values = self._distinguishable(schema, [self._values(schema, leaf) for leaf in objects])
        alternatives = [
            text for leaf, own in zip(objects, values) if (text := self._object(schema, leaf, own)) is not None
        ]
        if not alternatives:
            raise ValueError(f"{schema.root.path} allows no object")
        return f"{_quote(opening)} ({' | '.join(alternatives)}) {_quote(end)}"

    def _values(self, schema: Schema, leaf: Leaf) -> Values:
        """The rule of each property that these schemas name, in their order; ``None`` where no value is valid."""
        names = dict.fromkeys(
            name for node in leaf for name in (*(node.properties or ()), *node.own.get("required", ()))
        )
        found: Values = {}
        for name in names:
            nodes = [n for node in leaf for n in node.named(name)]
            can_be_written = 0 < len(name) <= LONGEST_KEY and not set(name) & set("\n<>")
            can_be = can_be_written and not any(n.is_false for n in nodes)
            types = ANY.intersection(*map(schema.types, nodes))
            found[name] = (self._value(schema, nodes), types) if can_be else None
        return found

    def _distinguishable(self, schema: Schema, values: list[Values]) -> list[Values]:
        """The values of alternatives. A value whose text does not show its alternative is left free."""
        for name in dict.fromkeys(chain(*values)):
            found = {value for own in values if (value := own.get(name)) is not None}
            rules, types = {rule for rule, _ in found}, {types for _, types in found}
            is_text_or_not = len(types) > 1 and any("string" in t for t in types)
            if not is_text_or_not and (len(rules) == 1 or not rules & self._texts):
                continue
            if self.rules.is_strict:
                raise ValueError(
                    f"{schema.root.path}: {name} cannot be enforced: it is another string, or none, by the alternative"
                )
            if rules & self._texts:
                values = [{**own, name: own[name] and ("value", ANY)} if name in own else own for own in values]
        return values

    def _object(self, schema: Schema, leaf: Leaf, values: Values) -> str | None:
        """The parameters that all of these schemas allow, in their order."""
        required = {name for node in leaf for name in node.own.get("required", ())}
        if any(values[name] is None for name in required):
            return None
        given = {name: value for name, value in values.items() if value is not None}
        parts = [(_parameter(_quote(name), rule), name in required) for name, (rule, _) in given.items()]
        least = max((node.own.get("minProperties", 0) for node in leaf), default=0)
        most = min((node.own["maxProperties"] for node in leaf if "maxProperties" in node.own), default=None)
        return self._sequence(parts, self._undeclared(schema, leaf, values), int(least), most and int(most))

    def _undeclared(self, schema: Schema, leaf: Leaf, names: Iterable[str]) -> str | None:
        """A parameter that no schema names, if one has a rule for such. The grammar allows two of them with the same name."""
        ruling = [node for node in leaf if node.patterns or node.others is not None]
        if not ruling or any(not _takes_others(node) for node in ruling):
            return None
        if self.rules.is_strict and all(_allows_all_others(node) for node in ruling):
            return None  # as without a rule
        if self.rules.is_strict:
            key = "patternProperties" if ruling[0].patterns else "additionalProperties"
            raise ValueError(f"{ruling[0].path}.{key} cannot be enforced: name the properties, or leave strict out")
        known = "|".join(map(_literal, names))
        others = f" & ~/({known})/" if known else ""
        if len(ruling) > 1:  # the name decides which of them apply
            return _parameter(self.rules.add_terminal(f"{KEY}{others}", KEY, ruling[0].path), "value")
        (node,) = ruling
        keys = [(f"/{_search(pattern)}/", n) for pattern, n in node.patterns.items() if not n.is_false]
        if node.others is not None and not node.others.is_false:
            keys.append(("".join(f" & ~/{_search(pattern)}/" for pattern in node.patterns)[3:], node.others))
        options = []
        for key, n in keys:
            name = self.rules.add_terminal(f"{KEY}{others}{' & ' * bool(key)}{key}", KEY, node.path)
            options.append(_parameter(name, self._value(schema, [n])))
        return f"({' | '.join(options)})"

    def _sequence(self, parts: list[tuple[str, bool]], other: str | None, least: int, most: int | None) -> str | None:
        """The parts in order, optional unless required, then others: from ``least`` to ``most`` in all."""
        n_required = sum(is_required for _, is_required in parts)
        if least <= n_required and (most is None or (other is None and most >= len(parts))):
            texts = [part if is_required else f"({part})?" for part, is_required in parts]
            return " ".join([*texts, *([f"{other}*"] if other else [])]) or '""'
        after: list[str | None] = []  # the rule of the rest, by the number of parts before it
        for n in range(len(parts) + 1):
            need, room = max(0, least - n), None if most is None else most - n
            if room is not None and room < need:
                after.append(None)
            elif other is None:
                after.append('""' if need == 0 else None)
            else:
                after.append(f"{other}{{{need},{'' if room is None else room}}}")
        for i, (part, is_required) in reversed([*enumerate(parts)]):
            here: list[str | None] = []
            for n in range(i + 1):
                taken, left = after[n + 1], None if is_required else after[n]
                ways = [*([f"{part} {taken}"] if taken else []), *([left] if left else [])]
                here.append(self.rules.add(f"rest_{len(self.rules)}", " | ".join(ways)) if ways else None)
            after = here
        return after[0]

    def _leaves(self, schema: Schema, node: Node) -> list[Leaf] | None:
        """The alternatives of a schema whose value is not written as JSON; ``None``: the value is left free."""
        leaves = schema.leaves(node)
        if self.rules.is_strict and leaves is None:
            raise ValueError(f"{node.path} has too many alternatives")
        if self.rules.is_strict and (path := schema.overlapping(node)) is not None:
            raise ValueError(f"{path} cannot be enforced: two of its options may both hold")
        return leaves

    # Values

    def _value(self, schema: Schema, nodes: list[Node]) -> str:
        """The rule of a value and its end. Each schema has one rule, however often it occurs."""
        key = tuple(nodes)
        if key not in self._names:
            node = nodes[0] if len(nodes) == 1 else Node(nodes[0].path if nodes else "", parts=nodes)
            self._names[key] = self._rule_of_value(schema, node)
        return self._names[key]

    def _rule_of_value(self, schema: Schema, node: Node) -> str:
        """Text if the value may be a string; otherwise JSON."""
        types = schema.types(node)
        if "string" not in types:
            return self._add_value(f"{self._json(schema, node, types)} {_quote(END_OF_PARAMETER)}")
        leaves = self._leaves(schema, node)
        if leaves is None or (not self.rules.is_strict and any(_allows_all(leaf, "string") for leaf in leaves)):
            return "value"
        if all(any(_allows_all(leaf, t) for leaf in leaves) for t in types):
            return "value"
        strings = [leaf for leaf in leaves if "string" in types_of(leaf)]
        texts = [text for leaf in strings for text in _listed(leaf) or [] if json.loads(to_json(text, types)) == text]
        conditions = [_conditions(leaf) for leaf in strings if _listed(leaf) is None]
        others = types - STRING
        if conditions:
            return self._text(schema, node, others, [*conditions, *(f"/{_literal(text)}/" for text in texts)])
        options = [f"{self._json(schema, node, others)} {_quote(END_OF_PARAMETER)}"] if others else []
        options += [_quote(text + END_OF_PARAMETER) for text in dict.fromkeys(texts)]
        if not options:
            raise ValueError(f"{node.path} allows no value")
        return self._add_value(" | ".join(options))

    def _add_value(self, text: str) -> str:
        return self.rules.add(f"value_{len(self.rules)}", text)

    def _text(self, schema: Schema, node: Node, others: frozenset[str], conditions: list[str]) -> str:
        """The rule of a text that meets one of the conditions, or that is parsed as another type.

        One regular expression has all cases: a number may turn out to be the beginning of a string. An object or an array may
        not, since strings that begin like their JSON are excluded.
        """
        leaves = schema.leaves(node) or []
        if bound := sorted(t for t in others - STRUCTURES if not any(_allows_all(leaf, t) for leaf in leaves)):
            if self.rules.is_strict:
                raise ValueError(f"{node.path} cannot be enforced: strings and some values of type {bound[0]}")
            return "value"
        begins = f" & ~/{STRUCTURE}/" if others & STRUCTURES else ""
        ways = [f"({condition}{begins})" for condition in conditions] + [
            f"/{SCALARS[t]}/" for t in sorted(others - STRUCTURES)
        ]
        terminal = self.rules.add_terminal(" | ".join(ways), r"/(.|\n)*/", node.path)
        text = self.rules.add(f'text_{len(self.rules)}[suffix="\\n</parameter>\\n"]', terminal).partition("[")[0]
        self._texts.add(text)
        if not others & STRUCTURES:
            return text
        structure = f"{self._json(schema, node, others & STRUCTURES)} {_quote(END_OF_PARAMETER)}"
        self._texts.add(value := self._add_value(f"{structure} | {text}"))
        return value

    def _json(self, schema: Schema, node: Node, types: frozenset[str]) -> str:
        """A rule for JSON of a schema, limited to these types."""
        written = document(node, None if types == schema.types(node) else types)
        free = json.dumps({"type": sorted(types)})
        if not self.rules.is_strict:
            written = {**written, "x-guidance": {"lenient": True}}
        return self.rules.add(f"json_{len(self.rules)}", f"%json {json.dumps(written)}", f"%json {free}", node.path)


def _read(tool: Json, is_strict: bool) -> Schema:
    """A tool's schema; a ValueError if it is malformed, or is strict and cannot be enforced."""
    schema = Schema(tool.get("parameters"), f"{tool['name']}.parameters")
    if schema.malformed:
        raise ValueError(schema.malformed[0])
    if is_strict and schema.unenforced:
        raise ValueError(f"{schema.unenforced[0]} cannot be enforced: leave it out, or strict")
    return schema


def _free_value(tokenizer: TokenizerWrapper) -> str:
    """Any text up to its end, including the template's marks, which are not text for llguidance: a file may quote them."""
    marks = sorted(token for token, added in tokenizer.added_tokens_decoder.items() if not added.special)
    return f"(/(.|\\n)*/ <[{','.join(map(str, marks))}]>)* end_of_value" if marks else "end_of_value"


def _mark(tokenizer: TokenizerWrapper, text: str) -> str:
    """A mark of the template in Lark. llguidance does not treat a mark that is one token as text."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return f"<[{tokens[0]}]>" if len(tokens) == 1 else _quote(text)


def _parameter(key: str, value: str) -> str:
    """A parameter in Lark. Its name and its value are Lark, too."""
    return f'("<parameter=" {key} ">\\n" {value})'


def _allows_all_others(node: Node) -> bool:
    return not node.patterns and node.others is not None and node.others.is_plain and not node.others.parts


def _takes_others(node: Node) -> bool:
    """Whether a schema with a rule for undeclared properties allows any."""
    schemas = [*node.patterns.values(), *([] if node.others is None else [node.others])]
    return any(not n.is_false for n in schemas)


def _listed(leaf: Leaf) -> list[str] | None:
    """The strings that all of these schemas allow, if one of them lists its values."""
    lists = [node.values for node in leaf if node.values is not None]
    if not lists:
        return None
    least, most, patterns = _of_strings(leaf)
    texts = [x for x in lists[0] if isinstance(x, str) and all(x in values for values in lists[1:])]
    texts = [x for x in texts if least <= len(x) <= (len(x) if most is None else most)]
    return [x for x in texts if all(may_match(pattern, x) for pattern in patterns)]


def _conditions(leaf: Leaf) -> str:
    """The conditions of these schemas on a string, in Lark."""
    least, most, patterns = _of_strings(leaf)
    return " & ".join([f"/(?s:.{{{least},{'' if most is None else most}}})/", *(f"/{_search(p)}/" for p in patterns)])


def _of_strings(leaf: Leaf) -> tuple[int, int | None, list[str]]:
    """The least and the most characters of a string, and the patterns that it matches."""
    least = max(int(node.own.get("minLength", 0)) for node in leaf)
    most = min((int(node.own["maxLength"]) for node in leaf if "maxLength" in node.own), default=None)
    return least, most, [node.own["pattern"] for node in leaf if "pattern" in node.own]


def _allows_all(leaf: Leaf, kind: str) -> bool:
    """Whether every value of a type is allowed."""
    return kind in types_of(leaf) and not any(node.restricts(kind) for node in leaf)


def _search(pattern: str) -> str:
    """A pattern that may match anywhere, as a regular expression in Lark that matches the whole text."""
    found = []
    for part in _alternatives(pattern):
        begin, end = "(?s:.*)" if part[:1] != "^" else "", "(?s:.*)"
        part = part.removeprefix("^")
        if part.endswith("$") and (len(part) - len(part[:-1].rstrip("\\"))) % 2:
            part, end = part[:-1], ""
        found.append(f"{begin}({regex_to_lark(part, use_ascii='dw')}){end}")
    return "|".join(found)


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern, separated by ``|`` outside of groups and classes."""
    found, depth, is_class, is_escaped = [""], 0, False, False
    for c in pattern:
        if c == "|" and depth == 0 and not is_class and not is_escaped:
            found.append("")
            continue
        found[-1] += c
        if is_escaped:
            is_escaped = False
        elif c == "\\":
            is_escaped = True
        elif is_class:
            is_class = c != "]"
        else:
            is_class = c == "["
            depth += (c == "(") - (c == ")")
    return found


def _literal(text: str) -> str:
    """A regular expression in Lark for a text."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
