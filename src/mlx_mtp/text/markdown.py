"""Fenced code blocks of a Markdown text, line by line, as in CommonMark: also in list items and block quotes.

Models indent list items badly. So a fence in one may also end with less indentation, and if the first line of code has too
little, the code ends with a fence only.
"""

import re
from dataclasses import dataclass, replace

FENCE = re.compile(r" {0,3}(?P<marks>`{3,}|~{3,})(?P<info>.*)")
BLOCK_QUOTE = re.compile(r" {0,3}> ?")
ITEM = re.compile(r" {0,3}(?:[-+*]|\d{1,9}[.)])(?: {1,4}(?=[^ ])| |$)")
MOST = 64  # containers in each other
TASK = re.compile(r"\[[ xX]\] +")


@dataclass(frozen=True)
class Lines:
    """The lines of a text so far: the containers that are open after them, and the code block."""

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
