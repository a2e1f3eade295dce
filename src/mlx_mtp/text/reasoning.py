"""Streaming parser of a model's reasoning, up to the tag that ends it, and the code blocks of Markdown, which may quote tags.

A model may forget to close a block: if its turn ends within the reasoning, the last tag alone on a line of a block was the end.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache

import regex

FENCE = re.compile(r" {0,3}(?P<marks>`{3,}|~{3,})(?P<info>.*)")
BLOCK_QUOTE = re.compile(r" {0,3}> ?")
ITEM = re.compile(r" {0,3}(?:[-+*]|\d{1,9}[.)])(?: {1,4}(?=[^ ])| |$)")
MOST = 64  # containers in each other
TASK = re.compile(r"\[[ xX]\] +")


def end_of_reasoning(text: str, end: str) -> int | None:
    """The position after the tag that ends the reasoning at the beginning of a text. ``None``: there is none yet."""
    i = text.rfind(end)
    return None if i < 0 else _end_of_reasoning(text[: i + len(end) + 1], end)  # later text changes nothing


@lru_cache(maxsize=8)  # for the positions of a window after a quoted tag
def _end_of_reasoning(text: str, end: str) -> int | None:
    behind = ReasoningReader(end).add(text)
    return None if behind is None else len(text) - len(behind)


class ReasoningReader:
    def __init__(self, end: str):
        self.end, self._tag = end, regex.compile(regex.escape(end))
        self.pieces: list[str] = []  # the reasoning so far
        self._n_told = 0  # of these
        self._rest = ""  # the text that is not parsed yet
        self._lines, self._line = Lines(), ""  # the lines so far, and the last one
        self._answer: int | None = None  # the first piece after the last quoted tag that stood alone on a line

    def add(self, text: str, is_last: bool = False) -> str | None:
        """Add the next piece. Return the text after the tag that ends the reasoning, or ``None``."""
        self._rest += text
        while (i := self._rest.find(self.end)) >= 0:
            self._take(i)
            behind = self._rest[len(self.end) :]
            if not (behind or is_last) and self._line.endswith("`") and not self._lines.is_code(self._line):
                break  # the next character decides
            if not self._is_quoted(behind):
                return behind
            self._take(len(self.end))
        else:
            begun = None if is_last else self._tag.search(self._rest, partial=True)
            self._take(begun.start() if begun else len(self._rest))
        return None

    def tell(self, waits: bool) -> str:
        """The reasoning since the last call; with ``waits``, up to a tag behind which the answer may be."""
        n = len(self.pieces) if self._answer is None or not waits else self._answer - 1
        told = "".join(self.pieces[self._n_told : n])
        self._n_told = n
        return told

    @property
    def unquoted(self) -> str:
        answer = "" if self._answer is None else "".join(self.pieces[self._answer :])
        return answer if answer.startswith("\n") else ""

    def closing(self, before: str, behind: str) -> str:
        """The text that would end the reasoning here, as in a chat template that writes these line breaks before the tag and
        behind it; it closes an open code block first.
        """
        if self._rest.startswith(self.end):
            return behind or "\n"  # then no backtick follows
        line = self._line + self._rest
        lines = self._lines.add(line) if line else self._lines
        fence = f"{lines.marks}\n" if lines.is_code(self.end) else ""
        breaks = "\n" if fence or line.endswith("`") else before
        return f"{breaks if line else ''}{fence}{self.end}{behind}"

    def _take(self, n: int) -> None:
        text = self._rest[:n]
        self._rest = self._rest[n:]
        self.pieces.append(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._lines = self._lines.add(line)

    def _is_quoted(self, behind: str) -> bool:
        if self._lines.is_code(self._line):
            if not self._line.strip():
                self._answer = len(self.pieces) + 1
            return True
        return self._line.endswith("`") and behind.startswith("`")


@dataclass(frozen=True)
class Lines:
    """The lines of a text so far: the containers that are open after them, and the fenced code block, as in CommonMark: also in
    list items and block quotes.

    Models indent list items badly. So a fence in one may also end with less indentation, and if the first line of code has too
    little, the code ends with a fence only.
    """

    containers: tuple[int, ...] = ()  # the indentation of each list item's text, 0 for a block quote
    marks: str = ""  # those that opened a code block
    column: int = 0  # their column
    is_first: bool = False  # whether the block begins with the next line
    left: str = ""  # the marks of a block that a line with less indentation ended: a closing fence may follow

    def add(self, line: str) -> "Lines":
        line = line.expandtabs(4)
        n, text = self._enter(line)
        containers = self.containers[:n]
        if self.marks and n == len(self.containers):
            return Lines(containers) if _closes(text, self.marks) else replace(self, is_first=False)
        if self.marks and 0 not in self.containers:
            if _closes(line.strip(), self.marks):
                return Lines(containers)
            if self.is_first and not ITEM.match(line):
                return Lines(marks=self.marks)
        left = "" if containers else self.marks or self.left
        if left and _column(line) == self.column and _closes(line.strip(), left):
            return Lines()
        return self._open(containers, text, len(line), left)

    def is_code(self, start: str) -> bool:
        """Whether a line that begins like this, and has more text, is in a code block."""
        return bool(self.add(start if start.strip() else f"{start}x").marks)

    def _enter(self, line: str) -> tuple[int, str]:
        """The number of containers that a line continues, and its text within them."""
        for n, width in enumerate(self.containers):
            if width == 0:
                m = BLOCK_QUOTE.match(line)
                if m is None:
                    return n, line
                line = line[m.end() :]
            elif line.startswith(" " * width) or not line.strip():
                line = line[width:]
            else:
                return n, line
        return len(self.containers), line

    def _open(self, containers: tuple[int, ...], text: str, end: int, left: str) -> "Lines":
        """Open the containers and the code block that begin in the text of a line, which has ``end`` columns."""
        while len(containers) < MOST and (m := BLOCK_QUOTE.match(text) or ITEM.match(text)) is not None:
            is_item = ">" not in m[0]
            width = len(m[0]) if m.end() < len(text) else len(m[0].rstrip()) + 1
            containers = (*containers, width if is_item else 0)
            text = text[m.end() :]
            if is_item and (task := TASK.match(text)) is not None:
                text = text[task.end() :]
        m = FENCE.fullmatch(text)
        if m is None or (m["marks"][0] == "`" and "`" in m["info"]):
            return Lines(containers, column=self.column, left=left)
        return Lines(containers, m["marks"], end - len(text) + _column(text), is_first=True)


def _column(line: str) -> int:
    return len(line) - len(line.lstrip())


def _closes(text: str, marks: str) -> bool:
    m = FENCE.fullmatch(text)
    return m is not None and m["marks"].startswith(marks) and not m["info"].strip()
