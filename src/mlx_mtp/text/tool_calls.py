"""Streaming parser of tool calls in a model's text, by the rules of docs/develop/tool-calls.md."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import regex

from .formats import END, QWEN, SPACE, START, Format
from .reasoning import Lines
from .schema import Schema, is_string, parse_json, to_json
from .tags import EndOfValue, bare_value, key_of


@dataclass(frozen=True)
class Text:
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
    index: int


Call = CallBegins | CallArguments | CallEnds
Event = Text | Call

AFTER_BLOCK = regex.compile(rf"{SPACE}(?P<end>{END})")  # a model may write it twice
BLOCK_TAG = re.compile(f"{START}|{END}")
PLACE = regex.compile(rf"(?<=\n)|{START}")
NAMED_JSON = re.compile(r"\s*([^\s\"{\[]+)\s*(\{.*)", re.DOTALL)


class _Buffer:
    """The text that is not parsed yet, the events, and the lines of content outside of blocks."""

    def __init__(self) -> None:
        self.rest = ""  # the text that is not parsed yet
        self.n_taken = 0  # the characters of the output before it
        self.is_last = self.is_cut = False  # whether no text will follow, and whether it was cut off there
        self.events: list[Event] = []  # the events that were not returned yet
        self.n_calls = 0
        self.line = ""  # the last line of content so far
        self.lines = Lines()  # those before it
        self.is_after_blank = True  # whether the line before it is blank or a block, or there is none

    def match(self, pattern: Any) -> Any:
        return pattern.match(self.rest, partial=not self.is_last)

    def take(self, n: int) -> str:
        taken = self.rest[:n]
        self.rest = self.rest[n:]
        self.n_taken += len(taken)
        return taken

    def take_content(self, n: int) -> None:
        """Take the next n characters, up to the end of a line or of the text so far, as content."""
        start = self.n_taken
        text = self.take(n)
        if self.events and isinstance(last := self.events[-1], Text):
            self.events[-1] = Text(last.text + text, last.start)
        elif text:
            self.events.append(Text(text, start))
        self.line += text
        if text.endswith("\n"):
            self.lines = self.lines.add(self.line.rstrip("\n"))
            self.is_after_blank = not self.line.strip()
            self.line = ""

    def is_text_line(self, start: str) -> bool:
        """Whether a line begins here, with this text, that is in no code block."""
        return not self.line and not self.lines.is_code(start[: len(start) - len(start.lstrip())])

    def begin_call(self, name: str) -> None:
        self.events.append(CallBegins(self.n_calls, name))
        self.n_calls += 1

    def add_arguments(self, text: str) -> None:
        if self.events and isinstance(last := self.events[-1], CallArguments):
            self.events[-1] = CallArguments(last.index, last.text + text)
        elif text:
            self.events.append(CallArguments(self.n_calls - 1, text))

    def end_call(self) -> None:
        self.events.append(CallEnds(self.n_calls - 1))
        self.line = ""
        self.is_after_blank = True


class _Value:
    """Converts a parameter's value to JSON: a string piece by piece, another value when it is complete."""

    def __init__(self, key: str, types: frozenset[str], format: Format):
        self.key = key
        self.types = types
        self.format = format
        self.text = ""  # until it is known to be a string
        self.is_string = self.has_begun = False

    def write(self, text: str) -> str:
        """Add the next piece of its text. Return the next piece of its JSON."""
        if not self.has_begun:
            text = self.text + text
            self.text = ""
            if text in ("", "\r"):  # the line end of the tag, or a part of it
                self.text = text
                return ""
            self.has_begun, text = True, self.format.begin_line.sub("", text)
        if self.is_string:
            return _escape(text)
        self.text += text
        self.is_string = is_string(self.text, self.types)
        return '"' + _escape(self.text) if self.is_string else ""

    def end(self) -> str:
        written = self.write("")
        if self.is_string:
            return f'{written}"'
        value = to_json(self.text, self.types)
        if value.startswith('"') and "string" not in self.types:  # it may have tags around it
            value = to_json(bare_value(self.text, self.key, self.format), self.types)
        return written + value


class ToolCallParser(_Buffer):
    """Makes events of a text with calls in a format, and in JSON. ``schemas`` has the JSON schema of each tool's parameters by
    name; ``None``: calls are text.
    """

    def __init__(self, schemas: Mapping[str, Any] | None, format: Format = QWEN):
        super().__init__()
        self.format = format
        self.reads_calls = schemas is not None
        self.schemas = schemas or {}
        self.marks: Sequence[str] = ()  # lines of content that the parser stops behind, outside of code blocks
        self.mark = ""  # the one behind the events that were returned last
        self._read = self._content  # parses a part of the rest and returns whether to continue

    def add(self, text: str) -> list[Event]:
        """Add the next piece of the text. Return its events. Text that may be the beginning of a tag is held back."""
        self.rest = self.rest + text
        self.mark = ""
        while self._read():
            pass
        events = self.events
        self.events = []
        return events

    def finish(self, cut: bool) -> list[Event]:
        """End the text. Return the last events. If it was cut, such as by a token limit, the last tags are not assumed."""
        self.is_last = True
        self.is_cut = cut
        return self.add("")

    @property
    def is_at_start(self) -> bool:
        """Whether the text ends with a tag that may begin a block."""
        tag = self.rest.lstrip(" ")
        may_begin = tag == START or (tag != "" and tag == self.format.written.function and self.is_after_blank)
        return self._read == self._content and may_begin and self._is_place(self.rest)

    # Content

    def _content(self) -> bool:
        if self.marks and self.is_text_line(self.rest):
            line, is_whole, _ = self.rest.partition("\n")
            if (tag := line.strip()) in self.marks and (is_whole or self.is_last):
                self.take(len(line) + 1)
                self.mark = tag
                return False
            if not is_whole and not self.is_last and any(mark.startswith(tag) for mark in self.marks):
                return False
        is_place = self.reads_calls and not (self.line and self.rest.startswith(" "))
        m = self.match(self.format.block) if is_place else None
        if m is not None and m.partial:
            return False
        has_tag = m is not None and (m["json"] or m["start"])
        is_offered = m is not None and self.is_after_blank and m["name"] in self.schemas
        if m is not None and (has_tag or is_offered) and self._is_place(m[0]):
            if m["json"]:
                self.start = self.searched = self.rest.index(START) + len(START)
                self._read = self._json
            else:
                self.take(m.end())
                self._begin_function(m["name"])
        elif has_tag and self._may_end_text():
            self.tail, self.tail_events, self.n_tail = ToolCallParser(self.schemas, self.format), list[Any](), 0
            self._read = self._tail
        else:
            self.take_content(self._next_place())
        return bool(self.rest)

    def _is_place(self, start: str) -> bool:
        """Whether a call may begin here: a line that begins with this text, or behind words if the format has no lines."""
        is_inline = not self.format.has_lines and self.line != "" and self._may_end_text()
        return is_inline or self.is_text_line(start)

    def _may_end_text(self) -> bool:
        """Whether a block here counts if the text ends with it: in a code block, or behind words that do not quote it."""
        words = self.line.strip()
        is_quoted = words.startswith(">") or words.count("`") % 2 or self.lines.is_code(self.line)
        return not self.line or (words != "" and not is_quoted)

    def _next_place(self) -> int:
        """The number of characters up to the next place where a block may begin: a line, or its tag."""
        if not self.reads_calls:
            return self.rest.find("\n") + 1 or len(self.rest)
        m = PLACE.search(self.rest, 1, partial=not self.is_last)
        return m.start() if m else len(self.rest)

    def _tail(self) -> bool:
        """Blocks that count if the text ends with them."""
        self.tail_events += self.tail.add(self.rest[self.n_tail :])
        self.n_tail = len(self.rest)
        is_end = self.is_last and not self.is_cut and self.rest.rstrip().endswith(END)
        if is_end:
            self.tail_events += self.tail.finish(cut=False)
        is_text = any(isinstance(event, Text) and event.text.strip() for event in self.tail_events)
        if not is_text and not self.is_last:
            return False
        self._read = self._content
        if is_text or not is_end:
            self.take_content(self.rest.index(START) + len(START))
            return True
        calls = [event for event in self.tail_events if isinstance(event, Call)]
        self.events += [replace(call, index=call.index + self.n_calls) for call in calls]
        self.n_calls += self.tail.n_calls
        self.take(len(self.rest))
        return False

    # A block with one function or several

    def _begin_function(self, name: str) -> None:
        self.name = name
        try:
            self.schema = Schema(self.schemas.get(name))
        except RecursionError:
            self.schema = Schema(None)  # it is too deep, and says nothing
        self.keys: set[str] = set()
        self.begin_call(name)
        self._read = self._part

    def _part(self) -> bool:
        m = self.match(self.format.part)
        if m is not None and m.partial:
            return False
        if m is None or not m["key"]:
            self.take(m.end() if m is not None and m["close"] else 0)
            self._end_function()
            return True
        self.take(m.end())
        declared = self.schema.properties().keys()
        key = key_of(m["key"], declared)
        self.add_arguments(("{" if not self.keys else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self.keys.add(key)
        self.value = _Value(key, self.schema.types_of_property(key), self.format)
        self.end = EndOfValue(self.format, self.name, key, self.keys, declared, self.schemas.keys())
        self._read = self._in_value
        return True

    def _end_function(self) -> None:
        self.add_arguments("}" if self.keys else "{}")
        self.end_call()
        self.has_ended = False
        self._read = self._after_function

    def _in_value(self) -> bool:
        n, tags, ends_function = self.end.search(self.rest, self.is_last and not self.is_cut)
        self.add_arguments(self.value.write(self.take(n)))
        if tags is None:
            if self.is_cut:
                written = self.value.write(self.take(len(self.rest)))
                self.add_arguments(written if self.value.is_string else '"' + _escape(self.value.text))
            return False
        self.take(tags)
        self.add_arguments(self.value.end())
        self._read = self._part
        if ends_function:
            self._end_function()
        return True

    def _after_function(self) -> bool:
        m = self.match(AFTER_BLOCK if self.has_ended else self.format.after_function)
        if m is not None and m.partial:
            return False
        self.take(0 if m is None else m.end())
        if m is None:
            self._read = self._content
        elif m["end"] is None:
            self._begin_function(m["name"])
        else:
            self.has_ended = True
        return bool(self.rest)

    # A block of JSON, up to the first tag of a block outside its strings

    def _json(self) -> bool:
        tag = BLOCK_TAG.search(self.rest, self.searched)
        if tag is None and not self.is_last:
            self.searched = max(self.searched, len(self.rest) - len(END) + 1)
            return False
        calls: list[tuple[str, str]] = []
        try:
            if tag is not None or not self.is_cut:
                calls = _json_calls(self.rest[self.start : tag.start() if tag is not None else None])
        except Exception as e:  # any error of the parser, or of a value that JSON lacks
            if tag is not None and str(e).startswith("Unterminated string"):  # which has the tag
                self.searched = tag.end()
                return True
        self._read = self._content
        if not calls:
            self.take_content(self.start)
            return True
        for name, arguments in calls:
            self.begin_call(name)
            self.add_arguments(arguments)
            self.end_call()
        self.take(len(self.rest) if tag is None else tag.start() if tag[0] == START else tag.end())
        self.has_ended = True
        self._read = self._after_function
        return bool(self.rest)


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_calls(text: str) -> list[tuple[str, str]]:
    """The names of a call or of a list of them, and the JSON of their arguments; an error if the text is none."""
    if m := NAMED_JSON.fullmatch(text):
        text = f'{{"name": {json.dumps(m[1])}, "arguments": {m[2]}}}'
    value = parse_json(text)
    calls = []
    for call in value if isinstance(value, list) else [value]:
        call = next((x for key in ("tool", "function") if isinstance(x := call.get(key), dict)), call)
        name = call.get("name", call.get("function"))
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str) and arguments.strip():
            arguments = parse_json(arguments)
        if not (isinstance(name, str) and name and isinstance(arguments or {}, dict)):
            raise ValueError(f"not a call: {call}")
        calls.append((name, json.dumps(arguments or {}, allow_nan=False)))
    return calls
