"""Structured output: ``response_format``, a ``tool_choice`` that requires a call, and strict tools."""

import json
import re
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import MTPError
from ..text.answer import functions_of, start_of_calls, think_marks
from ..text.formats import END, LONGEST_KEY, QWEN, Format, format_of
from ..text.grammar import SPACE, Grammar, in_deep_stack, make_grammar, reason, rule_of
from ..text.schema import KEYWORDS, STRING, Json, Schema, enforceable, listed
from ..text.tool_calls import CallArguments, ToolCallParser
from .request import ApiError, Request, StructuredOutput

LARK = "x-lark"  # the keyword of a string's grammar, which no client's schema has: of a custom tool
KEY = rf"/[^\n<>]{{1,{LONGEST_KEY}}}/"
ANY_TEXT = "/(?s:.*)/"
# Behind what a text must not have: with any text, llguidance would count to its length limit
ANY_BYTES = "(~(/a/ & /b/))"
NULL = r"/(?i)\s*(null|none)\s*/"
# Anchors of a regular expression, and what may have their characters: an escape or a class
ANCHORS = re.compile(r"(?P<begin>\\A|\^)|(?P<end>\\z|\$)|\\.|\[\^?\]?(?:\\.|[^\]\\])*", re.DOTALL)
BLANKS = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}  # in JSON, as in llama.cpp
STRUCTURES = frozenset({"object", "array"})
STRUCTURE = r"/(?s:\s*[{\[(].*)/"  # the texts that are parsed as structures
AT_THE_TOP = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$ref",
    "$defs",
    "definitions",
    "$schema",
    "$id",
}
_quote = json.dumps  # writes a string in Lark


def from_response_format(value: Any, param: str) -> StructuredOutput | None:
    """The structured output of a field, OpenAI's ``response_format`` or ``text.format``: text, json_object or json_schema."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    schema = None
    if kind == "json_object":
        schema = value.get("schema", {"type": "object"})  # as in llama.cpp
    elif kind == "json_schema" and isinstance(inner := value.get("json_schema", value), dict):
        schema = inner.get("schema")
    if not isinstance(schema, dict):
        raise ApiError(400, f"{param} must be text, json_object or json_schema with a schema.", param=param)
    return StructuredOutput(param, {"json_schema": schema})


def from_fields(
    outputs: list[StructuredOutput | None], tool_choice: Any, all_tools: list[Json]
) -> tuple[StructuredOutput | None, list[Json]]:
    """The structured output of a request's fields, and the tools that may be called. An answer that may call tools has the
    requested form, or it calls; a grammar in Lark, which may have any rules, allows no calls. One that must call has no form.
    """
    required, tools = _from_tool_choice(tool_choice, all_tools)
    asked = [output for output in outputs if output is not None]
    if len(asked) > 1:
        first, second, *_ = (output.param for output in asked)
        raise ApiError(400, f"{second} cannot be combined with {first}: send one of them.", param=second)
    output = required or next(iter(asked), None)
    functions = functions_of(tools)
    is_strict = any(f.get("strict") is True for f in functions)
    if output is None and (is_strict or 0 < len(tools) < len(all_tools)):
        output = StructuredOutput("strict" if is_strict else "tool_choice", calls=functions, is_required=False)
    elif output is not None and not output.calls and "lark" not in output.grammar:
        output = replace(output, calls=functions)
    return output, tools


def _from_tool_choice(choice: Any, tools: list[Json]) -> tuple[StructuredOutput | None, list[Json]]:
    """The calls that a ``tool_choice`` of any API requires, and the tools that it allows: ``auto``, ``none``, ``required``,
    ``any``, the name of a tool, or a list of allowed tools.
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "allowed_tools":
        given = choice.get("allowed_tools", choice)  # nested in chat completions
        listed, kind = (given.get("tools"), given.get("mode", "auto")) if isinstance(given, dict) else (None, None)
        names = [_name_of(tool) for tool in listed] if isinstance(listed, list) else []
        names = [f["name"] for name in names if isinstance(name, str) for f in _named(functions_of(tools), name)]
        tools = [tool for tool in tools if tool["function"].get("name") in names]
        if kind not in ("auto", "required") or not tools:
            message = "tool_choice: allowed_tools must have a mode, auto or required, and tools of the request."
            raise ApiError(400, message, param="tool_choice")
    if kind in ("auto", "none"):
        return None, tools if kind == "auto" else []
    calls = functions_of(tools)
    missing = "the request has no tools"
    if kind not in ("required", "any"):
        name = _name_of(choice) if kind in ("function", "tool", "custom") else None
        if not isinstance(name, str):
            raise ApiError(400, "tool_choice must be auto, none, required or a tool by its name.", param="tool_choice")
        calls = _named(calls, name)
        missing = f"there is no tool {name[:50]!r}"
    if not calls:
        raise ApiError(400, f"tool_choice requires a call, but {missing}.", param="tool_choice")
    return StructuredOutput("tool_choice", calls=calls), tools


def _named(functions: list[Json], name: str) -> list[Json]:
    """The functions of this name, or the only one that has it within a namespace."""
    inner = [f for f in functions if f["name"].endswith(f"__{name}")]
    return [f for f in functions if f["name"] == name] or (inner if len(inner) == 1 else [])


def _name_of(tool: Any) -> Any:
    inner = tool.get(str(tool.get("type")), tool) if isinstance(tool, dict) else {}
    return inner.get("name") if isinstance(inner, dict) else None


def make_output_grammar(tokenizer: TokenizerWrapper, request: Request, in_reasoning: bool | None) -> list[Grammar]:
    """The logits processor of a request's structured output, if any: a copy of the grammar that the request keeps."""
    output = request.structured_output
    if output is None:
        return []
    after: Any = tokenizer.think_end if in_reasoning else ""
    if not output.is_required:
        format = format_of(tokenizer) or QWEN
        after = partial(start_of_calls, think=think_marks(tokenizer), in_reasoning=in_reasoning, format=format)
    if request.grammar is None:
        grammar = output.grammar
        calls = output.calls
        try:
            if calls and (not grammar or tokenizer.has_tool_calling):
                text = f"{'SPACE? ' if after else ''}{rule_of(**grammar)}" if grammar else ""
                grammar = {"lark": in_deep_stack(lambda: CallGrammar(tokenizer, calls, output.is_required, text).lark)}
            request.grammar = make_grammar(tokenizer, **grammar, after=after)
        except (MTPError, RecursionError) as e:
            why = "it is too deep" if isinstance(e, RecursionError) else str(e)
            raise ApiError(400, f"{output.param}: {why}", param=output.param) from e
    return [request.grammar.copy()]


class CallGrammar:
    """The grammar in Lark of one or more calls of these functions. A parameter that is a string is raw text up to its tag, any
    other is JSON. What cannot be enforced is an error for ``strict`` functions, and left free for others.

    If it is required, the answer consists of calls only, or of ``text``, a rule. Otherwise the first call may lack its tag.
    """

    def __init__(self, tokenizer: TokenizerWrapper, tools: list[Json], is_required: bool = True, text: str = ""):
        if (format := format_of(tokenizer)) is None:
            raise MTPError("no grammar describes the calls of this model: leave it out")
        self.format = format
        write = self._json_call if format.is_json else self._xml_call
        written = format.written
        tag, end = ("", _quote(END)) if format.is_json else (written.function and _quote(written.function), "")
        start = r"/\n{0,2}/ calls" if is_required else "calls"
        first = "(call | function)" if tag and not is_required else "call"
        self._rules: dict[str, str] = {}  # the names of rules by their texts
        functions = []
        for tool in tools:
            self.is_strict = tool.get("strict") is True
            schema = tool.get("parameters") if is_required or self.is_strict else {"additionalProperties": True}
            self.path, self.schema = f"{tool['name']}.parameters", enforceable(schema)
            self._terminals: dict[int, str] = {}  # of the strings of a schema, by its id
            if not isinstance(self.schema.root, dict) or not self.schema.types(self.schema.root) >= {"object"}:
                raise MTPError(f"{self.path} allows no object: it is not the schema of an object")
            functions.append(self._add("function", write(tool["name"])))
        rules = [
            f"start: {start} | {text}" if text else f"start: {start}",
            rf"calls: {first} (/\n{{0,2}}/ call)* /\n?/",
            f"call: {_quote(written.begin)} function {end}",
            f"function: {tag} named",
            f"named: {' | '.join(functions)}",
            f"end: {_quote(written.end)}",
            f"quoted_end[lazy]: {_regex(format.quoted_end)}",
            SPACE,
        ]
        self.lark = "\n".join([*rules, *(f"{name}{text}" for text, name in self._rules.items())])

    def _add(self, name: str, text: str, options: str = "") -> str:
        return self._rules.setdefault(f"{options}: {text}", f"{name}_{len(self._rules)}")

    def _json_call(self, name: str) -> str:
        if any(LARK in schema for schema in self.schema.properties().get("input", []) if isinstance(schema, dict)):
            raise MTPError(
                f"{self.path}.input cannot be enforced in this model's calls, which are JSON: leave the grammar out"
            )
        opening = f'{{"name": {json.dumps(name)}, "arguments": '
        arguments = self._json({"$ref": Schema.ROOT}, frozenset({"object"}), self.path)
        return f"{_quote(opening)} {arguments} {_quote('}' + chr(10))}"

    def _xml_call(self, name: str) -> str:
        """A call with a tag for each parameter, and strings without quotes."""
        written = self.format.written
        properties = self.schema.properties()
        others = self.schema.undeclared()
        required = self.schema.required()
        more, can_end = "", True  # what may follow the parameters: a rule for further ones, or the end of the call
        if others and not self.is_strict:
            known = "|".join(map(_literal, properties))
            schema = others[0] if len(others) == 1 else {"anyOf": others}
            more = f"others_{len(self._rules)}"
            value = self._value(schema, f"{self.path}.additionalProperties", "", more, can_end)
            other = self._add("KEY", f"{KEY}{f' & ~/({known})/' if known else ''}")
            self._rules[f": {other} {_quote(written.keyed)} {value} "] = more
        for key in reversed(dict.fromkeys((*properties, *sorted(required)))):
            path = f"{self.path}.properties.{key}"
            schemas = properties.get(key) or others or [True]
            schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
            can_be_written = 0 < len(key) <= LONGEST_KEY and not set(key) & set("\n<>")
            if can_be_written and self.schema.types(schema):
                value = self._value(schema, path, key, more, can_end)
                skipped = f" | {more}" if more and key not in required else ""
                more = self._add("more", f"{_quote(key + written.keyed)} {value}{skipped}")
                can_end &= key not in required
            elif key in required:
                raise MTPError(f"{self.path} allows no object: {path} allows no value")
        if self.is_strict:  # the parameters as a whole have no condition other than their names, and no wrong shape
            for part in self.schema.parts(self.schema.root):
                wrong = sorted((part.keys() & KEYWORDS) - AT_THE_TOP)
                if wrong or part.get("additionalProperties") not in (None, False, True, {}):
                    which = next(iter(wrong), "additionalProperties")
                    raise MTPError(f"{self.path}.{which} cannot be enforced: leave it out, or strict")
            self._json({"$ref": Schema.ROOT}, frozenset({"object"}), self.path)
        return f"{_quote(name + written.named)} {self._rest(more, can_end)}"

    # Values

    def _value(self, schema: Any, path: str, key: str, more: str, can_end: bool) -> str:
        """The rule of a value and what follows it: ``more`` parameters, or the end. A text that is JSON of another type that
        the schema allows is not a string.
        """
        if isinstance(schema, dict) and LARK in schema:
            rule = f"%lark {{\n{schema[LARK]}\n}}"
            if error := _error(f"start: {rule}"):
                raise MTPError(f"{path} cannot be enforced: {error}")
            return f"({rule} {_quote(self.format.written.valued)} {self._rest(more, can_end)})"
        types = self.schema.types(schema)
        text = self._strings(schema)
        texts = self.schema.texts(schema)
        others = types - STRING
        if self.is_strict:
            self._json(schema, types, path)  # an error if llguidance cannot enforce it
        if text == ANY_TEXT and (not self.is_strict or _is_plain(schema)):
            return self._text(ANY_TEXT, key, more, can_end)
        if text and texts is None and others - STRUCTURES - {"null"}:
            if self.is_strict:
                raise MTPError(f"{path} cannot be enforced: a string or some values of another type")
            return self._text(ANY_TEXT, key, more, can_end)
        ways = []
        if text and texts is not None:
            texts = [x for x in texts if _is_read(x, types, self.format)]
            text = f"({' | '.join(map(_quote, texts))}) & {text}" if texts else ""
        elif text and others:
            text = f"({text} & ~{STRUCTURE})" + f" | {NULL}" * ("null" in others)
            others -= {"null"}
        if text:
            ways.append(self._text(text, key, more, can_end, is_listed=texts is not None))
        if others:
            end = _quote(self.format.written.valued)
            ways.append(f"{self._json(schema, others, path)} {end} {self._rest(more, can_end)}")
        return f"({' | '.join(ways)})"

    def _text(self, text: str, key: str, more: str, can_end: bool, is_listed: bool = False) -> str:
        """The rule of a text and what follows it. Only a text without conditions may quote calls."""
        format = self.format
        is_free = text == ANY_TEXT
        ends = ({format.next_tags: more} if more else {}) | ({format.last_tags: ""} if can_end else {})
        if not is_listed:
            never = [x for x in format.never if not is_free or x not in (*ends, format.quoted)]
            others = "|".join(_literal(name) for name in self.schema.properties() if name != key)
            opened = [format.opened % others] if others else []
            patterns = "|".join([f"(?s:.*)({'|'.join(never)})", *opened])
            text = f"({text}) & ~({_regex(patterns)} {ANY_BYTES})" + r" & ~/(?s:.*)\r/" * (not is_free)
        suffixes = {x: _regex(x) if is_free else _quote(format.exact[x]) for x in ends}
        rules = {x: self._add("text", text, f"[suffix={suffix}]") for x, suffix in suffixes.items()}
        ways = [f"{rules[x]} {then}" for x, then in ends.items()]
        quoted = f"({self._add('quoted', text, f'[suffix={_regex(format.quoted)}]')} quoted_end)* " if is_free else ""
        return self._add("value", f"{quoted}({' | '.join(ways)})")

    def _rest(self, more: str, can_end: bool) -> str:
        """What follows a parameter, or the name of a function."""
        ways = [f"{_quote(self.format.written.parameter)} {more}"] * bool(more) + ["end"] * can_end
        return f"({' | '.join(ways)})"

    def _strings(self, schema: Any) -> str:
        """A terminal for the strings that a schema allows, in Lark; ``""`` if it allows none."""
        if "string" not in self.schema.types(schema):
            return ""
        if not isinstance(schema, dict):
            return ANY_TEXT
        if id(schema) not in self._terminals:
            self._terminals[id(schema)] = ""  # within itself, it adds nothing
            conditions = []
            if (values := listed(schema)) is not None:
                conditions.append(" | ".join(_quote(x) for x in values if isinstance(x, str)))
            for options in self.schema.factors(schema):
                terminals = [*dict.fromkeys(filter(None, map(self._strings, options)))]
                conditions += [] if ANY_TEXT in terminals else [" | ".join(terminals)]
            own = [_search(schema["pattern"])] if isinstance(schema.get("pattern"), str) else []
            if "minLength" in schema or "maxLength" in schema:
                own.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
            # For strict tools, llguidance has read the schema before.
            conditions += [condition for condition in own if self.is_strict or not _error(f"start: T\nT: {condition}")]
            text = " & ".join(f"({condition})" for condition in conditions)
            self._terminals[id(schema)] = self._add("T", text) if text else ANY_TEXT
        return self._terminals[id(schema)]

    def _json(self, schema: Any, types: frozenset[str], path: str) -> str:
        """JSON of a schema, limited to these types, in Lark."""
        names = sorted(types - {"integer"} if "number" in types else types)
        document = {"allOf": [schema, {"type": names}], "x-guidance": {"lenient": not self.is_strict, **BLANKS}}
        if '"$ref"' in json.dumps(schema):
            document |= self.schema.definitions
        error = _error(f"start: %json {json.dumps(document)}")
        if error and self.is_strict:
            raise MTPError(f"{path} cannot be enforced: {error}: leave it out, or strict")
        return f"%json {json.dumps({'type': names, 'x-guidance': BLANKS} if error else document)}"


@lru_cache(maxsize=256)
def _error(lark: str) -> str:
    """Why llguidance cannot read a grammar; ``""`` if it can."""
    error: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark))
    return error and reason(error)


def _regex(pattern: str) -> str:
    return f"/{pattern.replace('/', chr(92) + '/')}/"


def _is_read(text: str, types: frozenset[str], format: Format) -> bool:
    """Whether the parser reads this text of a parameter of these types as it is, before another parameter and at the end."""
    begin, function, named, parameter, keyed, valued, end, _ = format.written
    value = f"{parameter}p{keyed}{text}{valued}"
    more = f"{parameter}q{keyed}{valued}"
    calls = [f"{begin}{function}f{named}{parameters}{end}" for parameters in (value + more, value)]
    parser = ToolCallParser({"f": {"properties": {"p": {"type": sorted(types)}, "q": {"type": "string"}}}}, format)
    found = parser.add("\n".join(calls)) + parser.finish(cut=False)
    read = "".join(event.text for event in found if isinstance(event, CallArguments))
    return read == "".join(json.dumps(x, ensure_ascii=False) for x in ({"p": text, "q": ""}, {"p": text}))


def _is_plain(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return True
    return not schema.keys() - {"type", "anyOf"} and all(map(_is_plain, schema.get("anyOf", ())))


def _search(pattern: str) -> str:
    """A pattern that may match anywhere, as a terminal in Lark that matches the whole text."""
    anchors = {m.lastgroup for m in ANCHORS.finditer(pattern)}
    ways = product({False, "begin" in anchors}, {False, "end" in anchors})
    return " | ".join(_match(pattern, at_begin, at_end) for at_begin, at_end in ways)


def _match(pattern: str, at_begin: bool, at_end: bool) -> str:
    """A match at the text's beginning and end, or anywhere: there, anchors match nothing."""
    never = {"begin": not at_begin, "end": not at_end}
    body = ANCHORS.sub(lambda m: r"[^\s\S]" if never.get(m.lastgroup or "") else m[0], pattern)
    return f"/{'' if at_begin else '(?s:.*)'}({regex_to_lark(body, use_ascii='dw')}){'' if at_end else '(?s:.*)'}/"


def _literal(text: str) -> str:
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
