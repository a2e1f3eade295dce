"""A model's text, piece by piece, as events: reasoning, text and tool calls, without the marks of its chat template.

This module does not depend on HTTP. Line breaks that a template adds around reasoning and calls are removed. Stop words are
searched in the answer's text, not in its reasoning and calls. For ``logprobs`` of the APIs, each character of the text is kept
with the tokens that it came from: some of them are sent later than their tokens arrive.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from . import tool_calls
from .reasoning import ReasoningReader, overlap
from .schema import Json
from .tool_calls import START, CallBegins, CallEnds, Text, ToolCallParser

BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte in SentencePiece
BYTES = {char: byte for byte, char in bytes_to_unicode().items()}  # as BPE tokenizers write them


@dataclass(frozen=True)
class Reasoning:
    """The model's reasoning."""

    text: str


Event = Reasoning | tool_calls.Event


class Answer:
    """Converts the tokens of one answer into events.

    Args:
        reader (QwenReader): Splits the text into reasoning, text and calls.
        stop_words (List[str]): Words that end the text; they are not part of it.
        is_chat (bool): Whether the text follows a chat template, which adds line breaks around its parts.
        one_call (bool): Whether the answer ends after its first call.
    """

    def __init__(self, reader: "QwenReader", stop_words: list[str], is_chat: bool = True, one_call: bool = False):
        self.reader, self.one_call = reader, one_call
        self.stop = _StopWords(stop_words)
        self.tokens = TextTokens()
        self.has_ended = False  # with a stop word or a call
        self.n_calls = 0
        self._reasoning, self._text = _LineBreaks(skips=True), _LineBreaks(holds=is_chat)

    def step(self, text: str, finish_reason: str | None) -> tuple[list[Event], str | None]:
        """Add the next token, by the characters that it completes; the last one has a finish reason, "stop" or "length".

        Return its events, and "stop", "length" (a limit has cut the text), "tool_calls" or ``None``.
        """
        self.tokens.read(text, is_end=finish_reason == "stop")
        events = self._clean(self.reader.add(text))
        if finish_reason is not None:
            events += self._clean(self.reader.finish(cut=finish_reason == "length"))
            if not self.has_ended:
                events += self._say(self._text.add(self.stop.rest()) + self._text.rest())
        if self.has_ended:
            finish_reason = "stop"
        return events, "tool_calls" if finish_reason == "stop" and self.n_calls else finish_reason

    def _clean(self, found: list[Event]) -> list[Event]:
        """Remove the template's line breaks, and everything after a stop word."""
        events: list[Event] = []
        for event in found:
            if self.has_ended:
                break
            if isinstance(event, Text):
                text = self._text.skip(event.text)
                self.tokens.find(event.text, len(text))
                if text:
                    events += self._say(self._text.add(self.stop.add(text)))
                    self.has_ended = self.stop.found is not None
            elif isinstance(event, Reasoning):
                self._text.skips = True
                self.tokens.leave()
                events += [Reasoning(text) for text in [self._reasoning.add(self._reasoning.skip(event.text))] if text]
            else:
                if isinstance(event, CallBegins):
                    self.n_calls += 1
                    events += self._say(self._text.add(self.stop.rest()))
                    if not self._text.leave():
                        self.tokens.drop()
                self.tokens.leave()
                events.append(event)
                self.has_ended = self.one_call and isinstance(event, CallEnds)
        return events

    def _say(self, text: str) -> list[Event]:
        return [Text(text, self.tokens.take(len(text)))] if text else []


class _LineBreaks:
    """Removes the template's line breaks from the beginning (``skips``) and the end (``holds``) of a streamed text."""

    def __init__(self, skips: bool = False, holds: bool = True):
        self.skips, self.holds = skips, holds
        self._has_text = False
        self._breaks = ""  # the line breaks at the end of the last piece

    def skip(self, text: str) -> str:
        """The next piece, without the template's line breaks at its beginning."""
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
        """The line breaks at the end of the text."""
        return "" if self.skips else self._breaks


class _StopWords:
    def __init__(self, words: list[str]):
        self.words = [word for word in words if word]
        self.found: str | None = None  # the stop word that ended the text
        self._held = ""  # text that may begin a stop word

    def add(self, text: str) -> str:
        """Add the next piece of a text. Return the part before a stop word."""
        text = self._held + text
        found = [(i, word) for word in self.words if (i := text.find(word)) >= 0]
        n, self.found = min(found, default=(0, None))
        if self.found is None:
            n = len(text) - max((overlap(text, word) for word in self.words), default=0)
        self._held = text[n:]
        return text[:n]

    def rest(self) -> str:
        """The held text, which did not become a stop word."""
        held, self._held = self._held, ""
        return held


class TextTokens:
    """The tokens of an answer, by the characters of its text."""

    def __init__(self) -> None:
        self._n_tokens = 0
        self._first_incomplete = 0  # the first of the last tokens whose characters are incomplete
        self._n_reported = 0  # the number of tokens up to the last one that ``take`` returned
        # The output since the last part of the text or anything else: its characters, and the tokens of each.
        self._output, self._owners = "", list[range]()
        self._begin = 0  # the position of the last token in the output
        self._has_left = False  # whether the output begins with something other than text
        self._text: list[range] = []  # the tokens of each character of the text that ``take`` has not returned yet

    def read(self, text: str, is_end: bool) -> None:
        """Add the next token, by the characters that it completes. One that ends the answer is not part of it."""
        tokens = range(self._first_incomplete, self._n_tokens + (not is_end))
        self._n_tokens += 1
        if text:
            self._first_incomplete = self._n_tokens
        self._begin = len(self._output)
        self._output += text
        self._owners += [tokens] * len(text)

    def find(self, text: str, n: int) -> None:
        """Find a part of the text in the output: right after the part before, or after something else. Its last n characters
        belong to the answer.
        """
        follows = not self._has_left and self._output.startswith(text)
        start = 0 if follows else self._output.rfind(text)
        self._has_left = False
        owners = self._owners[start : start + len(text)] if start >= 0 else [range(0)] * len(text)
        self._text += owners[len(text) - n :]
        self._forget(start + len(text) if start >= 0 else self._begin)

    def leave(self) -> None:
        """Drop the output before the last token: it is not text."""
        self._has_left = True
        self._forget(self._begin)

    def _forget(self, n: int) -> None:
        self._output, self._owners, self._begin = self._output[n:], self._owners[n:], max(self._begin - n, 0)

    def drop(self) -> None:
        """Drop the characters that ``take`` has not returned."""
        self._text.clear()

    def take(self, n: int) -> list[int]:
        """The indices of the tokens of the next n characters. Each token is returned once, with its first character."""
        owners, self._text = self._text[:n], self._text[n:]
        found = [i for tokens in dict.fromkeys(owners) for i in tokens if i >= self._n_reported]
        self._n_reported = max([self._n_reported, *(i + 1 for i in found)])
        return found


class QwenReader:
    """Splits a text by Qwen's marks: ``<think>``, and the tool calls of ``ToolCallParser``.

    ``<think>`` begins reasoning at the start of the answer or in the prompt, and ``ReasoningReader`` finds its end. If the
    model ends its turn with a tool call and without ``</think>``, the call is valid, although its text was sent as reasoning.
    Without ``schemas``, tool calls are text.
    """

    def __init__(self, think: tuple[str, str] | None, in_reasoning: bool, schemas: Mapping[str, Any] | None):
        self.begin, self.end = think or ("", "")
        self.schemas = schemas
        self.reasoning = ReasoningReader(self.end)
        self._calls = None if schemas is None else ToolCallParser(schemas)
        self._read = self._text if think is None else self._thoughts if in_reasoning else self._beginning
        self._rest = ""  # the text that is not parsed yet

    @property
    def in_reasoning(self) -> bool:
        """Whether the reasoning has begun and not ended."""
        return self._read == self._thoughts

    @property
    def is_at_call(self) -> bool:
        """Whether the text ends with the tag at the beginning of a call."""
        return self._read == self._text and self._calls is not None and self._calls.is_at_start

    def add(self, text: str) -> list[Event]:
        self._rest += text
        return self._read()

    def finish(self, cut: bool) -> list[Event]:
        events: list[Event] = []
        if self.in_reasoning:
            events += self._thoughts(is_last=True)
        if self.in_reasoning:
            if cut:
                return events
            if not self.reasoning.unquoted.strip():
                return events + self._calls_at_end()
            self._rest = self.reasoning.unquoted
        return events + self._text() + (self._calls.finish(cut) if self._calls is not None else [])

    def _beginning(self) -> list[Event]:
        start = self._rest.lstrip()
        if self.begin.startswith(start) and start != self.begin:
            return []
        if start.startswith(self.begin):
            self._rest, self._read = start.removeprefix(self.begin), self._thoughts
        else:
            self._read = self._text
        return self._read()

    def _thoughts(self, is_last: bool = False) -> list[Event]:
        text, self._rest = self._rest, ""
        thought, behind = self.reasoning.add(text, is_last)
        if behind is None:
            return [Reasoning(thought)] if thought else []
        self._rest, self._read = behind, self._text
        return [Reasoning(thought), *self._read()]

    def _text(self) -> list[Event]:
        text, self._rest = self._rest, ""
        if self._calls is not None:
            return list(self._calls.add(text))
        return [Text(text)] if text else []

    def _calls_at_end(self) -> list[Event]:
        """The complete calls after the last words of the reasoning."""
        if self.schemas is None:
            return []
        parser = ToolCallParser(self.schemas)
        found = parser.add(self.reasoning.text) + parser.finish(cut=False)
        words = [i for i, event in enumerate(found) if isinstance(event, Text) and event.text.strip()]
        calls = [event for event in found[max(words, default=-1) + 1 :] if not isinstance(event, Text)]
        if not calls or not isinstance(calls[-1], CallEnds):
            return []
        return [replace(call, index=call.index - calls[0].index) for call in calls]


def start_of_calls(text: str, think: tuple[str, str] | None, in_reasoning: bool) -> int | None:
    """The position of the first call's opening tag, even if the call is incomplete. Arguments: see ``QwenReader``."""
    i = text.rfind(START)
    return None if i < 0 else _start_of_calls(text[: i + len(START) + 1], think, in_reasoning)


@lru_cache(maxsize=8)  # for the positions of a window after a quoted tag
def _start_of_calls(text: str, think: tuple[str, str] | None, in_reasoning: bool) -> int | None:
    reader, n = QwenReader(think, in_reasoning, {}), 0
    while (i := text.find(START, n)) >= 0:
        end = i + len(START)
        reader.add(text[n:end])
        if reader.is_at_call and text[end : end + 1] in ("", "\n"):
            return i
        n = end
    return None


def make_answer(
    tokenizer: Any, in_reasoning: bool, tools: list[Any] | None, stop_words: list[str], *, is_chat: bool, one_call: bool
) -> Answer:
    """Make the parser of a request's answer.

    Without tools, calls are text. If the prompt follows no chat template (``is_chat``), its marks are text, too.
    """
    if not is_chat:
        return Answer(QwenReader(None, False, None), stop_words, is_chat=False)
    schemas = None
    if tools and tokenizer.has_tool_calling:
        schemas = {function["name"]: function.get("parameters") for function in functions_of(tools)}
    return Answer(QwenReader(think_marks(tokenizer), in_reasoning, schemas), stop_words, one_call=one_call)


def think_marks(tokenizer: Any) -> tuple[str, str] | None:
    """The marks around reasoning, if the model has any."""
    return (tokenizer.think_start, tokenizer.think_end) if tokenizer.has_thinking else None


def functions_of(tools: list[Any]) -> list[Json]:
    """The functions of OpenAI's tools, without those that have no name."""
    return [tool["function"] for tool in tools if isinstance(tool["function"].get("name"), str)]


class Pieces:
    """The bytes of a tokenizer's tokens; a token may end within a character."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.added = {i: str(token).encode() for i, token in tokenizer.added_tokens_decoder.items()}
        self.is_byte_level = isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer)

    def of(self, tokens: Sequence[int]) -> list[bytes]:
        names = self.tokenizer.convert_ids_to_tokens(list(tokens))
        return [self.added[i] if i in self.added else self._bytes(name or "") for i, name in zip(tokens, names)]

    def _bytes(self, name: str) -> bytes:
        if self.is_byte_level:
            return b"".join(bytes([BYTES[c]]) if c in BYTES else c.encode() for c in name)
        if match := BYTE.fullmatch(name):
            return bytes([int(match[1], 16)])
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
