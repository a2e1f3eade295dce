"""What an answer's text says: reasoning, text and calls, up to a stop word; the tokens that it is made of."""

from types import SimpleNamespace

import pytest
from mlx_lm.tool_parsers import pythonic

from mlx_mtp.server.engine.encode import BoundedTokenizer, encode
from mlx_mtp.server.request import ApiError, Request
from mlx_mtp.text.answer import Reasoning, make_answer
from mlx_mtp.text.tool_calls import END, START, CallArguments, CallBegins, Text
from tests.support.tool_texts import SCHEMAS, render

TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
CALL = f'{START}\n{{"name": "add", "arguments": {{"a": 1}}}}\n{END}'


def told(pieces, in_reasoning=False, stop=(), reason="stop", tools=TOOLS) -> tuple[tuple, list[str]]:
    """Pieces of an answer, a token each -> (reasoning, text, calls, finish reason), and the pieces that the text is made of."""
    tokenizer = SimpleNamespace(has_tool_calling=True, has_thinking=True, think_start="<think>", think_end="</think>")
    answer = make_answer(tokenizer, in_reasoning, tools, list(stop), is_chat=True, one_call=False)
    reasoning, text, calls, tokens = "", "", "", []
    pieces = [*pieces, ""] if reason == "stop" else pieces
    for i, piece in enumerate(pieces, 1):
        events, finish_reason = answer.step(piece, reason if i == len(pieces) else None)
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


def read(text, **options):
    return told(text, in_reasoning=True, **options)[0]


def test_an_answer_is_taken_apart_and_a_stop_word_ends_its_content():
    assert read(f"Hm.\n</think>\n\nWell.\n{CALL}") == ("Hm.", "Well.", 'add{"a": 1}', "tool_calls")
    assert read(f"</think>{CALL}", tools=None) == ("", CALL, "", "stop")
    text = f"A!B</think>\nOne\n{CALL}\ntwo! three"
    assert read(text, stop=["!", "add"]) == ("A!B", "One\ntwo", 'add{"a": 1}', "tool_calls")
    assert read("</think>abcabd", stop=["abd", "xyz"]) == ("", "abc", "", "stop")
    assert read("</think>abcab", stop=["abd"], reason="length") == ("", "abcab", "", "length")
    text = f"A!B</think>\nOne! two?\n{CALL}"
    for pieces in (text, [text]):  # nothing follows the first, though it was written in the same step
        assert read(pieces, stop=["?", "!"]) == ("A!B", "One", "", "stop")


# Answers that drift

ADDED = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
CALLED = f"<tool_call>\n{ADDED}\n</tool_call>"
ADD_1 = 'add{"a": 1}'
LISTED = "{mark}```xml\n{indent}<function=add>\n{indent}</think>\n{indent}```\n"
LISTS = [LISTED.format(mark=m, indent=" " * len(m)) for m in ("- ", "* ", "1. ", "1) ")]
LISTS += [text.replace("```", "~~~") for text in LISTS] + [LISTED.format(mark="- [ ] ", indent="  ")]


DRIFTS = {
    "fences of list items, in thoughts and in the text": [
        *((f"{x}So.\n</think>\n\nA\n{x}\n{CALLED}", (f"{x}So.", f"A\n{x.rstrip()}", ADD_1, "tool_calls")) for x in LISTS),
        *((f"Hm.\n</think>\n\n{x}\n{x}Done.", ("Hm.", f"{x}\n{x}Done.", "", "stop")) for x in LISTS),
    ],
    "tags that are missing, malformed or written twice": [  # around a call, and between two
        *((f"</think>\n\nI add.\n\n{x}", ("", "I add.", calls, "tool_calls")) for x, calls in (
            (CALLED.replace("</parameter>\n", ""), ADD_1), (CALLED.replace("</function>\n", ""), ADD_1),
            (f"<tool_call>\n{CALLED}\n</tool_call>", ADD_1), (f"{CALLED}\n</tool_call>\n</tool_call>\n", ADD_1),
            (f"<tool_call>\n{ADDED}\n{CALLED}", ADD_1 * 2), (f"<tool_call>\n{ADDED}\n{ADDED}\n{ADDED}", ADD_1 * 3),
            (CALLED.replace("1\n</parameter>", "1\n</a>") + CALLED, ADD_1 * 2),
            (CALLED.replace("</parameter>", "</parameter>\n</parameter>"), ADD_1), (f"{CALL}\n</tool_call>", ADD_1),
            (f"{CALL[:-13]}\n{CALL}", ADD_1 * 2), (f"{CALL[:-13]}\n{CALLED}", ADD_1 * 2),
        )),
    ],
    "blocks that are no calls": [
        *((f"</think>{x}", ("", x, "", "stop")) for x in (
            CALLED.replace("<parameter=a>", ""), CALL.replace("}}", "}"), CALL.replace("1", "1}"),
            f"So:\n{ADDED}", ADDED.replace("add", "sub"), f"- {ADDED}", f"`{ADDED}`", f"It is {ADDED}", f"Use {CALLED} so.",
        )),
    ],
    "calls without their opening tag, and behind words": [
        *((f"Hm.\n</think>\n\n{x}", ("Hm.", content, ADD_1, "tool_calls")) for x, content in (
            (ADDED, ""), (f"{ADDED}\n</tool_call>", ""), (f"Look.\n\n{ADDED}\n", "Look."), (f"{ADDED}\n\nDone.", "Done."),
            (f"{ADDED}</tool_call>\nDone.", "Done."), (f"Look.{CALLED}\n", "Look."), (f"- Look: {CALL}", "- Look: "),
        )),
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
}  # fmt: skip


@pytest.mark.parametrize("drift", DRIFTS)
def test_an_answer_that_drifts(drift):
    """In pieces of any size."""
    for text, want in DRIFTS[drift]:
        for size in (len(text), 1, 2, 5, 9):
            assert read([text[i : i + size] for i in range(0, len(text), size)]) == want, (text, size)


def test_tools_are_refused_where_the_model_writes_calls_as_others_do():
    tokenizer = SimpleNamespace(
        has_chat_template=True,
        has_tool_calling=True,
        tool_parser=pythonic.parse_tool_call,
        get_vocab=lambda: {"a": 0},
        added_tokens_decoder={},
        chat_template="",
    )
    request = Request("chat", "", [{"role": "user", "content": "a"}], TOOLS, None)
    request.args = SimpleNamespace(chat_template_kwargs=None)
    with pytest.raises(ApiError, match=r"mlx_lm\.server") as e:
        encode(BoundedTokenizer(tokenizer, None), request, SimpleNamespace(chat_template_args={}), None)
    assert (e.value.status, e.value.param) == (400, "tools")


@pytest.mark.parametrize("goes_on", [False, True])
def test_reasoning_that_goes_on_keeps_its_first_line_breaks(goes_on):
    tokenizer = SimpleNamespace(has_thinking=True, think_start="<think>", think_end="</think>", has_tool_calling=False)
    answer = make_answer(tokenizer, True, None, [], is_chat=True, one_call=False, goes_on=goes_on)
    assert answer.step("\n\nSo", None)[0] == [Reasoning("\n\nSo" if goes_on else "So")]


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
