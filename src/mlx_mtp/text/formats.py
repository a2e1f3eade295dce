"""The formats of calls: what chat templates write, and patterns that also match what models make of it."""

import re
from typing import Any, NamedTuple

import regex
from mlx_lm.tool_parsers import glm47, json_tools, qwen3_coder

# Bounded, so that little text is held back, and matched again with each piece.
SPACE = r"\s{0,64}"
LONGEST_KEY = 256  # characters of a parameter's name
START = "<tool_call>"
END = "</tool_call>"
LINE_END = r"\r?\n"
CLOSED = rf"[^\n<>]{{0,{LONGEST_KEY}}}(?:>|(?=[\n<]))"  # the end of a closing tag
_KEY = rf"[^\r\n<>]{{1,{LONGEST_KEY}}}"
_NAME = r"[^\s<>\"{\[]{1,256}"  # of a function that has no tag
_NEVER = "(?!)"


class Written(NamedTuple):
    """What a chat template writes around a function's name, the keys and values of its parameters, and its reasoning."""

    begin: str
    function: str  # a tag with which a call may also begin
    named: str
    parameter: str
    keyed: str
    valued: str
    end: str
    thought: tuple[str, str]  # before the tag that ends the reasoning, and behind it


class Format:
    """How a model writes calls.

    Args:
        written (Written): What its template writes.
        function (str): A pattern of a function's tag, with its ``name``.
        parameter (str): A pattern of a parameter's tag, with its ``key``.
        after (str): A pattern of what properly follows a value: the next parameter, with its ``key``, or the function's end.
        closers (str): A pattern of the names of closing tags.
        odd_closers (str): Further names that models write in them.
        closes_function (str): A pattern of the closing tag of a function within a call.
        is_json (bool): Whether calls are JSON, and these tags a mistake.
    """

    def __init__(
        self,
        written: Written,
        *,
        function: str,
        parameter: str,
        after: str,
        closers: str,
        odd_closers: str = _NEVER,
        closes_function: str = _NEVER,
        is_json: bool = False,
    ):
        self.written = written
        self.is_json = is_json
        self.proper = written.valued.strip("\n")  # the tag that ends a value
        # Whether calls and values are on lines of their own. Otherwise a call may follow words.
        self.has_lines = written.valued.startswith("\n")
        line, bare = (LINE_END, function) if self.has_lines else ("", f"(?P<name>{_NEVER})")
        start = rf"(?:{START}\n?(?={START}))?(?P<start>{START}{SPACE})"  # a model may write it twice
        begin = f"{f'(?:{start})?' if self.has_lines else start}{function}"
        named = "" if self.has_lines else rf"{_NAME}{SPACE}\{{{SPACE}[\"}}]|"  # JSON behind a name
        json = rf"(?P<json>{START}{SPACE}(?:{named}(?:\[{SPACE})?\{{{SPACE}\"))"
        self.block = regex.compile(rf" {{0,3}}(?:{begin}|{json})")
        self.part = regex.compile(rf"{SPACE}(?:{parameter}|{bare}|(?P<close>{closes_function})|{END})")
        self.after_function = regex.compile(rf"{SPACE}(?:(?P<end>{END})|{bare})")
        self.next = regex.compile(rf"{SPACE}(?:{parameter}|{begin}|{json}|(?P<last>\Z))")
        self.after_value = regex.compile(rf"{SPACE}(?:{after})")
        self.opening = rf"(?P<parameter>{parameter})|(?P<begin>{begin})"
        self.closed = rf"(?:{closers}|{odd_closers})\b"
        self.begin_line = regex.compile(rf"\A{line}")  # around a value
        self.end_line = regex.compile(rf"{line}\Z", regex.REVERSE)
        self.last_line = regex.compile(rf"{line}{self.proper}")
        closing = rf"(?:(?:</(?:{closers})[^\n<>]*>?\s*)+(?:{START}\s*)?)?"  # the last tag may lack its slash
        of_tags = rf"{LINE_END}[ \t]*" if self.has_lines else rf"{LINE_END}[ \t]*(?!{self.proper})"
        self.end_of_text = regex.compile(rf"(?:{of_tags})?{closing}\Z", regex.REVERSE)
        # Behind a value that is no string: also tags of other names, and those without their beginning.
        behind = rf"(?:(?:</[^\n<>]*|<?/{{0,2}}(?:{closers}))>?\s*)*\Z"
        self.behind_value = regex.compile(behind, regex.REVERSE)
        self._describe_texts()

    def _describe_texts(self) -> None:
        """Patterns for grammars, of the tags behind a text and within it."""
        begin, function, named, parameter, keyed, valued, end, _ = self.written
        ended = rf"{self.proper}\s*"
        call = rf"{function or begin}[^\s<>]+{_loose(named)}\s*"
        self.next_tags, self.last_tags = f"{ended}{parameter}", f"{ended}{_loose(end)}"
        # The same tags, as the template writes them
        self.exact = {self.next_tags: f"{valued}{parameter}", self.last_tags: f"{valued}{end}"}
        # A call that a text quotes: its beginning and end
        self.quoted = rf"{call}{parameter}[^\n<>]+{_loose(keyed)}"
        self.quoted_end = f"(?s:.*){ended}</(function|tool_call)>"
        # What else a text does not have: a next function, and a call without parameters, whose end the parser may not count
        again = rf"{ended}</function>\s*<function="
        empty = rf"{call}</(function|tool_call)>[^\s<]"
        self.never = [self.next_tags, self.last_tags, again, self.quoted, *([empty] if self.has_lines else [])]
        # Where the parser may take the tag of a parameter for the next one
        line = r"((?s:.*)\n)?[ \t]*" if self.has_lines else "(?s:.*)"
        self.opened = f"{line}{parameter}(%s){_loose(keyed)}"


def _qwen(is_json: bool) -> Format:
    """Of Qwen3-Coder and Qwen3.5. Older models and Qwen3-Next write JSON."""
    equals = rf"(?: ?[=:] ?| name ?= ?| (?=[^\s<>=]{{1,256}}>{LINE_END}))"
    opened = rf"(?:>|(?={LINE_END}))"  # the end of an opening tag
    close = rf"</ ?function{CLOSED}"
    function = rf"<function{equals}[\"']?(?P<name>[^\s<>\"']{{1,256}}?)[\"']? ?/?{opened}"
    function += rf"(?={SPACE}(?:<parameter{equals}{_KEY}{opened}|{close}|{END}))"
    tags = f"{START}\n", "<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", f"</function>\n{END}"
    return Format(
        Written(*tags, thought=("\n", "\n\n")),
        function=function,
        parameter=rf"<parameter{equals}(?P<key>{_KEY}){opened}",
        after=rf"<parameter=(?P<key>{_KEY})>|</function>{SPACE}(?:{END}|{function})",
        closers="parameter|function|tool_call",
        odd_closers="param|parameters|functions",
        closes_function=close,
        is_json=is_json,
    )


def _glm(line: str) -> Format:
    """Of GLM-4.7 and later; of GLM-4.5 and 4.6 with line ends."""
    parameter = rf"(?:<arg_key>{SPACE}){{1,2}}(?P<key>{_KEY})(?:</arg_key>{SPACE}){{0,2}}<arg_value>"
    followed = rf"(?={SPACE}(?:{parameter.replace('?P<key>', '?:')}|{END}))"
    tags = START, "", line, "<arg_key>", f"</arg_key>{line}<arg_value>", f"</arg_value>{line}", END
    return Format(
        Written(*tags, thought=("", line)),
        function=rf"(?P<name>{_NAME}){followed}",
        parameter=parameter,
        after=f"{parameter}|{END}",
        closers="arg_value|tool_call",
    )


def _loose(tags: str) -> str:
    """A pattern of these tags, with any white space between two of them."""
    return tags.replace("\n", "").replace("><", r">\s*<")


QWEN = _qwen(is_json=False)
JSON = _qwen(is_json=True)
GLM = _glm("")
GLM_LINES = _glm("\n")


def tags_of(tokenizer: Any) -> set[str]:
    """The tokens that are tags in pairs, such as ``<think>``: text of an answer, also where a tokenizer calls them special."""
    names = {token.content for token in tokenizer.added_tokens_decoder.values()}
    pairs = [(f"<{name[2:]}", name) for name in names if name.startswith("</")]
    return {tag for pair in pairs if pair[0] in names for tag in pair}


def format_of(tokenizer: Any) -> Format | None:
    """The format of calls in a model's chat template, by mlx-lm's parser for it; ``None`` for another format, or none."""
    if tokenizer.tool_parser == glm47.parse_tool_call:
        return GLM_LINES if re.search(r"</arg_key>(\n|\\n)", str(tokenizer.chat_template)) else GLM
    formats = {qwen3_coder.parse_tool_call: QWEN, json_tools.parse_tool_call: JSON}
    return formats.get(tokenizer.tool_parser)
