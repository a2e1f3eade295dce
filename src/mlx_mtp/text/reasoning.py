"""Streaming parser of a model's reasoning, up to the tag that ends it, which no backticks or code block quote.

A model may forget to close a block: if its turn ends within the reasoning, the last tag alone on a line of a block was the end.
"""

from functools import lru_cache

from .markdown import Lines


def end_of_reasoning(text: str, end: str) -> int | None:
    """The position after the tag that ends the reasoning at the beginning of a text. ``None``: there is none yet."""
    i = text.rfind(end)
    return None if i < 0 else _end_of_reasoning(text[: i + len(end) + 1], end)  # later text changes nothing


@lru_cache(maxsize=8)  # for the positions of a window after a quoted tag
def _end_of_reasoning(text: str, end: str) -> int | None:
    _, behind = ReasoningReader(end).add(text)
    return None if behind is None else len(text) - len(behind)


class ReasoningReader:
    def __init__(self, end: str):
        self.end = end
        self._pieces: list[str] = []  # the reasoning so far
        self._rest = ""  # the text that is not parsed yet
        self._lines, self._line = Lines(), ""  # the lines so far, and the last one
        self._answer: int | None = None  # the first piece after the last quoted tag that stood alone on a line

    def add(self, text: str, is_last: bool = False) -> tuple[str, str | None]:
        """Add the next piece. Return its reasoning, and the text after the tag that ends it, or ``None``."""
        self._rest += text
        n = len(self._pieces)
        while (i := self._rest.find(self.end)) >= 0:
            self._take(i)
            behind = self._rest[len(self.end) :]
            if not (behind or is_last) and self._line.endswith("`") and not self._lines.is_code(self._line):
                break  # the next character decides
            if not self._is_quoted(behind):
                return "".join(self._pieces[n:]), behind
            self._take(len(self.end))
        else:
            self._take(len(self._rest) - (0 if is_last else overlap(self._rest, self.end)))
        return "".join(self._pieces[n:]), None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def unquoted(self) -> str:
        answer = "" if self._answer is None else "".join(self._pieces[self._answer :])
        return answer if answer.startswith("\n") else ""

    @property
    def closing(self) -> str:
        """The text that would end the reasoning here, as in a chat template; it closes an open code block first."""
        if self._rest.startswith(self.end):
            return "\n\n"  # then no backtick follows
        line = self._line + self._rest
        lines, breaks = (self._lines.add(line), "\n") if line else (self._lines, "")
        fence = f"{lines.marks}\n" if lines.is_code(self.end) else ""
        return f"{breaks}{fence}{self.end}\n\n"

    def _take(self, n: int) -> None:
        text, self._rest = self._rest[:n], self._rest[n:]
        self._pieces.append(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._lines = self._lines.add(line)

    def _is_quoted(self, behind: str) -> bool:
        if self._lines.is_code(self._line):
            if not self._line.strip():
                self._answer = len(self._pieces) + 1
            return True
        return self._line.endswith("`") and behind.startswith("`")


def overlap(text: str, word: str) -> int:
    """The number of characters at the end of the text that may be the beginning of the word."""
    i = max(0, len(text) - len(word) + 1)
    while (i := text.find(word[0], i)) >= 0:
        if word.startswith(text[i:]):
            return len(text) - i
        i += 1
    return 0
