"""The search for the end of a value in a call, with the tags of its format, as they should be and as models write them.

The proper end is the closing tag before the next parameter or the end of the function, outside of quotations. Where the value
would end if tags were missing or malformed, the following text is held back until a proper end follows, or none.
"""

from collections.abc import Collection, Set
from functools import lru_cache
from typing import Any

import regex

from .formats import CLOSED, LINE_END, SPACE, Format

LONGEST_RUN = 16  # closing tags that are looked at together: a model may repeat one to its limit


@lru_cache(maxsize=512)
def _tags_in_value(format: Format, function: str, key: str) -> tuple[Any, Any]:
    """Patterns of the tags in a value of this function's parameter, and of the closing tags alone."""
    function = regex.escape(function)
    key = regex.escape(key)
    close = rf"</ ?(?P<closed>{format.closed}|(?:{function}|{key})(?!\w)){CLOSED}>?"
    tags = rf"{format.opening}|{close}|(?P<own><{key}[\s>])"
    return regex.compile(rf"(?P<break>(?:{LINE_END}[ \t]{{0,64}}){{1,64}})?(?:{tags})"), regex.compile(SPACE + close)


class EndOfValue:
    """Searches the end of a value in a streamed text. ``keys`` are the parameters of the call so far, with this one,
    ``declared`` those in the function's schema, and ``names`` the functions that the request offers.
    """

    def __init__(self, format: Format, function: str, key: str, keys: Set[str], declared: Set[str], names: Set[str]):
        self.format = format
        self.function = function
        self.key = key
        self.keys = keys
        self.declared = declared
        self.names = names
        self.tag, self.closing = _tags_in_value(format, function, key)
        self.n_own = 0  # open tags in the value that are named like it
        self.is_inline: bool | None = None  # whether the value begins on the line of its tag
        # The open quotations: None is a function, a key is a parameter that may be the call's next, "" is any other.
        self.quoted: list[str | None] = []
        # The ends of the value and of its tags if no proper end follows, and whether these end the function.
        self.end: tuple[int, int, bool] | None = None
        # How likely that end is. The first of the highest rank counts: 4 in quotations of other parameters, 3 with a closing
        # tag of a parameter, 2 at another run of tags, 1 at `</function>` alone, and the last of rank 0 in quotations.
        self.rank = -1
        self.n_read = 0  # characters of the text that were searched
        self.behind = ""  # the kind of the tag that ends there: "open", "close", or "" for none

    def search(self, text: str, is_last: bool) -> tuple[int, int | None, bool]:
        """The number of characters at the text's beginning that belong to the value, which the next call is without; if it ends
        after them the number of those of its closing tags, and whether these end the function.
        """
        if self.is_inline is None and (text not in ("", "\r") or is_last):
            self.is_inline = not (self.format.has_lines and self.format.begin_line.match(text))
        lines = text + "\n" * is_last  # which ends a tag without ">"
        while (m := self.tag.search(lines, self.n_read, partial=not is_last)) is not None:
            self._move(m.start())
            kind = "" if m.partial or m["closed"] is None else self._kind(m["closed"])
            if m.partial or (ended := self._read(lines, m, kind, is_last)) is None:
                break
            if ended:
                n = m.end() - len(self.format.proper)
                n = line.start() if (line := self.format.end_line.search(text, 0, n)) else n
                return n, m.end() - n, False
            self._move(m.end(), "close" if kind else "open" if m["parameter"] or m["begin"] else "")
            self.n_own += bool(m["own"]) - (m["closed"] == self.key and not kind)
        if m is None:
            self._move(len(text))
        if is_last:
            n, end, is_function = self.end or (*self.format.end_of_text.search(text).span(), True)
            return n, end - n, is_function
        n = self.n_read if self.end is None else self.end[0]
        self.n_read -= n
        self.end = self.end and (0, self.end[1] - n, self.end[2])
        return n, None, False

    def _move(self, n: int, behind: str = "") -> None:
        if n > self.n_read:
            self.n_read = n
            self.behind = behind

    def _read(self, text: str, m: Any, kind: str, is_last: bool) -> bool | None:
        """Read a tag of the value. Return whether the value properly ends with it, or ``None`` to wait for more text."""
        if kind:
            return self._read_closing(text, m, kind, is_last)
        is_apart = m["break"] is not None or bool(self.is_inline) or self.behind != ""
        if m["parameter"] and is_apart:
            return self._read_parameter(text, m, is_last)
        if m["begin"]:
            if self._is_plain and (m["start"] or (is_apart and m["name"] in self.names)):
                self._may_end(text, m, m.start(), "", 2)
            self.quoted.append(None)
        return False

    def _read_parameter(self, text: str, m: Any, is_last: bool) -> bool | None:
        key = key_of(m["key"], self.declared)
        if self._is_plain and key and key not in self.keys and (key in self.declared or not self.declared):
            self._may_end(text, m, m.start(), "", 2)
            self.quoted.append(key)
            return False
        last_line = self.format.last_line.match(text, m.end(), partial=not is_last)
        if last_line is not None and last_line.partial:
            return None
        if None in self.quoted or (last_line is None and self.format.begin_line.match(text[m.end() : m.end() + 2])):
            self.quoted.append("")
        return False

    def _read_closing(self, text: str, m: Any, kind: str, is_last: bool) -> bool | None:
        is_proper = m[0].endswith(self.format.proper)
        if is_proper and (after := self.format.after_value.match(text, m.end(), partial=not is_last)) is not None:
            if after.partial:
                return None
            if self._ends(after):
                return True
            if after["key"] is None:
                self._may_end(text, m, m.end(), kind, 4 if self._is_plain else 0)
        if self._is_plain or not is_proper:
            run = self._run(text, m.end(), kind, is_last)
            if run is None:
                return None
            kinds, end, opening = run
            is_apart = m["break"] is not None or self.behind != ""
            is_apart = is_apart or (bool(self.is_inline) and text[end:].lstrip(" \t")[:1] in ("", "\r", "\n"))
            is_run = opening or len({*kinds}) > 1 or (kind == "t" and is_apart)
            if self._is_plain and self.behind != "close" and (is_run or (kind == "f" and is_apart)):
                self._may_end(text, m, end, kinds, 1 + is_run + (is_run and "p" in kinds and not self.quoted))
            if not is_proper and kinds.startswith("pp"):
                return False  # the next one closes it
        if self.quoted and (self.quoted[-1] is None) == (kind != "p"):
            behind = text[m.end() :].lstrip(" \t")
            is_empty = self.behind == "open"  # the quotation
            if not behind and not is_last and not is_empty:
                return None
            # In the middle of a line, it ends only what began there.
            if is_empty or not self.format.has_lines or behind[:1] in ("", "\r", "\n", "<"):
                self.quoted.pop()
        return False

    @property
    def _is_plain(self) -> bool:
        """Whether the text here is within no quotation, except for parameters that cannot be the call's next."""
        return not any(key != "" for key in self.quoted)

    def _may_end(self, text: str, m: Any, end: int, kinds: str, rank: int) -> None:
        """Note that the value may end before this tag, with closing tags of these kinds."""
        if rank > self.rank or rank == self.rank == 0:
            # A line break belongs to a closing tag, and all line breaks to an opening one. GLM's own tag has none.
            breaks = m["break"] or ""
            is_right = not self.format.has_lines and m[0].endswith(self.format.proper)
            start = m.start() + (len(breaks) if is_right else breaks.rindex("\n") if breaks and kinds else 0)
            start -= not is_right and start > m.start() and text[start - 1] == "\r"
            self.end = (start, max(start, end), kinds.strip("p") != "")
            self.rank = rank

    def _kind(self, closed: str) -> str:
        """The kind of a closing tag: of a parameter, a function or the call; "" if it closes a tag in the value."""
        if closed == "tool_call":
            return "t"
        if closed == self.key:
            return "" if self.n_own else "p"
        return "f" if closed == self.function or closed.startswith("function") else "p"

    def _ends(self, after: Any) -> bool:
        if after["key"] is None:
            return not self.quoted
        key = key_of(after["key"], self.declared)
        if key in self.keys or not key:
            return False
        # A quotation of a parameter that is the next one was no parameter itself, since a key comes once.
        is_quoted_next = key in self.declared and (self._is_plain or key in self.quoted)
        return not self.quoted or (is_quoted_next and None not in self.quoted)

    def _run(self, text: str, end: int, kinds: str, is_last: bool) -> tuple[str, int, bool] | None:
        """The kinds of the closing tags from here on, their end, and whether an opening tag or the end follows; or ``None``."""
        while len(kinds) < LONGEST_RUN and (m := self.closing.match(text, end, partial=not is_last)) is not None:
            if m.partial:
                return None
            if not (kind := self._kind(m["closed"])):
                break
            kinds = kinds + kind
            end = m.end()
        m = self.format.next.match(text, end, partial=not is_last)
        if m is None:
            return kinds, end, False
        if m.partial or (m["last"] is not None and not is_last):
            return None
        if m["last"] is not None:
            return kinds, m.end(), True
        key = m["key"] and key_of(m["key"], self.declared)
        if key and key not in self.keys and (key in self.declared or (kinds.startswith("p") and not self.quoted)):
            return "p", end, True  # the function goes on
        return kinds, end, bool(m["start"] or m["name"] in self.names or m["json"])


def key_of(raw: str, declared: Collection[str]) -> str:
    """The key of an opening tag: as written if the function declares it, and else without quotes."""
    clean = raw.strip(" \"'/")
    return next((key for key in (raw, clean, *clean.split()[:1]) if key in declared), clean)


def bare_value(text: str, key: str, format: Format) -> str:
    """The text of a parameter's value that is no string, without tags at its beginning and end."""
    opening = f"{format.written.parameter}{key}{format.written.keyed.strip()}"
    text = text.strip().removeprefix(opening[opening.rindex("<") :])
    return text[: format.behind_value.search(text).start()]
