"""The laws of the tool calls' parser: what the templates write is read back, and of any other text nothing is lost."""

import json
import re
from functools import cache
from io import StringIO
from itertools import cycle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_mtp.text.formats import GLM, QWEN
from mlx_mtp.text.schema import Schema, to_json
from mlx_mtp.text.tool_calls import CallArguments, CallBegins, CallEnds, Text, ToolCallParser
from tests.support.profiles import examples
from tests.support.tool_texts import (
    INTEGER,
    OBJECT,
    PARTS,
    SCHEMAS,
    STRING,
    TAGS,
    every_format,
    every_template,
    render,
    rendered,
)


def parse(text: str, sizes=(1,), cut: bool = False, schemas=SCHEMAS, format=QWEN) -> list:
    """The events of a text in pieces of these sizes, over and over, joined: content, or [name, JSON of the arguments, whether
    the call is complete].
    """
    parser, found, rest = ToolCallParser(schemas, format), [], StringIO(text, newline="")
    pieces = iter(map(rest.read, cycle(sizes)).__next__, "")
    for event in [event for piece in pieces for event in parser.add(piece)] + parser.finish(cut):
        if isinstance(event, Text):
            assert event.text
            if not found or type(found[-1]) is list:
                found.append("")
            found[-1] += event.text
        elif isinstance(event, CallBegins):
            assert event.index == sum(type(f) is list for f in found)
            found.append([event.name, "", False])
        elif isinstance(event, CallArguments):
            assert event.text
            assert not found[-1][2]
            found[-1][1] += event.text
        else:
            assert isinstance(event, CallEnds)
            found[-1][2] = True
            assert type(json.loads(found[-1][1])) is dict
    assert parser.n_calls == sum(type(f) is list for f in found)
    return found


def calls_of(text: str, sizes=(1,), schemas=SCHEMAS, format=QWEN) -> tuple[str, list[tuple[str, dict]]]:
    """(content, calls), of which all must be complete."""
    found = parse(text, sizes, schemas=schemas, format=format)
    assert all(f[2] for f in found if type(f) is list)
    content = "".join(f for f in found if type(f) is str)
    return content, [(f[0], json.loads(f[1])) for f in found if type(f) is list]


# What the template writes

QUOTES = {
    format: render("write", {"path": "a", "content": "b\n"}, format=format)
    + "\n"
    + render("add", {"a": 1}, format=format)
    for format in TAGS
}
QUOTE = QUOTES[QWEN]
AMBIGUOUS = re.compile(
    r"</parameter>\s*(<parameter=|</function>\s*(</tool_call>|<function=))|</arg_value>\s*(<arg_key>|</tool_call>)"
)

words = st.text(max_size=8) | st.sampled_from(["12", "nul", "{a", "tru"])
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
integers, floats = st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | integers | floats | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(words, values, max_size=3)


@cache
def typed_of(format) -> list:
    """Schemas, each with the values that it allows and that a text can tell apart."""
    strings = st.lists(st.sampled_from(TAGS[format]) | words, max_size=8).map("".join)
    strings = strings.filter(lambda s: not AMBIGUOUS.search(s) and not s.endswith("\r"))  # a line end would be layout
    between = st.sampled_from(["\n"] if format == QWEN else ["\n", ""])
    texts = strings | st.tuples(words, between, words).map(lambda x: f"{x[0]}{x[1]}{QUOTES[format]}{x[1]}{x[2]}")
    return [
        (STRING, texts),
        (INTEGER, integers),
        ({"type": "number"}, floats | st.integers()),
        ({"type": "boolean"}, st.booleans()),
        ({"type": "null"}, st.none()),
        (OBJECT, objects),
        ({"type": "array"}, st.lists(values, max_size=3)),
        ({"type": ["string", "null"]}, st.none() | texts.filter(lambda s: s.strip().lower() not in ("null", "none"))),
        ({"anyOf": [INTEGER, {"type": "null"}]}, st.none() | st.integers()),
        ({"oneOf": [OBJECT, STRING]}, objects | texts.filter(lambda s: s.strip()[:1] not in ("{", "[", "("))),
        ({"$ref": "#/$defs/count"}, st.integers()),
        ({"enum": ["a", "b", None]}, st.sampled_from(["a", "b", None])),
        ({}, st.booleans() | st.integers() | objects),
    ]


BLOCK = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)  # of code, which would quote the calls
contents = st.lists(st.sampled_from(["<tool_call>", "see ", "`", "\n"]) | words, max_size=5)
contents = contents.map(lambda s: "".join(s).strip()).filter(lambda s: not BLOCK.search(s))


def is_before_calls(content: str, format) -> bool:
    """Whether calls may follow this content: on its last line, where the format has no lines, and its tag is none of theirs."""
    line = content.rpartition("\n")[2]
    return format == QWEN or not (line.count("`") % 2 or line.startswith(">") or line.endswith("<tool_call>"))


@st.composite
def answers(draw, format) -> tuple[str, list, dict, str]:
    """(content, calls, schemas, what the template writes)"""
    schemas, calls = {}, []
    for name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        typed = draw(st.dictionaries(names, st.sampled_from(typed_of(format)), max_size=4))
        properties = {key: schema for key, (schema, _) in typed.items()}
        schemas[name] = {"type": "object", "properties": properties, "$defs": {"count": INTEGER}}
        calls.append((name, {key: draw(of) for key, (_, of) in typed.items()}))
    content = draw(contents.filter(lambda content: is_before_calls(content, format)))
    return content, calls, schemas, rendered(content, calls, draw(st.booleans()), format)


sizes_ = st.lists(st.integers(1, 30), min_size=1, max_size=5)
laws = {"suppress_health_check": [HealthCheck.too_slow]}


@every_template
@settings(examples(25), **laws)
@given(st.data(), sizes_)
def test_reads_what_the_template_writes(format, data, sizes):
    content, calls, schemas, text = data.draw(answers(format))
    found, read = calls_of(text, sizes, schemas, format)
    assert read == calls
    assert found.strip() == content


# Any text


@every_format
@settings(examples(60), **laws)
@given(st.data(), sizes_, st.booleans())
def test_loses_nothing(format, data, sizes, cut):
    parts = data.draw(st.lists(st.sampled_from(PARTS[format]) | st.just(""), max_size=25))
    text = "".join(part or f"w{i}w" for i, part in enumerate(parts))
    found = parse(text, sizes, cut, format=format)
    assert found == parse(text, [len(text) + 1], cut, format=format)
    if not any(type(f) is list for f in found):
        assert found == [text] * bool(text)
    said = " ".join(f if type(f) is str else f"{f[0]} {f[1]}" for f in found)
    assert [word for word in re.findall(r"w\d+w", text) if word not in said] == []
    for f in found:
        if type(f) is list and not f[2]:
            with pytest.raises(ValueError, match="Unterminated string"):
                json.loads(f[1])


# Cases


JSON = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADDED = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
ONE_LINE = "<tool_call><function=add><parameter=a>1</parameter><parameter=b>2</parameter></function></tool_call>"
OPEN = "<parameter=b>\n"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # Several functions in one block, blocks on one line, and a call without its last tag.
        (f"<tool_call>\n{ADDED}<function=now>\n</function>\n</tool_call>", [("add", {"a": 1}), ("now", {})]),
        (ONE_LINE * 2, [("add", {"a": 1, "b": 2})] * 2),
        (f"<tool_call>\n{ADDED}", [("add", {"a": 1})]),
        (f"{JSON}\n</tool_call>", [("add", {"a": 1, "b": 2})]),
        *((f"{JSON[:-13]}\n{x}", [("add", {"a": 1, "b": 2})] * 2) for x in (JSON, render("add", {"a": 1, "b": 2}))),
        # A quotation that is left open ends with the text, and a key comes once.
        (render("write", {"path": "a", "content": OPEN}), [("write", {"path": "a", "content": OPEN})]),
        (render("add", {"a": 1}).replace("\n</function>", "\n<parameter=a>\n2\n</parameter>\n</function>"),
         [("add", {"a": "1\n</parameter>\n<parameter=a>\n2"})]),
        # What has no schema is a string.
        (render("unknown", {"a": 5, "b": True}), [("unknown", {"a": "5", "b": "True"})]),
        (render("add", {"a": 5, "c": 5}), [("add", {"a": 5, "c": "5"})]),
    ],
)  # fmt: skip
def test_calls_of_other_forms(text, calls):
    assert calls_of(text) == ("", calls)


@pytest.mark.parametrize(
    ("block", "want"),
    [
        ('{"name": "add", "arguments": {"a": 1, "b": 12345678901234567890}}', [("add", {"a": 1, "b": 12345678901234567890})]),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', [("add", {"a": 1})]),
        ('{"name": "write", "arguments": {"path": "</tool_call>\\""}}', [("write", {"path": '</tool_call>"'})]),
        ('{"name": "write", "arguments": {"path": "a\nb"}}', [("write", {"path": "a\nb"})]),
        ('[{"name": "now"}, {"name": "add", "parameters": {"a": 1e400}}]', [("now", {}), ("add", {"a": "1e400"})]),
        # What is no call is content.
        *((text, None) for text in (
            "nothing", '{"name": "add", "arguments": {1}}', '{"name": 5}', '{"name": "add", "arguments": [1]}', '{"a": "b"}',
            "<function=add>\nno parameter\n</function>",
        )),
    ],
)  # fmt: skip
def test_json_in_a_block(block, want):
    call, text = render("now", {}), f"<tool_call>\n{block}\n</tool_call>\n"
    content = "Well.\n\n" if want else f"Well.\n{text}"
    assert calls_of(f"Well.\n{text}{call}") == (content, [*(want or []), ("now", {})])


GLM_ADD = render("add", {"a": 1, "b": 2}, format=GLM)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"I look.{GLM_ADD}{GLM_ADD}", "I look.", [("add", {"a": 1, "b": 2})] * 2),  # also in a stream
        (f"`a` is:\n{GLM_ADD}\nSo.", "`a` is:\n\nSo.", [("add", {"a": 1, "b": 2})]),
        ("<tool_call>now</tool_call><tool_call>now\n</tool_call>", "", [("now", {})] * 2),
        ("<tool_call>add <arg_key>a</arg_key> <arg_value>1</arg_value> </tool_call>", "", [("add", {"a": 1})]),
        # Line ends of a value are its own.
        (render("write", {"path": "\na\r\n"}, format=GLM), "", [("write", {"path": "\na\r\n"})]),
        *((f"<tool_call>write<arg_key>path</arg_key><arg_value>a\n</arg_value>{x}", "", [("write", {"path": "a\n"}), *more])
          for x, more in (("", []), (GLM_ADD, [("add", {"a": 1, "b": 2})]))),
        ("<tool_call>write<arg_key>content</arg_key><arg_value>a\n</tool_call>", "", [("write", {"content": "a"})]),
        # A key comes once, and what has no schema is a string.
        (GLM_ADD.replace(">b<", ">a<"), "", [("add", {"a": "1</arg_value><arg_key>a</arg_key><arg_value>2"})]),
        (render("unknown", {"a": 5, "b": True}, format=GLM), "", [("unknown", {"a": "5", "b": "true"})]),
        # JSON, with the name before it as well, and in the forms that mlx-lm's parser reads or the API has.
        *((f"I look. <tool_call>{x}</tool_call>", "I look. ", [("add", {"a": 1})]) for x in (
            '{"name": "add", "arguments": {"a": 1}}', 'add\n{"a": 1}', 'add {"a": 1}\n',
            '{"function": "add", "arguments": {"a": 1}}', '{"tool": {"name": "add", "arguments": {"a": 1}}}',
            '{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}',
        )),
        ("<tool_call>now {}</tool_call>", "", [("now", {})]),
    ],
)  # fmt: skip
def test_calls_of_glm(text, content, calls):
    for size in (1, 7, len(text)):
        assert calls_of(text, [size], format=GLM) == (content, calls)


def test_arguments_of_glm_stream_behind_words():
    parser = ToolCallParser(SCHEMAS, GLM)
    text = "I write.<tool_call>write<arg_key>content</arg_key><arg_value>a line\nand ano"
    arguments = [event.text for event in parser.add(text) if isinstance(event, CallArguments)]
    assert arguments == ['{"content": "a line\\nand ano']


NO_CALLS = {
    QWEN: [
        '<tool_call>\n{"name": "add", "arguments": {"a": "',
        "<tool_call>\n<function=add>\n",
        f"Write <tool_call>\n{ADDED}</tool_call> to call it.",
        "The tag <tool_call> begins a call,\n<tool_call> too, and `</tool_call>` ends it.",
        "```xml\n" + render("now", {}) + "\n```",
        "~~~~\n~~~\n" + render("now", {}) + "\n~~~~",
        "    " + render("now", {}),
        # Without its opening tag, one behind text, of a tool that is not offered, or quoted.
        "Now:\n<function=now>\n</function>", "<function=later>\n</function>", "<function=now> is\n",
        "- <function=now>\n</function>", "`<function=now>\n</function>`",
        "- ```\n  <function=now>\n  </function>\n  ```", "> " + ONE_LINE, f"It is `{ONE_LINE}", f"`` ` {ONE_LINE}",
        # Behind words, and in a fence, where text follows.
        f"Look: {ONE_LINE} is how.", f"Look: {ONE_LINE}{ONE_LINE}\n\nThat is how.", f"```\n{ONE_LINE}\nNo fence closes.",
    ],
    GLM: [
        '<tool_call>add {"a": "', '<tool_call>{"a": 1}</tool_call>', "<tool_call>add", "<tool_call>add<arg_key>a",
        "The tag <tool_call> begins a call,\n<tool_call> too, and `</tool_call>` ends it.", f"```xml\n{GLM_ADD}\n```",
        f"    {GLM_ADD}", f"- ```\n  {GLM_ADD}\n  ```", f"> {GLM_ADD}", f"It is `{GLM_ADD}", f"It is `{GLM_ADD}`.",
        f"```\n{GLM_ADD}\nNo fence closes.",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("format", "text"), [(format, text) for format in NO_CALLS for text in NO_CALLS[format]])
def test_what_is_no_call_is_content(format, text):
    assert calls_of(text, format=format) == (text, [])
    # and what follows it is read again
    text += "\n" if "No fence" not in text else "\n```\n"
    assert calls_of(text + render("add", {"a": 1}, format=format), format=format) == (text, [("add", {"a": 1})])


IN_VALUES = {
    QWEN: [
        "</tool_call>", "</function>", "</parameter>", "a</parameter>b", "\n</parameter>\n", "</parameter>\n</function>\n",
        "<parameter=b>", "x\n<parameter=b>", "\n", "\n\n", " \t", "",
        QUOTE, f"{QUOTE}\n", f"\n{QUOTE}\n{QUOTE}\n...", "<function=add></tool_call>0",
        "<parameter=city>\nRome\n</parameter>\n<parameter=day>\n1\n</parameter>",
    ],
    GLM: [
        "</tool_call>", "</arg_value>", "a</arg_value>b", "\n</arg_value>\n", "</arg_key>", "<arg_key>b</arg_key>",
        "\n", "\r\n\n", " \t", "", "x\n<arg_key>b</arg_key><arg_value>", QUOTES[GLM], f"{GLM_ADD}\n", f"\n{GLM_ADD * 2}\n...",
        f"Say {GLM_ADD}, or", "<tool_call>add</tool_call>0", "<tool_call>now</tool_call>", "<tool_call>add", "<tool_call>",
        "<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>day</arg_key><arg_value>1</arg_value>",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("format", "value"), [(format, value) for format in IN_VALUES for value in IN_VALUES[format]])
def test_tags_in_a_value(format, value):
    for arguments in ({"path": value, "content": "c"}, {"path": "p", "content": value}):
        for after in ([], [("now", {})], [("write", {"path": value})]):
            calls = [("write", arguments), *after]
            assert calls_of(rendered("", calls, format=format), format=format)[1] == calls


@every_format
@pytest.mark.parametrize("end", ["</", "</arg", "</parameter x"])
def test_a_list_whose_last_text_ends_as_a_tag_begins(format, end):
    call, schemas = ("f", {"list": [f"a{end}"], "n": 1}), {"f": {"properties": {"list": ARRAY, "n": INTEGER}}}
    assert calls_of(render(*call, format=format), schemas=schemas, format=format) == ("", [call])


@pytest.mark.parametrize("value", ["p", "", "\r\n", "\ra", "a\r\n</parameter>\r\nb"])
@pytest.mark.parametrize(("first", "last"), [("\r\n", "\r\n"), ("\n", "\r\n"), ("\r\n", "\n"), ("\r\n", "")])
def test_one_line_end_of_either_kind_on_each_side_is_layout(value, first, last):
    if not last and value.endswith("\n"):
        return
    tags = f"<parameter=path>{first}{value}{last}</parameter>\r\n<parameter=content>\r\n{value}{last}</parameter>\r\n"
    call = f"<tool_call>\r\n<function=write>\r\n{tags}</function>\r\n</tool_call>"
    for sizes in ((1,), (500,)):
        assert calls_of(call, sizes) == ("", [("write", {"path": value, "content": value})]), sizes
    added = f"<tool_call>\r\n<function=add>\r\n<parameter=a>{first}5{last}</parameter>\r\n</function>\r\n</tool_call>"
    assert calls_of(added) == ("", [("add", {"a": 5})])


@every_format
def test_a_closing_tag_that_a_model_repeats_to_its_limit(format):
    """Each is read once: a minute's work otherwise."""
    tags = format.proper * 4000
    text = render("write", {"content": "a"}, format=format).replace(format.proper, tags)
    value = "a" + "\n" * (format == QWEN) + tags.removesuffix(format.proper)
    assert calls_of(text, [1000], format=format) == ("", [("write", {"content": value})])


# Tags that drift

OPEN_FUNCTIONS = [
    "<function={}>", "<function={}", '<function="{}">', '<function name="{}">', "<function = {}>", "<function={}/>",
    "<function {}>", "<function:{}>",
]  # fmt: skip
OPEN_PARAMETERS = [
    "<parameter={}>", "<parameter={}", '<parameter="{}">', "<parameter='{}'>", '<parameter="{}"', '<parameter name="{}">',
    "<parameter = {}>", "<parameter={} >", '<parameter={} type="string">', "<parameter {}>", "<parameter:{}>",
]  # fmt: skip
CLOSE_PARAMETERS = [
    "</parameter>", "", "</parameter", "</parameter/>", "</parameter={}>", "</{}>", "</parameters>", "</param>",
    "</ parameter>", "</parameter>>",
]  # fmt: skip
CLOSE_FUNCTIONS = ["</function>", "", "</function", "</function={}>", "</function/>", "</function >", "</functions>"]
ENDS = ["</tool_call>", "", "</tool_call></tool_call>"]
FORMS = {
    QWEN: [OPEN_FUNCTIONS, OPEN_PARAMETERS, CLOSE_PARAMETERS, CLOSE_FUNCTIONS, ENDS],
    GLM: [
        ["{}", "\n{}", " {} ", "<tool_call>{}", "\n<tool_call>{}"],
        [
            "<arg_key>{}</arg_key><arg_value>", "<arg_key>{}</arg_key>\n<arg_value>", "<arg_key> {} </arg_key> <arg_value>",
            "<arg_key>{}</arg_key></arg_key><arg_value>", "<arg_key><arg_key>{}</arg_key><arg_value>", "<arg_key>{}<arg_value>",
        ],
        ["</arg_value>", "", "</arg_value/>", "</ arg_value>", "</arg_value>>", "</{}>"],
        [""], ENDS,
    ],
}  # fmt: skip
PROPER = {format: [of_a_tag[0] for of_a_tag in forms] for format, forms in FORMS.items()}
DRIFTS = {
    format: [
        [*PROPER[format][:i], form, *PROPER[format][i + 1 :]] for i, of_a_tag in enumerate(forms) for form in of_a_tag
    ]
    for format, forms in FORMS.items()
}
DRIFTS[QWEN] += [
    [*PROPER[QWEN][:2], *closing] for closing in (
        ["", "", "</tool_call>"], ["", "", ""], ["</{}>", "</{}>", ""], ["</parameter>", "", ""],
        ["</parameter>", "</{}>", "</tool_call>"], ["</parameter", "</function", ""], ["", "</function", "</tool_call>"],
        ["</function>", "</function>", "</tool_call>"], ["</tool_call>", "</function>", "</tool_call>"],
    )
]  # fmt: skip
DRIFTS[GLM] += [[*PROPER[GLM][:2], *closing] for closing in (["", "", ""], ["</tool_call>", "", "</tool_call>"])]


def write_call(name: str, arguments: dict, forms: list, between: str = "\n", format=QWEN) -> str:
    """A call with tags of these forms, each a template or a function that makes one out."""
    open_function, open_parameter, close_parameter, close_function, end = forms
    values = [(open_parameter.format(key), str(value), close_parameter.format(key)) for key, value in arguments.items()]
    if format == GLM:
        lines = ["<tool_call>" + open_function.format(name), *map("".join, values)]
    else:
        lines = ["<tool_call>", open_function.format(name)]
        lines += [line for begin, value, end_of_value in values for line in (begin + between + value, end_of_value)]
    lines += [close_function.format(name), end]
    return between.join(line for line in lines if line)


READ, LIMITED = ("read", {"path": "a.py"}), ("read", {"path": "b", "limit": 5})
WRITE = "write", {"path": "a.py", "content": "x < 1\n\n    </b>  # `<parameter=mode>`"}
FILES = {
    "read": {"properties": {"path": STRING, "limit": INTEGER}, "required": ["path"]},
    "write": {"properties": {"path": STRING, "content": STRING, "mode": STRING}},
}


NEED_LINES = {"<function={}", "<function {}>", "<parameter={}", '<parameter="{}"', "<parameter {}>"}


@every_format
@pytest.mark.parametrize(
    ("call", "other", "between"),
    [(READ, WRITE, "\n"), (WRITE, WRITE, "\n"), (LIMITED, WRITE, "\n"), (LIMITED, READ, "")],
)
def test_a_call_whose_tags_drift_is_the_one_that_is_meant(format, call, other, between):
    """Alone, before and after another, and before text if it has an end. Tests below have pieces of other sizes."""
    proper, sizes = write_call(*other, PROPER[format], between, format), (4,)
    for forms in DRIFTS[format]:
        if not between and (NEED_LINES & {*forms} or (forms[2] in ("</parameter", "") and forms[3] == "</function")):
            continue
        drifting = write_call(*call, forms, between, format)
        for text, calls in (
            (drifting, [call]), (f"{drifting}\n{proper}", [call, other]), (f"{proper}\n{drifting}", [other, call]),
            (f"{drifting}\n{drifting}\n\n{drifting}", [call] * 3), (f"{proper}{drifting}", [other, call]),
        ):  # fmt: skip
            content, found = calls_of(text, sizes, FILES, format)
            assert found == calls, text
            assert content.strip() == "", text
        if forms[3] or forms[4]:
            assert calls_of(f"{drifting}\n\nIt is so.", sizes, FILES, format) == ("\n\nIt is so.", [call]), forms


TAG = re.compile(r"</?(?:tool_call|function|parameter|arg_key|arg_value)[^<>]*>")
CALLS = [READ, ("write", {"path": "a", "content": "x < 1\n\n  </b>\n"}), LIMITED, ("now", {})]
ALTER = {
    "drop": lambda tag: "", "drop its end": lambda tag: tag[:-1], "drop its beginning": lambda tag: tag[1:],
    "twice": lambda tag: f"{tag}\n{tag}", "open": lambda tag: tag.replace("/", ""), "close": lambda tag: f"</{tag[1:]}",
    "of a parameter": lambda tag: "</parameter>", "of a function": lambda tag: "</function>",
    "of a value": lambda tag: "</arg_value>", "of all": lambda tag: "</tool_call>",
}  # fmt: skip


@every_format
@pytest.mark.parametrize("alter", ALTER.values(), ids=ALTER)
@settings(examples(8), **laws)
@given(st.lists(st.sampled_from(CALLS), min_size=1, max_size=3), st.data(), sizes_)
def test_one_tag_that_is_wrong_is_wrong_for_its_call_alone(format, alter, calls, data, sizes):
    """The other calls are as they were, and no call has another one in it, or a value of a wrong type."""
    blocks = [write_call(*call, PROPER[format], format=format) for call in calls]
    schemas = {**FILES, "now": {}}
    i = data.draw(st.integers(0, len(calls) - 1))
    tag = data.draw(st.sampled_from([*TAG.finditer(blocks[i])]))
    blocks[i] = blocks[i][: tag.start()] + alter(tag[0]) + blocks[i][tag.end() :]
    text = "\n".join(blocks)
    _, found = calls_of(text, sizes, schemas, format)
    assert calls_of(text, [len(text)], schemas, format)[1] == found
    others = [call for n, call in enumerate(calls) if n != i]
    n = next((n for n, call in enumerate(found) if found[:n] + found[n + 1 :] == others), None)
    assert n is not None or found == others, text
    if n is not None:
        name, arguments = found[n]
        assert name == calls[i][0]
        assert arguments.keys() <= calls[i][1].keys()
        assert type(arguments.get("limit", 1)) is int
        assert not re.search("<tool_call>|<function=", str(arguments)), text


# Answers of prose, quotations and calls

PROSE = [
    "It is so.", "Use `<tool_call>` or <tool_call> for it.", "- a `</parameter>`", "1. The </function> tag\n   ends it.",
    "The form is `<function=read>`.", "> <tool_call>\n> <function=read>", "<parameter=path>", "a < b, c > d",
    "<functions> are\n</so>",
]  # fmt: skip
ANY_VALUES = ["a.py", "", "x < 1\n\n  y > 2", "<path>x</path>", "<b>\n  </i>", "` ``` `", "<tool_call>", "``\n~~~\nx"]
VALUES = {
    QWEN: ["see `<parameter=mode>` in", "the </function> tag", "`</parameter>`.", "use <function=read>: now"],
    GLM: ["see `<arg_key>mode</arg_key>` in", "the </tool_call> tag", "`</arg_value>`.", "use <tool_call>read: now"],
}


@cache
def arguments_of(format):
    """Functions and their arguments."""
    texts = st.sampled_from([*ANY_VALUES, *VALUES[format]])
    read = st.fixed_dictionaries({"path": texts}, optional={"limit": st.integers(-9, 99)})
    write = st.fixed_dictionaries({"path": texts, "content": texts})
    return st.tuples(st.just("read"), read) | st.tuples(st.just("write"), write)


@st.composite
def spoken(draw, format) -> tuple[str, str, list]:
    """(text, content, calls)"""
    parts, calls = [], []
    proper, quoted = PROPER[format], write_call(*WRITE, PROPER[format], format=format)
    for i in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["prose", "quoted", "proper", "drifting", "drifting", "bare"]))
        if kind == "prose":
            parts.append((f"w{i}w {draw(st.sampled_from(PROSE))}\n\n", True))
        elif kind == "quoted":
            containers = [("", ""), ("- ", "  "), ("1) ", "   "), ("- [ ] ", "  "), ("> ", "> ")]
            marker, indentation = draw(st.sampled_from(containers))
            fence = draw(st.sampled_from(["```", "~~~~"]))
            lines = [f"{fence}xml", *quoted.split("\n"), fence]
            parts.append((marker + f"\n{indentation}".join(lines) + f"\n\nw{i}w\n\n", True))
        else:
            forms = proper if kind != "drifting" else [draw(st.sampled_from(of_a_tag)) for of_a_tag in FORMS[format]]
            if kind == "drifting" and not forms[4]:  # text may follow
                closes = draw(st.sampled_from(FORMS[format][2]).filter(bool))
                forms[2:] = closes, proper[3], "" if proper[3] else ENDS[0]
            calls.append(draw(arguments_of(format)))
            call = write_call(*calls[-1], forms, format=format).removeprefix("<tool_call>\n" * (kind == "bare"))
            parts.append((f"{call}\n\n", False))
    if last := draw(st.sampled_from(["", "w Now:", "```xml\n", "- ~~~\n  a\n"])):
        calls.append(draw(arguments_of(format)))
        parts += [(last, True), (write_call(*calls[-1], proper, format=format), False)]
    return "".join(part for part, _ in parts), "".join(part for part, is_content in parts if is_content), calls


@every_format
@settings(examples(60), **laws)
@given(st.data(), sizes_)
def test_an_answer_is_its_words_and_its_calls(format, data, sizes):
    text, content, calls = data.draw(spoken(format))
    found, read = calls_of(text, sizes, FILES, format)
    assert read == calls
    assert found.split() == content.split()


# Calls that begin in other places


@pytest.mark.parametrize(
    "text", ["Let me look.", "Let me look: ", "**Now** `a` ", "```py\na\n", "- ```xml\n", "- Look.", "~~~\n```\n~~\n"]
)
def test_a_whole_block_that_ends_the_text_is_a_call_behind_words_and_in_an_open_fence(text):
    for call in (ONE_LINE, f"{ONE_LINE}\n", f"{ONE_LINE} {ONE_LINE}", render("add", {"a": 1, "b": 2}), JSON):
        want = [("add", {"a": 1, "b": 2})] * call.count("<tool_call>")
        assert calls_of(text + call) == (text, want), call
        assert parse(text + call, cut=True) == [text + call]
        assert parse(f"{text}{call} is how.") == [f"{text}{call} is how."]


@pytest.mark.parametrize("before", ["", "\n\n", "See.\n\n", "- a\n\n", f"{ONE_LINE}\n", "```\na\n```\n \n"])
def test_a_call_without_its_opening_tag(before):
    for end in ("", "\n</tool_call>", "\n</tool_call>\n\nIt runs.", "\n\nIt runs."):
        content, calls = calls_of(f"{before}<function=add>\n<parameter=a>\n3\n</parameter>\n</function>{end}")
        assert calls[-1] == ("add", {"a": 3}), end
        assert content == before.replace(ONE_LINE, "") + end.replace("\n</tool_call>", ""), end


# Values


def types(schema, defs=None):
    return Schema({"properties": {"p": schema}, "$defs": defs or {}}).types_of_property("p")


NUMBER, BOOLEAN, ARRAY, MAYBE = {"type": "number"}, {"type": "boolean"}, {"type": "array"}, {"type": ["string", "null"]}


def test_values_by_schema():
    defs = {"n": INTEGER, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, STRING]}}
    for schema, text, want in (
        (INTEGER, "12345678901234567890", 12345678901234567890), (INTEGER, " 7\n", 7), (INTEGER, "7.0", 7),
        (INTEGER, "1e3", 1000), (INTEGER, "0e999999999", 0), (INTEGER, "7.5", "7.5"), (INTEGER, "abc", "abc"),
        (INTEGER, "1e400", "1e400"), (INTEGER, "9" * 5000, "9" * 5000), (INTEGER, "1_000", "1_000"),
        (INTEGER, "None", None), (NUMBER, "1e400", "1e400"), (NUMBER, "NaN", "NaN"), (NUMBER, "-1.5e-3", -0.0015),
        (BOOLEAN, "True", True), (BOOLEAN, "TRUE", True), (BOOLEAN, "fALSE", False), (BOOLEAN, "TRUEST", "TRUEST"),
        (NUMBER, "+5", "+5"), (NUMBER, ".5", ".5"), (ARRAY, "'[1,2]'", "'[1,2]'"),
        (BOOLEAN, "false", False), (BOOLEAN, "yes", "yes"), (STRING, "null", "null"),
        (STRING, " 5 ", " 5 "), (MAYBE, "null", None), (MAYBE, "None", None), (MAYBE, "nullable", "nullable"),
        ({"anyOf": [INTEGER, {"type": "null"}]}, "5", 5), ({"oneOf": [STRING, ARRAY]}, "[1]", [1]),
        ({"allOf": [{"type": ["string", "integer"]}, INTEGER]}, "5", 5),
        ({"type": "string", "nullable": True}, "null", None), ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "auto"]}, "1", 1), ({"const": True}, "True", True), ({"type": "int"}, "5", 5),
        (OBJECT, '{"a": 1}', {"a": 1}), (OBJECT, "{'a': True, 'b': (1, None)}", {"a": True, "b": [1, None]}),
        (OBJECT, '{"a": "b\nc"}', {"a": "b\nc"}), (OBJECT, '{"a": 1e400, "b": NaN}', {"a": "1e400", "b": "NaN"}),
        (OBJECT, "{'a': 1e400}", "{'a': 1e400}"), (OBJECT, "{1,2}", "{1,2}"), (OBJECT, "[1]", "[1]"),
        (OBJECT, "{" * 100_000, "{" * 100_000), (ARRAY, "[" * 100_000, "[" * 100_000), (ARRAY, "(1, 2)", [1, 2]),
        (ARRAY, "[" + "-" * 100_000 + "1]", "[" + "-" * 100_000 + "1]"), ({}, "5", 5),
        ({"description": "anything"}, '{"a": null}', {"a": None}), (True, "text", "text"),
        ({"$ref": "#/$defs/n"}, "5", 5), ({"$ref": "#/nowhere"}, "text", "text"),
        ({"$ref": "#/$defs/loop"}, "text", "text"),
    ):  # fmt: skip
        got = json.loads(to_json(text, types(schema, defs)))
        assert (got, type(got)) == (want, type(want)), (schema, text[:40])


def test_hostile_schemas():
    chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 50} for i in range(200)}
    assert "string" in types({"$ref": "#/$defs/d0"}, chain)
    assert Schema({"additionalProperties": INTEGER}).types_of_property("c") == {"integer"}
    deep, far = {"type": "integer"}, {"$ref": "#/$defs/d0"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    far["$defs"] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}
    for schema in (deep, {"properties": {"a": deep}}, {"properties": {"a": far}, "$defs": far["$defs"]}):
        assert calls_of(render("f", {"a": 5}), schemas={"f": schema}) == ("", [("f", {"a": "5"})])
