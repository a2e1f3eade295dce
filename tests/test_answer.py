"""What an answer's text says, for models whose marks are mlx-lm's to read."""

from types import SimpleNamespace

import pytest
from mlx_lm.generate import make_text_state_machine
from mlx_lm.tool_parsers import mistral, pythonic

from mlx_mtp.server.answer import Reasoning, make_answer
from mlx_mtp.server.tool_calls import CallArguments, CallBegins, Text

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
BEGIN, END = pythonic.tool_call_start, pythonic.tool_call_end


def answer(module, tools=TOOLS, stop_words=()):
    tokenizer = SimpleNamespace(
        tool_parser=module.parse_tool_call,
        tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end,
        has_tool_calling=True,
        has_thinking=True,
        think_start="<think>",
        think_end="</think>",
        structural_markers=(),
        response_transitions={},
    )
    request = SimpleNamespace(request_type="chat", tools=tools, one_call=False)
    return make_answer(tokenizer, make_text_state_machine(tokenizer), "reasoning", request, list(stop_words))


def read(text: str, module=pythonic, reason: str = "stop", **kwargs) -> tuple[str, str, str, str]:
    """(reasoning, content, calls, finish reason), fed character by character."""
    reading = answer(module, **kwargs)
    reasoning = content = calls = ""
    for i, char in enumerate(text, 1):
        events, finish_reason = reading.step(char, reason if i == len(text) else None)
        for event in events:
            reasoning += event.text if isinstance(event, Reasoning) else ""
            content += event.text if isinstance(event, Text) else ""
            calls += event.name if isinstance(event, CallBegins) else ""
            calls += event.text if isinstance(event, CallArguments) else ""
        if finish_reason is not None:
            break
    return reasoning, content, calls, finish_reason


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (f"Hm.\n</think>\n\nWell.\n{BEGIN}[add(a=1)]{END}", ("Hm.", "Well.", 'add{"a": 1}', "tool_calls")),
        (f"</think>{BEGIN}nothing{END} more", ("", f"{BEGIN}nothing{END} more", "", "stop")),
        (f"</think>{BEGIN}nothing{END}{BEGIN}[add(a=2)]{END}", ("", f"{BEGIN}nothing{END}", 'add{"a": 2}', "tool_calls")),
        (f"</think>{BEGIN}[add(a", ("", f"{BEGIN}[add(a", "", "stop")),
    ],
)  # fmt: skip
def test_what_mlx_lm_cannot_parse_is_content(text, want):
    assert read(text) == want


def test_cut_call_of_another_model_is_content():
    assert read(f"</think>{BEGIN}[add(a=1)]", reason="length") == ("", f"{BEGIN}[add(a=1)]", "", "length")


def test_without_tools_no_text_is_a_call():
    text = f"{BEGIN}[add(a=1)]{END}"
    assert read(f"</think>{text}", tools=None) == ("", text, "", "stop")


def test_call_that_nothing_ends():
    text = '[TOOL_CALLS]add[ARGS]{"a": 1}'
    assert read(f"</think>{text}", mistral) == ("", "", 'add{"a": 1}', "tool_calls")
    assert read("</think>[TOOL_CALLS]add[ARGS]{", mistral) == ("", "[TOOL_CALLS]add[ARGS]{", "", "stop")


def test_stop_words_end_the_content():
    text = f"A\nB</think>\nOne{BEGIN}[add(a=1)]{END}two\nthree"
    assert read(text, stop_words=["\n", "add"]) == ("A\nB", "Onetwo", 'add{"a": 1}', "tool_calls")
    assert read("</think>abcabd", stop_words=["abd", "xyz"]) == ("", "abc", "", "stop")
    assert read("</think>abcab", stop_words=["abd"], reason="length") == ("", "abcab", "", "length")
