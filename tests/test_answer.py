"""What an answer's text says: reasoning, text and calls, up to a stop word; its tokens; how long it thinks; what is code."""

import math
from itertools import product
from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import glm47, qwen3_coder

from mlx_mtp import load, mtp_generate_step
from mlx_mtp.server.engine.admission import make_budget
from mlx_mtp.server.request import ApiError, Prompt, Request
from mlx_mtp.text.answer import Reasoning, ends_in_reasoning
from mlx_mtp.text.formats import END, GLM, GLM_LINES, QWEN, START
from mlx_mtp.text.reasoning import Lines, end_of_reasoning
from mlx_mtp.text.tool_calls import CallArguments, CallBegins, Text
from tests.support import requests
from tests.support.decoding import plain
from tests.support.profiles import examples
from tests.support.requests import ASK, CHAT, MESSAGES, RESPONSES
from tests.support.tool_texts import FUNCTIONS, GLM_MARKS, TEMPLATES, model_with, render

TOOLS = requests.tools_of(CHAT, *FUNCTIONS)
CALL = f'{START}\n{{"name": "add", "arguments": {{"a": 1}}}}\n{END}'


def told(
    pieces, in_reasoning=False, stop=(), reason="stop", tools=TOOLS, goes_on=False, streams=False, format=QWEN
) -> tuple:
    """Pieces of an answer, a token each -> (reasoning, text, calls, finish reason), and the pieces that the text is made of."""
    marks = dict(has_thinking=True, think_start="<think>", think_end="</think>", chat_template=TEMPLATES[format])
    parser = qwen3_coder.parse_tool_call if format == QWEN else glm47.parse_tool_call
    tokenizer = SimpleNamespace(has_tool_calling=True, tool_parser=parser, **marks)
    request = Request("chat", "", [], tools, streams=streams)
    request.args, request.encoded = SimpleNamespace(stop_words=list(stop)), Prompt([], in_reasoning, goes_on)
    request.begin_answer(tokenizer, math.inf)
    reasoning, text, calls, tokens = "", "", "", []
    pieces = [*pieces, ""] if reason == "stop" else pieces
    for i, piece in enumerate(pieces, 1):
        events, finish_reason = request.answer.step(piece, reason if i == len(pieces) else None)
        for event in events:
            reasoning += event.text if isinstance(event, Reasoning) else ""
            calls += event.name if isinstance(event, CallBegins) else ""
            calls += event.text if isinstance(event, CallArguments) else ""
            if isinstance(event, Text):
                text += event.text
                tokens += event.tokens
        if finish_reason is not None:
            break
    assert tokens == sorted(set(tokens))
    return (reasoning, text, calls, finish_reason), [pieces[i] for i in tokens]


def read(text, size=1, **options):
    """(reasoning, text, calls, finish reason) of an answer that begins with reasoning, in pieces of this size."""
    return told([text[i : i + size] for i in range(0, len(text), size)], in_reasoning=True, **options)[0]


def test_an_answer_is_taken_apart_and_a_stop_word_ends_its_content():
    assert read(f"Hm.\n</think>\n\nWell.\n{CALL}") == ("Hm.", "Well.", 'add{"a": 1}', "tool_calls")
    assert read(f"</think>{CALL}", tools=None) == ("", CALL, "", "stop")
    text = f"A!B</think>\nOne\n{CALL}\ntwo! three"
    assert read(text, stop=["!", "add"]) == ("A!B", "One\ntwo", 'add{"a": 1}', "tool_calls")
    assert read("</think>abcabd", stop=["abd", "xyz"]) == ("", "abc", "", "stop")
    assert read("</think>abcab", stop=["abd"], reason="length") == ("", "abcab", "", "length")
    text = f"A!B</think>\nOne! two?\n{CALL}"
    for size in (1, len(text)):  # nothing follows the first, though it was written in the same step
        assert read(text, size, stop=["?", "!"]) == ("A!B", "One", "", "stop")
    for text in ("So:\n```c\nint x;\n</think>\n\nYes.", "So:\n```c\nint x = </think>;"):  # of code that nothing closes
        assert read(text, reason="length") == (text, "", "", "length")
    # Reasoning that goes on keeps its first line breaks.
    assert [read("\n\nSo", goes_on=goes_on)[0] for goes_on in (False, True)] == ["So", "\n\nSo"]


def test_answers_of_glm():
    """GLM-4.5 opens its reasoning, GLM-4.7's template does, and a model may call without closing it."""
    for format, line in ((GLM_LINES, "\n"), (GLM, "")):
        call = render("add", {"a": 1}, format=format)
        for text, in_reasoning, want in (
            (f"{line}<think>Hm.</think>{line}Yes.{line}{call}", None, ("Hm.", "Yes.", ADD_1, "tool_calls")),
            (f"Hm.\n\nSo</think>{line}Yes.", True, ("Hm.\n\nSo", "Yes.", "", "stop")),
            (f"{line}Yes.{line}{call}{line}{call}", False, ("", "Yes.", ADD_1 * 2, "tool_calls")),
            (f"Hm.{line}{call}", True, (f"Hm.{line}{call}", "", ADD_1, "tool_calls")),
        ):
            for size in (1, 5, len(text)):
                pieces = [text[i : i + size] for i in range(0, len(text), size)]
                assert told(pieces, in_reasoning, format=format)[0] == want, (text, size)


# Answers that drift

ADDED = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
CALLED = f"<tool_call>\n{ADDED}\n</tool_call>"
ADD_1 = 'add{"a": 1}'
LISTED = "{mark}```xml\n{indent}<function=add>\n{indent}</think>\n{indent}```\n"
LISTS = [LISTED.format(mark=m, indent=" " * len(m)) for m in ("- ", "* ", "1. ", "1) ")]
LISTS += [text.replace("```", "~~~") for text in LISTS] + [LISTED.format(mark="- [ ] ", indent="  ")]
UNCLOSED = ["So:\n```c\nint x;", "A\n```\n</think>\n\nB", "So:\n````\na"]

DRIFTS = {
    "fences of list items, in thoughts and in the text": [
        *((f"{x}So.\n</think>\n\nA\n{x}\n{CALLED}", (f"{x}So.", f"A\n{x.rstrip()}", ADD_1, "tool_calls")) for x in LISTS),
        *((f"Hm.\n</think>\n\n{x}\n{x}Done.", ("Hm.", f"{x}\n{x}Done.", "", "stop")) for x in LISTS),
    ],
    "thoughts that end twice": [
        *((f"Hm.\n</think>\n\n{x}\n\n{y}", (f"Hm.{thought}", content, calls, reason)) for x, thought in (
            ("So.\n</think>", "\n\n\nSo."), ("<think>\nSo.\n</think>", "\n\n\nSo."), ("</think>", ""),
            ("<think>\n</think>", ""), ("So.\n<think>\n`</think>`\n</think>", "\n\n\nSo.\n`</think>`"),
            ("So.\n</think>\nNo.\n</think>", "\n\n\nSo.\nNo."),
        ) for y, content, calls, reason in (
            (CALLED, "", ADD_1, "tool_calls"), (f"Well.\n\n{CALLED}", "Well.", ADD_1, "tool_calls"),
            *((said, said, "", "stop") for said in ("Yes.", "```\n</think>\n```\n`<think>`", "A </think> too.")),
        )),
        (f"Hm.\n</think>\n\n{CALLED}\n</think>\n\nDone.", ("Hm.", "Done.", ADD_1, "tool_calls")),
        ("Hm.\n</think>\n\nSo.\n<think>\nWell", ("Hm.\n\n\nSo.\nWell", "", "", "stop")),
    ],
    "a tag in a code block that nothing closes": [
        *((f"{thought}\n</think>\n\n{answer}", (thought, *want)) for thought in UNCLOSED for answer, *want in (
            ("Yes.", "Yes.", "", "stop"), ("```c\nint y;\n```", "```c\nint y;\n```", "", "stop"),
            (CALLED, "", ADD_1, "tool_calls"), (f"Yes.\n\n{CALLED}", "Yes.", ADD_1, "tool_calls"),
        )),
        *((text, (text, "", "", "stop")) for text in ("So:\n```c\nint x = </think>;", "So:\n```\n</think>", "```\n</think> x")),
    ],
}  # fmt: skip


@pytest.mark.parametrize("drift", DRIFTS)
def test_an_answer_that_drifts(drift):
    """In pieces of any size."""
    for text, want in DRIFTS[drift]:
        for size in (len(text), 1, 2, 5, 9):
            assert read(text, size) == want, (text, size)


@pytest.mark.parametrize("thought", UNCLOSED)
def test_a_stream_has_sent_as_reasoning_what_was_the_answer(thought):
    text = f"{thought}\n</think>\n\nYes."
    assert read(text, streams=True) == (text, "Yes.", "", "stop")
    assert read(text) == (thought, "Yes.", "", "stop")


# The tokens of the text


ADD = render("add", {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("pieces", "options", "want"),
    [
        (["A", " b", " c"], {}, ["A", " b", " c"]),
        # The reasoning, its tag and the line breaks of the template are none of the text's; a "t" is in the tag as well.
        (["Hm", "t", "\n", "</think>", "\n\n", "t", "h", "in"], {"in_reasoning": True}, ["t", "h", "in"]),
        (["Hm", "</", "think", ">\n", "\n>", "k"], {"in_reasoning": True}, ["\n>", "k"]),
        (["Hm", "</think>", "</", "b>"], {"in_reasoning": True}, ["</", "b>"]),
        (["<think>", "Hm", "</think>", "Hm"], {}, ["Hm"]),
        # A stop word, and what only began like one.
        (["e", "e", "e", "e", "!", "x"], {"stop": ["ee!"]}, ["e", "e"]),
        (["a", "bc", "b", "d", "e"], {"stop": ["bcd"]}, ["a", "bc", "b", "d", "e"]),
        (["a", "xb", "c"], {"stop": ["bc"]}, ["a", "xb"]),
        # Characters of several tokens.
        (["a", "", "", "é", "b"], {}, ["a", "", "", "é", "b"]),
        (["a", "", "\ufffd"], {"reason": "length"}, ["a", "", "\ufffd"]),
        # Calls. Line breaks before one are the text's if text follows.
        (["I", " add", ".", "\n\n", *ADD, "\n", "Done"], {}, ["I", " add", ".", "\n\n", "Done"]),
        (["\n", *ADD, "\n", "function"], {}, ["function"]),
        (["<tool_", "call>\n", "no", "</tool_call>"], {}, ["<tool_", "call>\n", "no", "</tool_call>"]),
    ],
    ids=lambda x: "".join(x)[:30] if isinstance(x, list) else "",
)
def test_a_text_is_made_of_its_tokens(pieces, options, want):
    assert told(pieces, **options)[1] == want


# How long a model thinks: quoted tags do not end it, a budget does, and drafts change nothing of either


THOUGHTS = [
    ("Hm.\n", "\n\nYes."),
    ("The tag `</think>` ends it.\n", "Yes, `</think>`."),
    ("A tick `", "\n\nYes."),
    ("Like\n```html\n<think>\n</think>\n\nx\n```\nso.", "\n\nYes."),
    ("~~~\n```\n</think>\n~~~\n", "Yes."),
    ("```\na\n```", "\nYes.\n```\nb\n```\n"),
    *((f"So:\n{mark}\n  </think>\n  {mark[-3:]}\n", "Yes.") for mark in ("- ```", "* ~~~", "- [ ] ```")),
]


@pytest.mark.parametrize(("thought", "answer"), THOUGHTS)
def test_a_quoted_tag_does_not_end_reasoning_and_a_grammar_begins_where_it_ends(thought, answer):
    text, end = f"{thought}</think>{answer}", len(thought) + len("</think>")
    for size in (1, 2, 3, 7, 1000):
        assert read(text, size) == (thought.rstrip("\n"), answer.lstrip("\n"), "", "stop"), size
    found = [end_of_reasoning(text[:n], "</think>") for n in range(len(text) + 1)]
    n = end + thought.endswith("`")  # then the next character tells
    assert found == [None] * n + [end] * (len(text) + 1 - n)


def test_a_prefill_may_end_the_reasoning():
    for begun, prefill in (("<think>\n", "Hm.\n</think>\n\nYes"), ("", "<think>\nHm.\n</think>\n\nYes")):
        assert ends_in_reasoning(f"<|im_start|>assistant\n{begun}{prefill}", ("<think>", "</think>"), prefill) is False


# What a request asks for


OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
LOW, MEDIUM, MAX = ({"enable_thinking": True, "reasoning_effort": effort} for effort in ("low", "medium", "max"))
CHATS = [CHAT, MESSAGES, RESPONSES]


def asked(path, **fields):
    return requests.read(path, **requests.body_with(path, **fields))


@pytest.mark.parametrize(
    ("fields", "variables", "budget"),
    [
        *((off, OFF, None) for off in (
            {"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}}, {"reasoning": {"enabled": False}},
            {"reasoning": False}, {"reasoning": "none"}, {"thinking": {"type": "disabled"}}, {"thinking": False},
            {"think": False}, {"think": "none"}, {"output_config": {"effort": "none"}}, {"enable_thinking": False},
            {"reasoning": {"effort": "minimal", "exclude": False}}, {"reasoning_effort": "minimal"},
        )),
        *((off, OFF, 0) for off in (
            {"reasoning": {"max_tokens": 0}}, {"reasoning_budget": 0}, {"thinking_token_budget": 0}, {"thinking_budget": 0},
        )),
        *((on, ON, None) for on in (
            {"thinking": {"type": "adaptive"}}, {"thinking": True}, {"think": True}, {"reasoning": {"enabled": True}},
        )),
        *((seven, ON, 7) for seven in (
            {"reasoning": {"max_tokens": 7}}, {"reasoning_budget": 7}, {"thinking": {"type": "enabled", "budget_tokens": 7}},
            {"thinking_token_budget": 7}, {"enable_thinking": True, "reasoning_budget": 7}, {"thinking_budget": 7},
        )),
        *((low, LOW, 1024) for low in (
            {"think": "low"}, {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"},
            {"output_config": {"effort": "low"}},
        )),
        *((nothing, {}, None) for nothing in ({}, {"reasoning_budget": -1}, {"include_reasoning": True})),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}}, MEDIUM, 8192),
        ({"reasoning_effort": "max"}, MAX, None),
        ({"thinking": {"type": "disabled"}, "reasoning": {"effort": "low"}}, OFF, 1024),
    ],
    ids=str,
)  # fmt: skip
def test_a_switch_means_the_same_in_each_api(fields, variables, budget):
    """Whoever named it, also among the variables of the template."""
    templates = (f"{{{{ {name} }}}}" for name in ("enable_thinking", "reasoning_effort"))
    tokenizer, knows_efforts = (SimpleNamespace(chat_template=text, has_thinking=True) for text in templates)
    plain = {name: x for name, x in fields.items() if not isinstance(x, dict)}
    others = {name: x for name, x in fields.items() if isinstance(x, dict)}
    for path in CHATS:
        request = asked(path, **fields)
        assert (request.args.chat_template_kwargs, request.reasoning_limit(tokenizer)) == (variables, budget), path
        # A template that knows of efforts needs no budget for them.
        assert request.reasoning_limit(knows_efforts) == (None if budget in (1024, 8192) else budget), path
        if not {"include_reasoning", "output_config"} & {*fields}:
            request = asked(path, chat_template_kwargs=plain, **others)
            given = {name: request.args.chat_template_kwargs[name] for name in variables}
            assert (given, request.reasoning_limit(tokenizer)) == (variables, budget), path
    both = asked(CHAT, reasoning_effort="max", chat_template_kwargs=OFF)
    assert both.args.chat_template_kwargs == MAX | OFF


def test_a_switch_that_is_not_honoured_is_refused_by_its_name():
    refused = [
        *(("reasoning", x) for x in ({"exclude": True}, {"effort": "deep"}, 5, {"max_tokens": -2})),
        ("thinking", {"type": "deep"}), ("thinking", "loud"), *(("think", x) for x in (1, [True], "loud")),
        ("reasoning_budget", -2), ("reasoning_budget", True), ("thinking_token_budget", "a"), ("reasoning_effort", "deep"),
        ("include_reasoning", False),
    ]  # fmt: skip
    for path, (name, value) in product(CHATS, refused):
        for fields in ({name: value}, {"chat_template_kwargs": {name: value}})[: 1 + (value == "loud")]:
            with pytest.raises(ApiError) as e:
                asked(path, **fields)
            assert (e.value.status, e.value.param) == (400, name), (path, fields)
            assert e.value.message.startswith(name), (path, fields)


# The budget


@pytest.fixture(scope="module")
def loaded():
    return load(model_with(), mtp=True)


def forced(tokenizer, thought: str, in_reasoning: bool = True) -> str:
    """What the processor forces behind a thought that takes all of its budget."""
    prompt, text = [5, 6], tokenizer.encode(thought, add_special_tokens=False)
    process = make_budget(tokenizer, len(prompt), in_reasoning, len(text))
    logits, tokens = mx.zeros((1, len(tokenizer))), [*prompt, *text]
    assert process(mx.array(tokens[:-1]), logits) is logits
    while (row := process(mx.array(tokens), logits)) is not logits:
        assert (row > -mx.inf).sum().item() == 1
        tokens.append(mx.argmax(row).item())
    return tokenizer.decode(tokens)[len(tokenizer.decode([*prompt, *text])) :]


@pytest.mark.parametrize(("format", "line"), [(GLM_LINES, "\n"), (GLM, "")], ids=["4.5", "4.7"])
def test_what_ends_reasoning_of_glm(format, line):
    _, tokenizer = load(model_with(*GLM_MARKS, template=TEMPLATES[format]), mtp=True)
    for thought, end in (
        ("Hm.", f"</think>{line}"), ("Hm.\n", f"</think>{line}"), ("So:\n```c\nint x", f"\n```\n</think>{line}"),
        ("A tick `", f"\n</think>{line}"), ("The `</think>", "\n"),
    ):  # fmt: skip
        assert forced(tokenizer, thought) == end, thought
        assert read(f"{thought}{end}Yes.", format=format)[1] == "Yes.", thought


def test_what_ends_reasoning(loaded):
    _, tokenizer = loaded
    for thought, end in (
        ("Hm", "\n</think>\n\n"),
        ("Hm.\n", "</think>\n\n"),
        ("So:\n```c\nint x", "\n```\n</think>\n\n"),
        ("So:\n~~~~\n</think>\n", "~~~~\n</think>\n\n"),
        ("The `</think>` tag", "\n</think>\n\n"),
        ("The `</think>", "\n\n"),
        ("Hm.\n</think>\n\nYes", ""),
    ):
        assert forced(tokenizer, thought) == end, thought
        assert not end or read(f"{thought}{end}Yes.")[1] == "Yes.", thought
    # A model that does not think is let alone.
    assert forced(tokenizer, "Yes, and", in_reasoning=False) == ""
    assert forced(tokenizer, "<think>\nHm", in_reasoning=False) == "\n</think>\n\n"


@pytest.mark.parametrize("budget", [0, 6])
def test_drafts_change_nothing(loaded, budget):
    model, tokenizer = loaded
    prompt = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, enable_thinking=True)
    options = {"max_tokens": budget + 8, "logits_processors": [make_budget(tokenizer, len(prompt), True, budget)]}
    want = plain(prompt, model, **options)
    assert tokenizer.think_end_id in want[budget : budget + 2]
    for depth in (0, 3, "auto"):
        steps = mtp_generate_step(mx.array(prompt), model, num_draft_tokens=depth, **options)
        assert [token for token, _, _ in steps] == want


# Which lines of a Markdown text are code


def code_of(text: str) -> list[str]:
    """The lines in code blocks, without the fences."""
    lines, found = Lines(), []
    for line in text.split("\n"):
        after = lines.add(line)
        found += [line] if lines.marks and after.marks and not after.is_first else []
        lines = after
    return found


# What begins a line, and what continues it.
CONTAINERS = [
    ("", ""), ("- ", "  "), ("* ", "  "), ("+   ", "    "), ("1. ", "   "), ("10) ", "    "), ("- [ ] ", "  "),
    ("- [x] ", "  "), ("1. [X] ", "   "), ("> ", "> "), ("- - ", "    "), ("> 1) ", ">    "), ("- > ", "  > "),
    ("  - ", "    "), ("-\t", "    "),
]  # fmt: skip


@pytest.mark.parametrize("end", ["text", "\ntext", "- item", "> quote", "```"])
def test_a_code_block_ends_where_its_container_ends(end):
    for first, next_ in CONTAINERS[1:]:
        if end != "> quote" or first[0] != ">":
            text = f"{first}```\n{next_}a\n{end}"
            is_new = end == "```" and ">" in first  # outside of its block quote, it begins another
            code = code_of(f"{text}\nso")
            assert (code[0], "so" in code) == (f"{next_}a", is_new), text


def test_no_code_is_open():
    for text in (
        "    ```", "a ```", "- a ```", "```a```", "-```", "1986 ```", "- ```\n  a\n  ```", "```\n```", "- ```\n```",
        # Lines without their indentation, and a fence that has it.
        "- ```\na\n\nb\n```", "1. ```\na\n   ```", "1. Do:\n   ```\n   cat <<X\na\nX\n   ```",
        "- a\n  1. ```\n     a\n     ```\n- b", "- a\n\n    ```\n    a\n    ```", "- - - -\n***", "-\n  ```\n  a\n  ```",
    ):  # fmt: skip
        assert "so" not in code_of(f"{text}\nso"), text


CODE = ["a", "", "  b", "# c", "``", "~~~", "``` c", "    ```", "    ~~~~"]  # what closes neither "```" nor "~~~~"
blocks = st.recursive(
    st.lists(st.sampled_from(["a", "*b* `c`", ""]), min_size=1, max_size=2).map(lambda lines: [(x, False) for x in lines])
    | st.tuples(st.sampled_from(["```", "~~~~", "```py", "~~~~ a `b`"]), st.lists(st.sampled_from(CODE), max_size=3)),
    lambda inner: st.tuples(st.sampled_from(CONTAINERS[1:]), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)  # fmt: skip


def written(block) -> list[tuple[str, bool]]:
    """The lines of a block, and whether each is code."""
    if isinstance(block, list):
        return block
    opening, inner = block
    if isinstance(opening, str):
        marks = opening[: len(opening) - len(opening.lstrip("`~"))]
        return [(opening, False), *((line, True) for line in inner), (f"{marks}{marks[0]} ", False)]
    lines = [line for part in inner for line in written(part)]
    return [((opening[1] if i else opening[0]) + line, is_code) for i, (line, is_code) in enumerate(lines)]


@examples(100)
@given(st.lists(blocks, min_size=1, max_size=4))
def test_blocks_in_containers(blocks):
    lines = [line for block in blocks for line in [*written(block), ("", False), ("end", False)]]
    assert code_of("\n".join(line for line, _ in lines)) == [line for line, is_code in lines if is_code]
