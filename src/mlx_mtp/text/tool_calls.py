r"""Tool calls in a model's text, read while it is being written.

The format is that of Qwen3.5 and Qwen3-Coder. Older Qwen models, and Qwen3-Next, write JSON into the block::

    <tool_call>                          <tool_call>
    <function=NAME>                      {"name": NAME, "arguments": {KEY: VALUE}}
    <parameter=KEY>                      </tool_call>
    VALUE
    </parameter>
    </function>
    </tool_call>

A block may hold several functions. What is no call is content, and nothing of the text is lost. The rules:

- A block begins where ``<tool_call>`` begins a line, or follows a block, and JSON or a function with its first parameter (or
  its end) follows. So the tag in prose is content, and so is what a fenced code block (an open ``` or ~~~) quotes.
- Of the line breaks around a value, one on either side is the format's. The rest is the value's.
- A value may hold the format's own tags. ``</parameter>`` ends it only before the next ``<parameter=KEY>``, or before
  ``</function>`` and then ``</tool_call>`` or the next function. A key that the call has already is not the next one.
- A value may quote calls. A ``<parameter=KEY>`` on a line of its own within a value opens a quotation, which the next
  ``</parameter>`` closes. That one ends the value only if the text ends with this block, or if a parameter follows that the
  tool's schema declares and the quotation has not named a function. What no reader could tell apart: a value that holds a whole
  end of a block and not its beginning.
- A JSON block ends at the first ``</tool_call>`` outside its strings. One that is not JSON is content, and the text behind its
  first tag is read again.
- The arguments of Qwen's format come as they are written: strings piece by piece, other values when they are complete, typed by
  the tool's schema (see ``values``). Joined, they are the JSON of an object. Those of a JSON block come at once.
- A call that the text does not complete keeps its beginning: its arguments end within a string, so that they are never JSON.
"""

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

from .reasoning import fence_after
from .schema import Schema
from .tool_arguments import is_string, parse_json, parse_json_values, to_json


@dataclass(frozen=True)
class Text:
    """What the model says to the user.

    Args:
        text (str): The next piece of it.
        tokens (Sequence[int]): The indices, in the answer, of the tokens that it begins to show. Default: none are known.
    """

    text: str
    tokens: Sequence[int] = field(default=(), compare=False)


@dataclass(frozen=True)
class CallBegins:
    index: int  # of the call in the answer
    name: str
    id: str | None = None  # where the model has given one


@dataclass(frozen=True)
class CallArguments:
    """The next piece of a call's arguments, which are JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnds:
    """The call is complete, and its arguments are the JSON of an object."""

    index: int


Event = Text | CallBegins | CallArguments | CallEnds

# Bounded, so that no text is held for long, and matched again with each piece.
_S, _NAME = r"\s{0,64}", r"[^\s<>]{1,256}"
_KEY = r"<parameter=(?P<key>[^\n<>]{1,256})>"
_FUNCTION = rf"<function=(?P<name>{_NAME})>{_S}(?:{_KEY}|(?P<empty></function>))"
START, END = "<tool_call>", "</tool_call>"
BLOCK = regex.compile(rf" {{0,3}}{START}{_S}(?:{_FUNCTION}|(?P<json>(?:\[{_S})?\{{{_S}[\"']))")
IN_VALUE = regex.compile(
    rf"(?P<quoted>\n(?P<function><function={_NAME}>\n)?<parameter=[^\n<>]{{1,256}}>\n)|\n?</parameter>"
)
CLOSED = "</parameter>"
AFTER_VALUE = regex.compile(rf"{_S}(?:{_KEY}|</function>{_S}(?:(?P<end>{END})|{_FUNCTION}))")
LAST_FUNCTION = regex.compile(r"\s*</function>\s*")
AFTER_FUNCTION = regex.compile(rf"{_S}(?:(?P<end>{END})|{_FUNCTION})")
IN_JSON = regex.compile(rf'\\.|"|{END}', regex.DOTALL)


class ToolCallParser:
    """
    Args:
        schemas (Mapping[str, Any]): The tools' names -> the JSON schemas of their parameters.
    """

    def __init__(self, schemas: Mapping[str, Any]):
        self._schemas = {name: Schema(schema) for name, schema in schemas.items()}
        self._read: Callable[[], bool] = self._read_text  # what reads the rest -> whether to go on
        self._rest = ""  # of the text, not read yet
        self._is_last = False  # no text will follow
        self._is_cut = False
        self._events: list[Event] = []
        self.n_calls = 0
        self._line = ""  # what has been read of a line of content
        self._fence = ""  # the marks that opened a code block

    def add(self, text: str) -> list[Event]:
        """The next piece of the text -> what it says. Text that may be the beginning of a tag waits for more."""
        self._rest += text
        while self._read():
            pass
        events, self._events = self._events, []
        return events

    def finish(self, cut: bool) -> list[Event]:
        """The end of the text -> the rest of what it says.

        Args:
            cut (bool): Whether the text was cut off, such as by a limit. The last tags are then not taken as written.
        """
        self._is_last, self._is_cut = True, cut
        events = self.add("")
        if self._read == self._read_value and not self._is_open:
            events.append(CallArguments(self.n_calls - 1, '"' + _escape(self._value)))
        return events

    @property
    def is_at_start(self) -> bool:
        """Whether what came last is the tag that begins a block, if what follows is a call."""
        return self._read == self._read_text and self._rest.lstrip(" ") == START

    def _match(self, pattern: Any, pos: int = 0) -> Any:
        return pattern.match(self._rest, pos, partial=not self._is_last)

    def _take(self, n: int) -> str:
        taken, self._rest = self._rest[:n], self._rest[n:]
        return taken

    # Content

    def _say(self, text: str) -> None:
        if self._events and isinstance(last := self._events[-1], Text):
            self._events[-1] = Text(last.text + text)
        elif text:
            self._events.append(Text(text))

    def _read_text(self) -> bool:
        if not self._line and not self._fence and (m := self._match(BLOCK)) is not None:
            if m.partial:
                return False
            if m["json"] is None:
                self._take(m.end())
                self._begin(m)
            else:
                self._begin_json(m.start("json"))
            return True
        self._pass(self._rest.find("\n") + 1 or len(self._rest))
        return bool(self._rest)

    def _pass(self, n: int) -> None:
        """The next n characters, which end at the end of a line or of what is known, are content."""
        text = self._take(n)
        self._say(text)
        self._line += text
        if text.endswith("\n"):
            self._fence = fence_after(self._line.rstrip("\n"), self._fence)
            self._line = ""

    # A call in Qwen's format

    def _begin(self, m: Any) -> None:
        """A function's tag, and its first parameter's or its end."""
        self._schema = self._schemas.get(m["name"], Schema(None))
        self._keys: set[str] = set()
        self._events.append(CallBegins(self.n_calls, m["name"]))
        self.n_calls += 1
        if m["empty"] is None:
            self._begin_value(m["key"])
        else:
            self._end("{}")

    def _end(self, last: str) -> None:
        self._argue(last)
        self._events.append(CallEnds(self.n_calls - 1))
        self._read = self._read_after_function

    def _argue(self, text: str) -> None:
        if self._events and isinstance(last := self._events[-1], CallArguments):
            self._events[-1] = CallArguments(last.index, last.text + text)
        elif text:
            self._events.append(CallArguments(self.n_calls - 1, text))

    def _begin_value(self, key: str) -> None:
        self._argue(("{" if not self._keys else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._keys.add(key)
        self._value_types = self._schema.types_of_property(key)
        self._value = ""  # its text, until it is known to be a string
        self._is_open = False  # it is known to be one
        self._is_begun = False  # its first character has been read
        self._n_quoted = self._n_functions = 0  # parameters and functions that it quotes, and has not closed
        self._read = self._read_value

    def _write(self, text: str) -> None:
        """The next piece of a value."""
        if text and not self._is_begun:
            self._is_begun, text = True, text.removeprefix("\n")
        if not self._is_open and is_string(self._value + text, self._value_types):
            self._is_open = True
            text = self._value + text
            self._argue('"')
        if self._is_open:
            self._argue(_escape(text))
        else:
            self._value += text

    def _end_value(self) -> None:
        self._write("")
        self._argue('"' if self._is_open else to_json(self._value, self._value_types))

    def _read_value(self) -> bool:
        m = IN_VALUE.search(self._rest, partial=not self._is_last)
        if m is None or m.start() > 0:
            self._write(self._take(len(self._rest) if m is None else m.start()))
            return bool(self._rest)
        if m.partial:
            return False
        if m["quoted"]:
            return self._read_quoted(m)
        after = self._match(AFTER_VALUE, m.end())
        if after is not None and (after.partial or self._waits(after)):
            return False
        if after is None or not self._ends(after):
            if self._is_last and not self._is_cut and LAST_FUNCTION.fullmatch(self._rest, m.end()):
                self._take(len(self._rest))
                self._end_value()
                self._end("}")
            else:
                self._n_quoted = max(0, self._n_quoted - 1)
                if after is not None and (after["end"] or after["name"]):
                    self._n_functions = max(0, self._n_functions - 1)
                self._write(self._take(m.end()))
            return bool(self._rest)
        self._take(after.end())
        self._end_value()
        if after["name"] is None and after["key"] is not None:
            self._begin_value(after["key"])
        else:
            self._end("}")
            self._follow(after)
        return True

    def _read_quoted(self, m: Any) -> bool:
        """``<parameter=KEY>`` on a line of its own. A closing tag right behind it means that the line is the value."""
        behind = self._rest[m.end() : m.end() + len(CLOSED)]
        if CLOSED.startswith(behind) and len(behind) < len(CLOSED) and not self._is_last:
            return False
        if behind != CLOSED:
            self._n_quoted += 1
            self._n_functions += m["function"] is not None
        self._write(self._take(m.end() - 1))
        return True

    def _waits(self, after: Any) -> bool:
        """Whether what follows must tell if a quotation ends here, or the block."""
        is_at_end = not self._is_last and not self._rest[after.end() :].strip()
        return bool(self._n_quoted + self._n_functions and after["end"] and is_at_end)

    def _ends(self, after: Any) -> bool:
        """Whether a closing tag ends the value."""
        if after["name"] is None and after["key"] is not None:
            is_next = not self._n_functions and (not self._n_quoted or self._schema.declares(after["key"]))
            return is_next and after["key"] not in self._keys
        is_at_end = after["end"] is not None and not self._rest[after.end() :].strip()
        return is_at_end or not self._n_quoted + self._n_functions

    def _read_after_function(self) -> bool:
        m = self._match(AFTER_FUNCTION)
        if m is None:  # the block has no end
            self._read = self._read_text
        elif m.partial:
            return False
        else:
            self._take(m.end())
            self._follow(m)
        return bool(self._rest)

    def _follow(self, m: Any) -> None:
        """What comes behind a function: another one, or the block's end."""
        if m["end"] is None:
            self._begin(m)
        else:
            self._read, self._line = self._read_text, ""

    # A call in JSON

    def _begin_json(self, start: int) -> None:
        self._start = self._pos = start  # of the JSON, and of what has not been searched
        self._is_in_string = False
        self._read = self._read_json

    def _read_json(self) -> bool:
        known = len(self._rest) if self._is_last else len(self._rest) - len(END) + 1
        end = None
        for m in IN_JSON.finditer(self._rest, self._pos):
            if m.start() >= known:
                break
            self._pos = m.end()
            if m[0] == '"':
                self._is_in_string = not self._is_in_string
            elif m[0] == END and not self._is_in_string:
                end = m
                break
        self._pos = max(self._pos, min(known, len(self._rest)))
        if end is None and not self._is_last:
            return False
        is_whole = end is not None or not self._is_cut
        calls = _json_calls(self._rest[self._start : end.start() if end else None]) if is_whole else []
        self._read, self._line = self._read_text, ""
        if not calls:
            self._pass(self._start)
            return True
        self._take(end.end() if end else len(self._rest))
        for name, arguments in calls:
            index, self.n_calls = self.n_calls, self.n_calls + 1
            self._events += [CallBegins(index, name), CallArguments(index, arguments), CallEnds(index)]
        return bool(self._rest)


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_calls(text: str) -> list[tuple[str, str]]:
    """The calls in a block of JSON, as names and the JSON of their arguments. Empty if they are not calls."""
    for read in (_json_values, ast.literal_eval):
        try:  # the parsers' errors, or those of a value that JSON lacks: see values
            found = read(text.strip())
            return [_json_call(call) for call in (found if isinstance(found, list) else [found])]
        except Exception:
            continue
    return []


def _json_values(text: str) -> list[Any]:
    """One call, a list of them, or several one after another."""
    return [call for value in parse_json_values(text) for call in (value if isinstance(value, list) else [value])]


def _json_call(call: Any) -> tuple[str, str]:
    name, arguments = call["name"], call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():
        arguments = parse_json(arguments)
    if not (isinstance(name, str) and name and isinstance(arguments or {}, dict)):
        raise ValueError(f"not a call: {call}")
    return name, json.dumps(arguments or {}, allow_nan=False)
