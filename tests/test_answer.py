"""What an answer's text says: reasoning, text and calls, up to a stop word; and whose calls are not read here."""

from types import SimpleNamespace

import pytest
from mlx_lm.tool_parsers import pythonic

from mlx_mtp.server.engine.encode import BoundedTokenizer, encode
from mlx_mtp.server.request import ApiError, Request
from mlx_mtp.text.answer import Reasoning, make_answer
from mlx_mtp.text.tool_calls import END, START, CallArguments, CallBegins, Text

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = f'{START}\n{{"name": "add", "arguments": {{"a": 1}}}}\n{END}'


def read(text: str, reason: str = "stop", tools=TOOLS, stop_words=(), n: int = 1) -> tuple[str, str, str, str]:
    """(reasoning, content, calls, finish reason), fed n characters at a time."""
    tokenizer = SimpleNamespace(has_tool_calling=True, has_thinking=True, think_start="<think>", think_end="</think>")
    reading = make_answer(tokenizer, True, tools, list(stop_words), is_chat=True, one_call=False)
    reasoning = content = calls = ""
    for i in range(0, len(text), n):
        events, finish_reason = reading.step(text[i : i + n], reason if i + n >= len(text) else None)
        for event in events:
            reasoning += event.text if isinstance(event, Reasoning) else ""
            content += event.text if isinstance(event, Text) else ""
            calls += event.name if isinstance(event, CallBegins) else ""
            calls += event.text if isinstance(event, CallArguments) else ""
        if finish_reason is not None:
            break
    return reasoning, content, calls, finish_reason


def test_an_answer_is_taken_apart():
    assert read(f"Hm.\n</think>\n\nWell.\n{CALL}") == ("Hm.", "Well.", 'add{"a": 1}', "tool_calls")


def test_without_tools_no_text_is_a_call():
    assert read(f"</think>{CALL}", tools=None) == ("", CALL, "", "stop")


def test_stop_words_end_the_content():
    text = f"A!B</think>\nOne\n{CALL}\ntwo! three"
    assert read(text, stop_words=["!", "add"]) == ("A!B", "One\ntwo", 'add{"a": 1}', "tool_calls")
    assert read("</think>abcabd", stop_words=["abd", "xyz"]) == ("", "abc", "", "stop")
    assert read("</think>abcab", stop_words=["abd"], reason="length") == ("", "abcab", "", "length")
    for n in (1, 1000):  # nothing follows one, though it was written in the same step
        assert read(f"A!B</think>\nOne! two\n{CALL}", stop_words=["!"], n=n) == ("A!B", "One", "", "stop")


def test_tools_are_refused_where_the_model_writes_calls_as_others_do():
    tokenizer = SimpleNamespace(
        has_chat_template=True, has_tool_calling=True, tool_parser=pythonic.parse_tool_call, get_vocab=lambda: {"a": 0}
    )
    request = Request("chat", "", [{"role": "user", "content": "a"}], TOOLS, None)
    request.args = SimpleNamespace(chat_template_kwargs=None)
    with pytest.raises(ApiError, match=r"mlx_lm\.server") as e:
        encode(BoundedTokenizer(tokenizer, None), request, SimpleNamespace(chat_template_args={}), None)
    assert (e.value.status, e.value.param) == (400, "tools")
