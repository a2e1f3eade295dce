"""Tool calls, reasoning and stop words as a client of the server gets them, from a model whose answer is written down."""

import json
import random

import pytest

from tests.support.profiles import LONG
from tests.support.scripted_server import serve_scripted
from tests.support.tool_texts import SCHEMAS, make_model, render

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
ADD = render("add", {"a": 1, "b": 2})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model") / "model"))


@pytest.fixture(scope="module")
def server(tmp_path_factory, model):
    with serve_scripted(tmp_path_factory.mktemp("server") / "log", "--model", model) as s:
        yield s
        assert "Traceback" not in s.log.read_text()


def body_of(text: str, thinking: bool = False, **options) -> dict:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 900, **options}
    return {"chat_template_kwargs": {"say": text, "enable_thinking": thinking}, **body}


def say(server, text: str, thinking: bool = False, **options) -> dict:
    """The choice of an answer, which must be the same in a stream."""
    body = body_of(text, thinking, tools=TOOLS, **options)
    status, answer = server.request(CHAT, body)
    assert status == 200, answer
    choice = answer["choices"][0]
    ids = [call.pop("id") for call in choice["message"].get("tool_calls", [])]
    assert len({*ids}) == len(ids)
    assert joined(server.stream(CHAT, body)) == choice
    return choice


def joined(chunks) -> dict:
    """What a client makes of the chunks."""
    message = {"role": "assistant", "content": ""}
    for (choice,) in (chunk["choices"] for chunk in chunks):
        delta = choice["delta"]
        for key in {"content", "reasoning", "reasoning_content"} & delta.keys():
            message[key] = message.get(key, "") + delta[key]
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert (call["index"], call["function"]["arguments"]) == (len(calls), "")
                calls.append({key: call[key] for key in ("type", "function")})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message["content"] = message["content"] or None
    return {"index": 0, "finish_reason": choice["finish_reason"], "message": message}


def calls_in(choice: dict) -> list[tuple[str, dict]]:
    functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [(f["name"], json.loads(f["arguments"])) for f in functions]


def test_calls_arrive_with_their_values(server):
    text = "\n\n" + ADD + "\n" + render("set", {"value": None, "options": {"x": True}}, json_scalars=True)
    choice = say(server, text)
    assert calls_in(choice) == [("add", {"a": 1, "b": 2}), ("set", {"value": None, "options": {"x": True}})]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None


def test_line_breaks_of_the_template_are_not_content(server):
    choice = say(server, f"\nHm.\n</think>\n\nI add.\n\nThen?\n\n{ADD}\n{ADD}\nDone.\n", thinking=True)
    assert choice["message"]["reasoning"] == "Hm."
    assert choice["message"]["content"] == "I add.\n\nThen?\n\nDone.\n"
    assert calls_in(choice) == [("add", {"a": 1, "b": 2})] * 2
    choice = say(server, "<think>\nHm.\n</think>\n\nYes.")  # begun by the model itself
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm.", "Yes.")
    assert say(server, "\n\n  Yes. </think> <think>\n")["message"]["content"] == "\n\n  Yes. </think> <think>\n"


def test_arguments_come_token_by_token(server):
    body = body_of(render("write", {"content": "import os\n" * 20}), tools=TOOLS)
    deltas = [chunk["choices"][0]["delta"] for chunk in server.stream(CHAT, body)]
    pieces = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas if "tool_calls" in delta]
    assert len(pieces) > 20
    assert max(map(len, pieces)) < 20


def test_call_in_reasoning_that_is_not_closed(server):
    choice = say(server, f"I shall add.\n\n{ADD}", thinking=True)
    assert calls_in(choice) == [("add", {"a": 1, "b": 2})]
    assert choice["message"]["reasoning"] == f"I shall add.\n\n{ADD}"
    choice = say(server, f"I could add:\n{ADD}\nbut no.\n</think>\n\nNo.", thinking=True)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "No.")


def test_history_is_taken_as_clients_send_it(server):
    """The prompt's tokens are those of the same text."""

    def n_tokens(**answer):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", **answer}, {"role": "tool", "content": "b"}]
        status, content = server.request(CHAT, {"messages": messages, "max_tokens": 1})
        assert status == 200, content
        return content["usage"]["prompt_tokens"]

    def parameter(name, value):
        return f"<parameter={name}>\n{value}\n</parameter>\n"

    for arguments, rendered in (
        *((nothing, "") for nothing in ("", "  ", "null", None, "{}")),
        *((whole, parameter("a", 1)) for whole in ({"a": 1}, '{"a": 1}')),
        *((no, parameter("arguments", no)) for no in ('{"a": 1', "[1]", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 1200)),
    ):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        text = f"<tool_call>\n<function=f>\n{rendered}</function>\n</tool_call>"
        assert n_tokens(content=None, tool_calls=[call]) == n_tokens(content=text, tool_calls=None), arguments


PARTS = [
    "<tool_call>", "</tool_call>", "<function=add>", "<function=", "</function>", "<parameter=a>", "<parameter=value>",
    "</parameter>", "\n", "\n\n", " ", "```", "<think>", "</think>",
    '{"name": "set", "arguments": {"value": "', '"}}', "{1,2}", "1e400", "null", "True",
    "<tool_call>\n<function=set>\n<parameter=options>\n", "\n</parameter>\n</function>\n</tool_call>",
    render("add", {"a": 1}), render("set", {"value": "x", "options": {"y": [1]}}), render("write", {"content": "one\ntwo\n"}),
]  # fmt: skip


def test_whatever_a_model_says_arrives(server):
    """Every word, in a stream as without, and calls that are calls."""
    rng = random.Random(0)
    for _ in range(500 if LONG else 6):
        parts = [rng.choice([f"w{i}w", rng.choice(PARTS), rng.choice(PARTS)]) for i in range(rng.randint(1, 12))]
        text, limit = "".join(parts)[:1000], rng.choice([1000, 1000, rng.randint(1, 60)])
        choice = say(server, text, thinking=rng.random() < 0.5, max_tokens=limit)
        message, reason, calls = choice["message"], choice["finish_reason"], choice["message"].get("tool_calls", [])
        words = [part for part in parts if part[0] == "w" and part in text]
        assert limit < 1000 or [word for word in words if word not in str(message)] == [], text
        assert reason in (("tool_calls", "length") if calls else ("stop", "length")), text
        for call in calls[:-1]:  # the last one may be cut
            assert isinstance(json.loads(call["function"]["arguments"]), dict), text
