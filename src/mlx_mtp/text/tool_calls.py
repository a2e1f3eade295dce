r"""Streaming parser of tool calls in a model's text.

The format is that of Qwen3.5 and Qwen3-Coder. In older Qwen models and Qwen3-Next, the block has JSON::

    <tool_call>                          <tool_call>
    <function=NAME>                      {"name": NAME, "arguments": {KEY: VALUE}}
    <parameter=KEY>                      </tool_call>
    VALUE
    </parameter>
    </function>
    </tool_call>

A block may have several functions. Text that is not a valid call remains content. The rules:

- A block begins with ``<tool_call>`` at the beginning of a line or after a block, followed by JSON or by a function with its
  first parameter (or its end). The tag in prose or in a fenced code block (an open ``` or ~~~) is content.
- One line break on either side of a value belongs to the format. Further line breaks belong to the value.
- A value may contain the format's own tags. ``</parameter>`` ends it only before the next ``<parameter=KEY>``, or before
  ``</function>`` and then ``</tool_call>`` or the next function. A key that the call already has is not the next one.
- A value may quote calls. A ``<parameter=KEY>`` on a line of its own within a value opens a quotation, which the next
  ``</parameter>`` closes. That tag ends the value only if the text ends with this block, or if a parameter follows that the
  tool's schema declares and the quotation has not named a function. A value with the whole end of a block and without its
  beginning is ambiguous.
- A JSON block ends at the first ``</tool_call>`` outside its strings. If it is not JSON, it is content, and the text after its
  first tag is parsed again.
- Arguments are streamed (docs/develop/tool-calls.md). Those of an incomplete call end within a string, so that they are never
  valid JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

from .reasoning import fence_after
from .schema import Schema, is_string, parse_json, to_json


@dataclass(frozen=True)
class Text:
    """The next piece of the text for the user."""

    text: str
    start: int = field(default=0, compare=False)  # its position in the output of the model
    # The indices of the tokens whose first character is in this piece.
    tokens: Sequence[int] = field(default=(), compare=False)


@dataclass(frozen=True)
class CallBegins:
    index: int  # the call's number in the answer
    name: str


@dataclass(frozen=True)
class CallArguments:
    index: int
    text: str


@dataclass(frozen=True)
class CallEnds:
    """The call is complete, and its arguments are the JSON of an object."""

    index: int


Event = Text | CallBegins | CallArguments | CallEnds

# Bounded, so that little text is held back, and matched again with each piece.
_S, _NAME = r"\s{0,64}", r"[^\s<>]{1,256}"
LONGEST_KEY = 256  # characters of a parameter's name
_KEY = rf"<parameter=(?P<key>[^\n<>]{{1,{LONGEST_KEY}}})>"
_FUNCTION = rf"<function=(?P<name>{_NAME})>{_S}(?:{_KEY}|(?P<empty></function>))"
START, END = "<tool_call>", "</tool_call>"
BLOCK = regex.compile(rf" {{0,3}}{START}{_S}(?:{_FUNCTION}|(?P<json>(?:\[{_S})?\{{{_S}\"))")
IN_VALUE = regex.compile(
    rf"(?P<quoted>\n(?P<function><function={_NAME}>\n)?<parameter=[^\n<>]{{1,{LONGEST_KEY}}}>\n)|\n?</parameter>"
)
CLOSED = "</parameter>"
AFTER_VALUE = regex.compile(rf"{_S}(?:{_KEY}|</function>{_S}(?:(?P<end>{END})|{_FUNCTION}))")
LAST_FUNCTION = regex.compile(r"\s*</function>\s*")
AFTER_FUNCTION = regex.compile(rf"{_S}(?:(?P<end>{END})|{_FUNCTION})")


class _Buffer:
    """The text that is not parsed yet, the events, and the last line of content outside of blocks."""

    def __init__(self, start: int) -> None:
        self.rest = ""  # the text that is not parsed yet
        self.n_taken = start  # the characters of the output before it
        self.is_last = self.is_cut = False  # whether no text will follow, and whether it was cut off there
        self.events: list[Event] = []  # the events that were not returned yet
        self.n_calls = 0
        self.line = ""  # the last line of content so far
        self.fence = ""  # the marks that opened a code block

    def match(self, pattern: Any, pos: int = 0) -> Any:
        return pattern.match(self.rest, pos, partial=not self.is_last)

    def take(self, n: int) -> str:
        taken, self.rest = self.rest[:n], self.rest[n:]
        self.n_taken += len(taken)
        return taken

    def take_content(self, n: int) -> None:
        """Take the next n characters, up to the end of a line or of the text so far, as content."""
        start, text = self.n_taken, self.take(n)
        if self.events and isinstance(last := self.events[-1], Text):
            self.events[-1] = Text(last.text + text, last.start)
        elif text:
            self.events.append(Text(text, start))
        self.line += text
        if text.endswith("\n"):
            self.fence = fence_after(self.line.rstrip("\n"), self.fence)
            self.line = ""

    def begin_call(self, name: str) -> None:
        self.events.append(CallBegins(self.n_calls, name))
        self.n_calls += 1

    def add_arguments(self, text: str) -> None:
        if self.events and isinstance(last := self.events[-1], CallArguments):
            self.events[-1] = CallArguments(last.index, last.text + text)
        elif text:
            self.events.append(CallArguments(self.n_calls - 1, text))


class _Value:
    """Converts a parameter's value to JSON: a string piece by piece, another value when it is complete."""

    def __init__(self, types: frozenset[str]):
        self.types = types
        self.text = ""  # until it is known to be a string
        self.is_string = self.has_begun = False

    def write(self, text: str) -> str:
        """Add the next piece of its text. Return the next piece of its JSON."""
        if text and not self.has_begun:
            self.has_begun, text = True, text.removeprefix("\n")
        if self.is_string:
            return _escape(text)
        self.text += text
        self.is_string = is_string(self.text, self.types)
        return '"' + _escape(self.text) if self.is_string else ""

    def end(self) -> str:
        written = self.write("")
        return written + ('"' if self.is_string else to_json(self.text, self.types))


class ToolCallParser(_Buffer):
    """Makes events of a text, with the JSON schemas of the parameters of each tool, by name.

    ``start`` is the text's position in the output of the model.
    """

    def __init__(self, schemas: Mapping[str, Any], start: int = 0):
        super().__init__(start)
        self.schemas = schemas
        # Parses a part of the rest and returns whether to continue: content, a value, the text after a function, or JSON.
        self._read = self._content

    def add(self, text: str) -> list[Event]:
        """Add the next piece of the text. Return its events. Text that may be the beginning of a tag is held back."""
        self.rest += text
        while self._read():
            pass
        events, self.events = self.events, []
        return events

    def finish(self, cut: bool) -> list[Event]:
        """End the text. Return the last events. If it was cut, such as by a token limit, the last tags are not assumed."""
        self.is_last, self.is_cut = True, cut
        events = self.add("")
        if self._read == self._in_value and not self.value.is_string:
            events.append(CallArguments(self.n_calls - 1, '"' + _escape(self.value.text)))
        return events

    @property
    def is_at_start(self) -> bool:
        """Whether the text ends with a tag that may begin a block."""
        return self._read == self._content and self.rest.lstrip(" ") == START

    def _content(self) -> bool:
        # A block begins at the beginning of a line, and in no code block.
        if not self.line and not self.fence and (m := self.match(BLOCK)) is not None:
            if m.partial:
                return False
            if m["json"] is None:
                self.take(m.end())
                self._begin_function(m)
            else:
                self.start = self.searched = m.start("json")
                self._read = self._in_json
            return True
        self.take_content(self.rest.find("\n") + 1 or len(self.rest))
        return bool(self.rest)

    # A block in Qwen's format, with one function or several

    def _begin_function(self, m: Any) -> None:
        try:
            self.schema = Schema(self.schemas.get(m["name"]))
        except RecursionError:
            self.schema = Schema(None)  # it is too deep, and says nothing
        self.keys: set[str] = set()
        self.begin_call(m["name"])
        if m["empty"] is None:
            self._begin_value(m["key"])
        else:
            self._end_function("{}")

    def _end_function(self, last: str) -> None:
        self.add_arguments(last)
        self.events.append(CallEnds(self.n_calls - 1))
        self._read = self._after_function

    def _begin_value(self, key: str) -> None:
        self.add_arguments(("{" if not self.keys else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self.keys.add(key)
        self.value = _Value(self.schema.types_of_property(key))
        self.n_quoted = self.n_functions = 0  # open quotations of parameters and functions
        self._read = self._in_value

    def _in_value(self) -> bool:
        m = IN_VALUE.search(self.rest, partial=not self.is_last)
        if m is None or m.start() > 0:
            self.add_arguments(self.value.write(self.take(len(self.rest) if m is None else m.start())))
            return bool(self.rest)
        if m.partial:
            return False
        if m["quoted"]:
            return self._quote(m)
        after = self.match(AFTER_VALUE, m.end())
        if after is not None and (after.partial or self._waits(after)):
            return False
        if after is None or not self._ends(after):
            if self.is_last and not self.is_cut and LAST_FUNCTION.fullmatch(self.rest, m.end()):
                self.take(len(self.rest))
                self.add_arguments(self.value.end())
                self._end_function("}")
            else:
                self.n_quoted = max(0, self.n_quoted - 1)
                if after is not None and (after["end"] or after["name"]):
                    self.n_functions = max(0, self.n_functions - 1)
                self.add_arguments(self.value.write(self.take(m.end())))
            return bool(self.rest)
        self.take(after.end())
        self.add_arguments(self.value.end())
        if after["name"] is None and after["key"] is not None:
            self._begin_value(after["key"])
        else:
            self._end_function("}")
            self._follow(after)
        return True

    def _quote(self, m: Any) -> bool:
        """``<parameter=KEY>`` on a line of its own. Before a closing tag, this line is the end of the value."""
        behind = self.rest[m.end() : m.end() + len(CLOSED)]
        if CLOSED.startswith(behind) and len(behind) < len(CLOSED) and not self.is_last:
            return False
        if behind != CLOSED:
            self.n_quoted += 1
            self.n_functions += m["function"] is not None
        self.add_arguments(self.value.write(self.take(m.end() - 1)))
        return True

    def _waits(self, after: Any) -> bool:
        """Whether the following text decides if a quotation ends here or the block."""
        is_at_end = not self.is_last and not self.rest[after.end() :].strip()
        return bool(self.n_quoted + self.n_functions and after["end"] and is_at_end)

    def _ends(self, after: Any) -> bool:
        if after["name"] is None and after["key"] is not None:
            is_next = not self.n_functions and (not self.n_quoted or after["key"] in self.schema.properties())
            return is_next and after["key"] not in self.keys
        is_at_end = after["end"] is not None and not self.rest[after.end() :].strip()
        return is_at_end or not self.n_quoted + self.n_functions

    def _after_function(self) -> bool:
        m = self.match(AFTER_FUNCTION)
        if m is None:  # the block has no end
            self._read = self._content
        elif m.partial:
            return False
        else:
            self.take(m.end())
            self._follow(m)
        return bool(self.rest)

    def _follow(self, m: Any) -> None:
        if m["end"] is None:
            self._begin_function(m)
        else:
            self._read = self._content

    # A block of JSON, up to the first ``</tool_call>`` outside its strings

    def _in_json(self) -> bool:
        end = self.rest.find(END, self.searched)
        if end < 0 and not self.is_last:
            self.searched = max(self.searched, len(self.rest) - len(END) + 1)
            return False
        calls: list[tuple[str, str]] = []
        try:
            if end >= 0 or not self.is_cut:
                calls = _json_calls(self.rest[self.start : end if end >= 0 else None])
        except Exception as e:  # any error of the parser, or of a value that JSON lacks
            if end >= 0 and str(e).startswith("Unterminated string"):  # which has the tag
                self.searched = end + len(END)
                return True
        self._read = self._content
        if not calls:
            self.take_content(self.start)
            return True
        self.take(end + len(END) if end >= 0 else len(self.rest))
        for name, arguments in calls:
            self.begin_call(name)
            self.events += [CallArguments(self.n_calls - 1, arguments), CallEnds(self.n_calls - 1)]
        return bool(self.rest)


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_calls(text: str) -> list[tuple[str, str]]:
    """The names of a call or of a list of them, and the JSON of their arguments; an error if the text is none."""
    value = parse_json(text)
    return [_json_call(call) for call in (value if isinstance(value, list) else [value])]


def _json_call(call: Any) -> tuple[str, str]:
    name, arguments = call["name"], call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():
        arguments = parse_json(arguments)
    if not (isinstance(name, str) and name and isinstance(arguments or {}, dict)):
        raise ValueError(f"not a call: {call}")
    return name, json.dumps(arguments or {}, allow_nan=False)
