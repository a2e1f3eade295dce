"""Hostile requests: every one must get an answer that blames the client, and none may change the others.

Half of them are valid bodies of each API with random mutations, half are bytes that resemble HTTP. Each must get an HTTP answer
below 500 (or 501 or 505, for methods and versions that HTTP does not have) or a closed connection, and the error of a body must
have its API's form. Valid requests in between must get the same text as before.
"""

import copy
import json
import random
import re
from typing import Any

from .bodies import MESSAGES_BODY, RESPONSES_BODY
from .requests import CHAT, TEXT
from .server_process import Server

GOOD = {"prompt": "import os\n", "max_tokens": 4}
OPTIONS = dict(
    max_tokens=4, temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, logit_bias={"5": 1.0}, logprobs=True,
    top_logprobs=2, seed=-3, stop=["\n\n"], stream=True, stream_options={"include_usage": True}, num_draft_tokens=2,
    xtc_probability=0.5, xtc_threshold=0.1, model="default_model",
)  # fmt: skip
TEXT_OPTIONS = {**{name: value for name, value in OPTIONS.items() if name != "top_logprobs"}, "logprobs": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def calls(*functions: dict[str, Any], content: str | None = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [*functions]}


MESSAGES = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": [{"type": "text", "text": "Sort a list."}]},
    calls({"function": {"name": "f", "arguments": "{}"}}, content=None),
    calls({"function": {"name": "f", "arguments": '{"a": [1'}}, TOOL),
    {"role": "tool", "content": "1", "tool_calls": None},
    {"role": "user", "content": "Now in C."},
]
SPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": {}}]}
TO_MESSAGES = MESSAGES_BODY | OPTIONS | dict(
    tool_choice={"type": "auto", "disable_parallel_tool_use": True}, thinking={"type": "enabled", "budget_tokens": 2},
    stop_sequences=["x"],
)  # fmt: skip
TO_RESPONSES = RESPONSES_BODY | OPTIONS | dict(
    tools=[{"type": "custom", "name": "g"}, SPACE, {"type": "web_search"}], parallel_tool_calls=False, max_output_tokens=4,
    text={"format": {"type": "text"}}, include=["reasoning.encrypted_content", "message.output_text.logprobs"],
)  # fmt: skip
THINKING = {"enable_thinking": True, "thinking_budget": 2}
SWITCHES = {
    "reasoning": {"effort": "low", "max_tokens": 5}, "thinking": {"type": "enabled"}, "think": False, "reasoning_budget": -1,
}  # fmt: skip

BODIES: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "def f(x):\n", **TEXT_OPTIONS}),
    (TEXT, {"prompt": ["def f(x):\n", "a"], "n": 2, **TEXT_OPTIONS}),
    (TEXT, {"prompt": [[1, 2], [3]], **TEXT_OPTIONS}),
    (CHAT, {"messages": MESSAGES, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}, **OPTIONS}),
    ("/v1/messages", TO_MESSAGES),
    ("/v1/messages/count_tokens", {"messages": MESSAGES_BODY["messages"], "system": "a"}),
    ("/v1/responses", TO_RESPONSES),
    (CHAT, {"messages": MESSAGES, "tools": [TOOL], "reasoning_effort": "low", **THINKING, **OPTIONS}),
    ("/v1/responses/input_tokens", {"input": RESPONSES_BODY["input"], "instructions": "a"}),
    (CHAT, {"messages": [*MESSAGES[:2], {"role": "assistant", "content": "So"}], "n": 2, **SWITCHES, **OPTIONS}),
    (CHAT, {"messages": MESSAGES[:2], "role_mapping": {"user": "U: ", "stop": "\n"}, **OPTIONS}),
]
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**64), 10**400, 0.5, -0.5, 1e-320, 1e308, float("nan"), float("inf"),
    "", "a", "\0", "\ud800", "\u202e", "1", "auto", "default_model", "../../etc/passwd", "a" * 2000,
    "{% for i in range(9999) %}x{% endfor %}", [], [[]], [None], ["a"] * 100, [{}], {}, {"": ""}, {"a": {"b": {"c": []}}},
    {"chat_template": "x"}, {"padding": True, "max_length": 10**9}, {"type": "image_url", "image_url": {"url": "file:///x"}},
]  # fmt: skip
METHODS = [b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"CONNECT", b"get", b"", b"\xff", b"G" * 70_000]
PATHS = [
    b"/", b"/health", b"/metrics", b"/v1/models", b"/v1/models/%00", b"/v1/models/default_model?x", b"*", b"//", b"",
    b"/v1/completions", b"/v1/chat/completions", b"/v1/completions?a=b", b"http://[", b"/" + b"a" * 70_000, b"/\xff",
]  # fmt: skip
VERSIONS = [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2", b"HTTP/9.9", b"HTTP/", b"http/1.1", b"x", b""]
HEADERS = [
    *(b"Content-Length:" + n for n in (b" 2", b" 3", b" -1", b" 0x2", b"", b" " + b"9" * 5000)), b"Transfer-Encoding: chunked",
    b"Expect: 100-continue", b"Origin: *", b"Authorization: bearer \xff", b"Connection: keep-alive", b"Upgrade: websocket",
    b"no colon", b": no name", b"A: \0", b"A: b\r\n c", b"A: " + b"a" * 70_000,
]  # fmt: skip
UNSUPPORTED = (501, 505)  # a method or a version that HTTP does not have
CONTENTS = [b"", b"{}", b"[]", b"{} ", b'{"prompt": 5}', json.dumps(GOOD).encode(), b"[" * 100_000, b"\xff" * 100]


def mutate(rng: random.Random, body: Any) -> Any:
    """Replace, remove, rename or repeat a value at a random place."""
    places = [(None, None), *_places(body)]
    holder, key = rng.choice(places)
    if holder is None:
        return rng.choice(VALUES) if rng.random() < 0.1 else body
    kind = rng.randrange(5)
    if kind == 0 and isinstance(holder, dict):
        holder[rng.choice(["", "\ud800", "model", "x" * 1000])] = holder.pop(key)
    elif kind == 1:
        del holder[key]
    elif kind == 2 and isinstance(holder, list):
        holder *= rng.choice([0, 2, 30])
    else:
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    return body


def _places(value: Any) -> list[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in ((value, key), *_places(item))]


def hostile_json(rng: random.Random) -> bytes:
    path, body = copy.deepcopy(rng.choice(BODIES))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
        body = mutate(rng, body)
    raw = json.dumps(body).encode()
    if rng.random() < 0.1:
        i = rng.randrange(len(raw) + 1)
        raw = raw[:i] + rng.choice([b"", rng.randbytes(3), raw[:i]])
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    return head % (path.encode(), len(raw)) + raw


def hostile_http(rng: random.Random) -> bytes:
    request = b" ".join(rng.choice(part) for part in (METHODS, PATHS, VERSIONS))
    headers = rng.choices(HEADERS, k=rng.choice([0, 1, 2, 3, 200]))
    raw = b"\r\n".join([request, *headers, b"", rng.choice(CONTENTS)])
    if rng.random() < 0.3:
        i = rng.randrange(len(raw) + 1)
        raw = rng.choice([raw[:i], raw[:i] + rng.randbytes(8) + raw[i:]])
    return raw


def failure(server: Server, raw: bytes, is_complete: bool) -> str | None:
    """What is wrong with the answer to these bytes, if anything; those of a body are complete."""
    try:
        answer = server.talk(raw, is_complete)
    except TimeoutError:
        return "no answer"
    except ConnectionError:
        return None
    match = re.match(rb"HTTP/1\.[01] ([0-9]{3}) ", answer)
    if answer and not (match and (int(match[1]) < 500 or int(match[1]) in UNSUPPORTED)):
        return f"answer {answer[:200]!r}"
    is_error = is_complete and match is not None and match[1].startswith(b"4")
    return f"an error of another form: {answer[:200]!r}" if is_error and not _has_form(raw, answer) else None


def _has_form(raw: bytes, answer: bytes) -> bool:
    """Whether the error that answers a body has the form of its API."""
    content = json.loads(answer.partition(b"\r\n\r\n")[2])
    is_theirs = raw.startswith(b"POST /v1/messages")
    fields = {"type", "message"} if is_theirs else {"type", "message", "param", "code"}
    return content["error"].keys() == fields and (not is_theirs or content["type"] == "error")


def attack(server: Server, count: int) -> list[str]:
    """Send hostile requests -> what went wrong."""
    rng = random.Random(0)
    want = server.request(TEXT, GOOD)[1]["choices"][0]["text"]
    failures = []
    for i in range(count):
        is_json = bool(i % 2)
        raw = hostile_json(rng) if is_json else hostile_http(rng)
        if (wrong := failure(server, raw, is_json)) is not None:
            failures.append(f"request {i}: {wrong} to {raw[:500]!r}")
        if i % 50 == 49:
            status, content = server.request(TEXT, GOOD)
            if status != 200 or content["choices"][0]["text"] != want:
                failures.append(f"after request {i}, a valid request gets {status}: {content}")
    return failures
