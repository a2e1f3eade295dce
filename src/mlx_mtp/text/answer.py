"""A model's text, piece by piece, as events: reasoning, text and tool calls, without the marks of its chat template."""

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import regex

from . import tool_calls
from .formats import GLM_LINES, QWEN, START, Format
from .reasoning import ReasoningReader
from .schema import Json
from .tool_calls import CallBegins, CallEnds, Text, ToolCallParser


@dataclass(frozen=True)
class Reasoning:
    text: str


Event = Reasoning | tool_calls.Event
Marks = tuple[str, str] | None  # around the reasoning of a model that thinks


class Answer:
    """Converts the tokens of one answer into events. Stop words end its text, but not its reasoning and calls."""

    def __init__(self, reader: "AnswerReader", stop_words: list[str], is_chat: bool, one_call: bool, goes_on: bool):
        self.reader = reader
        self.one_call = one_call
        # A pattern without words matches nothing.
        self._stops = regex.compile("|".join(map(regex.escape, sorted(filter(None, stop_words)))) or "(?!)")
        self._held = ""  # text that may begin a stop word
        self.stop_word: str | None = None  # the one that ended the text
        self.tokens = TextTokens()
        self.has_ended = False  # with a stop word or a call
        self.n_calls = 0
        # The first line breaks of reasoning that goes on are its own.
        self._reasoning = _LineBreaks(skips=not goes_on)
        self._text = _LineBreaks(skips=reader.begins_with_break and not goes_on, holds=is_chat)

    def step(self, text: str, finish_reason: str | None) -> tuple[list[Event], str | None]:
        """Add the next token, by the characters that it completes, and the finish reason of the last one, "stop" or "length".
        Return its events, and "stop", "length", "tool_calls" or ``None``.
        """
        self.tokens.read(text, is_end=finish_reason == "stop")
        events = self._clean(self.reader.add(text))
        if finish_reason is not None:
            events += self._clean(self.reader.finish(cut=finish_reason == "length"))
            if not self.has_ended:
                events += self._say(self._text.add(self._held) + self._text.rest())
        if self.has_ended:
            finish_reason = "stop"
        return events, "tool_calls" if finish_reason == "stop" and self.n_calls else finish_reason

    def _clean(self, found: list[Event]) -> list[Event]:
        events: list[Event] = []
        for event in found:
            if self.has_ended:
                break
            if isinstance(event, Text):
                events += self._before_stop(self._text.skip(event.text), event.start + len(event.text))
            elif isinstance(event, Reasoning):
                self._text.skips = True
                events += [Reasoning(text) for text in [self._reasoning.add(self._reasoning.skip(event.text))] if text]
            else:
                if isinstance(event, CallBegins):
                    self.n_calls += 1
                    events += self._say(self._text.add(self._held))
                    self._held = ""
                    if not self._text.leave():
                        self.tokens.drop()
                events.append(event)
                self.has_ended = self.one_call and isinstance(event, CallEnds)
        return events

    def _before_stop(self, text: str, end: int) -> list[Event]:
        """The next text before a stop word. ``end`` is the end of the given one in the output."""
        self.tokens.add(end - len(text), end)
        text = self._held + text
        m = self._stops.search(text, partial=True)
        n = len(text) if m is None else m.start()
        self._held = text[n:]
        if m is not None and not m.partial:
            self.stop_word = m[0]
            self.has_ended = True
        return self._say(self._text.add(text[:n]))

    def _say(self, text: str) -> list[Event]:
        return [Text(text, tokens=self.tokens.take(len(text)))] if text else []


class _LineBreaks:
    """Removes the template's line breaks from the beginning (``skips``) and the end (``holds``) of a streamed text."""

    def __init__(self, skips: bool = False, holds: bool = True):
        self.skips = skips
        self.holds = holds
        self._has_text = False
        self._breaks = ""  # the line breaks at the end of the last piece

    def skip(self, text: str) -> str:
        if self.skips:
            text = text.lstrip("\n")
            self.skips = not text
        return text

    def add(self, text: str) -> str:
        """Add the next piece. Return the part that is certainly text."""
        text = self._breaks + text
        kept = text.rstrip("\n") if self.holds else text
        self._breaks = text[len(kept) :]
        self._has_text |= bool(kept)
        return kept

    def leave(self) -> bool:
        """Another part follows, and line breaks of the template after it. Return whether those before it may be text."""
        self.skips = True
        if not self._has_text:
            self._breaks = ""
        return self._has_text

    def rest(self) -> str:
        return "" if self.skips else self._breaks


class TextTokens:
    """The tokens of an answer, by the characters of its text: some are sent later than their tokens arrive."""

    def __init__(self) -> None:
        self._n_tokens = 0
        self._first_incomplete = 0  # the first of the last tokens whose characters are incomplete
        self._n_reported = 0  # the number of tokens up to the last one that ``take`` returned
        self._output: list[range] = []  # the tokens of each character of the output
        self._text: list[range] = []  # those of the text that ``take`` has not returned yet

    def read(self, text: str, is_end: bool) -> None:
        """Add the next token, by the characters that it completes. One that ends the answer is not part of it."""
        tokens = range(self._first_incomplete, self._n_tokens + (not is_end))
        self._n_tokens += 1
        if text:
            self._first_incomplete = self._n_tokens
        self._output += [tokens] * len(text)

    def add(self, start: int, end: int) -> None:
        """Add these characters of the output to the text."""
        self._text += self._output[start:end]

    def drop(self) -> None:
        self._text.clear()

    def take(self, n: int) -> list[int]:
        """The indices of the tokens of the next n characters. Each token is returned once, with its first character."""
        owners = self._text[:n]
        self._text = self._text[n:]
        found = [i for tokens in dict.fromkeys(owners) for i in tokens if i >= self._n_reported]
        self._n_reported = max([self._n_reported, *(i + 1 for i in found)])
        return found


class AnswerReader:
    """Splits a text by its marks: ``<think>``, and the calls of ``ToolCallParser``, which takes ``schemas`` and ``format``.

    ``<think>`` begins reasoning at the start of the answer or in the prompt (``in_reasoning``, ``None`` if that ends with
    neither mark). After its end, a line that is one of the marks makes reasoning of the text before it, which waits for such a
    line: until a call, the end, or more than ``patience`` characters. If that is ``None``, it is content. In a whole answer,
    text behind a quoted mark waits as well: if no other ends the reasoning, it is content alone.
    """

    def __init__(
        self,
        think: Marks,
        in_reasoning: bool | None,
        schemas: Json | None,
        patience: float | None = math.inf,
        is_whole: bool = False,
        format: Format = QWEN,
    ):
        self.begin, self.end = think or ("", "")
        self.schemas = schemas
        self.patience = patience
        self.is_whole = is_whole
        self.format = format
        self.reasoning = ReasoningReader(self.end)
        self._calls = ToolCallParser(schemas, format)  # of the text after the reasoning
        self._read = self._text if think is None else self._thoughts if in_reasoning else self._beginning
        self._rest = ""  # the text that is not parsed yet
        self._n = 0  # characters so far
        self._waiting: list[Event] = []
        self._room = -1.0  # the number of characters that may still wait, or less than 0
        # GLM-4.5's prompt ends with the tag that ends reasoning, without the line break behind it.
        self.begins_with_break = in_reasoning is False and format == GLM_LINES
        if think is not None and in_reasoning is False:
            self._end_reasoning(patience and (math.inf if patience == math.inf else 0))

    @property
    def in_reasoning(self) -> bool:
        return self._read == self._thoughts

    @property
    def is_at_call(self) -> bool:
        """Whether the text ends with the tag at the beginning of a call."""
        return self._read == self._text and self._calls.is_at_start

    def add(self, text: str) -> list[Event]:
        self._rest += text
        self._n += len(text)
        return self._read()

    def finish(self, cut: bool) -> list[Event]:
        events: list[Event] = []
        while True:
            if self.in_reasoning:
                events += self._thoughts(is_last=True)
            if self.in_reasoning:
                if cut or not self.reasoning.unquoted.strip():
                    return [
                        *events,
                        Reasoning(self.reasoning.tell(waits=False)),
                        *([] if cut else self._calls_at_end()),
                    ]
                self._rest = self.reasoning.unquoted
                self._read = self._text
            events += self._text() + self._after_reasoning(self._calls.finish(cut))
            if not self.in_reasoning:
                return events + self._waiting

    def _beginning(self) -> list[Event]:
        start = self._rest.lstrip()
        if self.begin.startswith(start) and start != self.begin:
            return []
        if start.startswith(self.begin):
            self._rest = start.removeprefix(self.begin)
            self._read = self._thoughts
        else:
            self._read = self._text
        return self._read()

    def _thoughts(self, is_last: bool = False) -> list[Event]:
        text = self._rest
        self._rest = ""
        behind = self.reasoning.add(text, is_last)
        thought = Reasoning(self.reasoning.tell(waits=self.is_whole and behind is None))
        if behind is None:
            return [thought]
        self._rest = behind
        self._read = self._text
        self._end_reasoning(self.patience)
        return [thought, *self._read()]

    def _end_reasoning(self, patience: float | None) -> None:
        if patience is not None:
            self._calls.marks = (self.begin, self.end)
            self._room = patience

    def _text(self) -> list[Event]:
        text = self._rest
        self._rest = ""
        self._calls.n_taken = self._n - len(text) - len(self._calls.rest)
        return self._after_reasoning(self._calls.add(text))

    def _after_reasoning(self, found: list[tool_calls.Event]) -> list[Event]:
        events: list[Event] = []
        for event in found:
            self._waiting.append(event)
            self._room = self._room - len(event.text) if isinstance(event, Text) else -1
            if self._room < 0:
                events += self._waiting
                self._waiting = []
        if not self._calls.mark:
            return events
        events += [Reasoning(e.text) for e in self._waiting if isinstance(e, Text)]
        self._waiting = []
        self._end_reasoning(self.patience)
        if self._calls.mark == self.begin:
            self.reasoning = ReasoningReader(self.end)
            self._read = self._thoughts
            self._rest = self._calls.rest
            self._calls.rest = ""
        return events + self._read()

    def _calls_at_end(self) -> list[Event]:
        """The calls after the last words of the reasoning, valid if the turn ends with them, though sent as such."""
        parser = ToolCallParser(self.schemas, self.format)
        found = parser.add("".join(self.reasoning.pieces)) + parser.finish(cut=False)
        words = [i for i, event in enumerate(found) if isinstance(event, Text) and event.text.strip()]
        calls = [event for event in found[max(words, default=-1) + 1 :] if isinstance(event, tool_calls.Call)]
        if not calls or not isinstance(calls[-1], CallEnds):
            return []
        return [replace(call, index=call.index - calls[0].index) for call in calls]


def ends_in_reasoning(prompt: str, think: Marks, prefill: str = "") -> bool | None:
    """Whether a prompt ends within reasoning; ``None`` if it has ended none. A mark at its end decides, and behind it the
    ``prefill``, in which one within a line is a mention.
    """
    if think is None:
        return None
    begun = prefill.strip()
    n = prompt.rfind(begun) if begun and begun in prompt else len(prompt)
    opens, ends = (prompt[:n].rstrip().endswith(mark) for mark in think)
    if not opens and begun.split("\n", 1)[0].strip() != think[0]:
        return False if ends else None
    reader = AnswerReader(think, opens, None, patience=None)
    reader.add(prompt[n:])
    return reader.in_reasoning


def start_of_calls(text: str, think: Marks, in_reasoning: bool | None, format: Format) -> int | None:
    """The position of the first call's opening tag, even if the call is incomplete."""
    end = max(i + len(tag) if (i := text.rfind(tag)) >= 0 else 0 for tag in (START, format.written.function) if tag)
    return _start_of_calls(text[: end + 1], think, in_reasoning, format) if end > 0 else None


@lru_cache(maxsize=8)  # for the positions of a window after a quoted tag
def _start_of_calls(text: str, think: Marks, in_reasoning: bool | None, format: Format) -> int | None:
    reader = AnswerReader(think, in_reasoning, {}, format=format)
    n = 0
    for m in re.finditer("|".join(filter(None, (START, format.written.function))), text):
        reader.add(text[n : m.end()])
        is_free = m[0] != START or not format.has_lines  # what may follow
        if reader.is_at_call and (is_free or text[m.end() : m.end() + 1] in ("", "\n")):
            return m.start()
        n = m.end()
    return None


def think_marks(tokenizer: Any) -> Marks:
    return (tokenizer.think_start, tokenizer.think_end) if tokenizer.has_thinking else None


def functions_of(tools: list[Any]) -> list[Json]:
    """The functions of OpenAI's tools, without those that have no name."""
    return [tool["function"] for tool in tools if isinstance(tool["function"].get("name"), str)]
