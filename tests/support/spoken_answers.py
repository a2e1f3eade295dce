"""Whatever a model says, the client gets all of it, and calls that are calls.

A model with Qwen's chat template says random pieces of tool calls, reasoning and prose. Each answer must have status 200, be
the same in a stream, hold every word that the model has said, and have a finish reason that fits; the arguments of a call that
is complete must be the JSON of an object.
"""

import json
import random
from typing import Any

from .server_process import Server
from .tool_texts import SCHEMAS, render

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
PARTS = [
    "<tool_call>", "</tool_call>", "<function=add>", "<function=", "</function>", "<parameter=a>", "<parameter=value>",
    "</parameter>", "\n", "\n\n", " ", "```", "<think>", "</think>",
    '{"name": "set", "arguments": {"value": "', '"}}', "{1,2}", "1e400", "null", "True",
    "<tool_call>\n<function=set>\n<parameter=options>\n", "\n</parameter>\n</function>\n</tool_call>",
    render("add", {"a": 1}), render("set", {"value": "x", "options": {"y": [1]}}), render("write", {"content": "one\ntwo\n"}),
]  # fmt: skip


def ask(server: Server, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(the message, the finish reason) of an answer."""
    status, content = server.request(CHAT, body)
    if status != 200:
        raise ValueError(f"status {status}: {content}")
    if not body.get("stream"):
        return content["choices"][0]["message"], content["choices"][0]["finish_reason"]
    chunks = [line.removeprefix("data: ") for line in content.splitlines() if line.startswith("data: ")]
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks[:-1]]
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for delta in (choice["delta"] for choice in choices):
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, choices[-1]["finish_reason"]


def said(message: dict[str, Any]) -> list[Any]:
    """The reasoning, the content, and each call's name and arguments."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [message.get("reasoning") or "", message["content"] or "", *((f["name"], f["arguments"]) for f in functions)]


def failure(server: Server, rng: random.Random) -> str | None:
    """Say something -> what is wrong with the answer, if anything."""
    parts = [rng.choice([f"w{i}w", rng.choice(PARTS), rng.choice(PARTS)]) for i in range(rng.randint(1, 12))]
    text = "".join(parts)[:1000]
    kwargs = {"say": text, "enable_thinking": rng.random() < 0.5}
    limit = rng.choice([1000, 1000, rng.randint(1, 60)])
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": TOOLS,
        "chat_template_kwargs": kwargs,
        "max_tokens": limit,
    }
    try:
        message, reason = ask(server, body)
        if (said(message), reason) != (said((streamed := ask(server, {**body, "stream": True}))[0]), streamed[1]):
            return f"{text!r}: {message}, {reason}, and streamed {streamed}"
    except (ValueError, OSError) as e:
        return f"{text!r}: {e}"
    is_lost = [part for part in parts if part[0] == "w" and part in text and part not in str(said(message))]
    if limit == 1000 and is_lost:
        return f"{text!r}: {message} lacks {is_lost}"
    calls = message.get("tool_calls", [])
    if reason not in (("tool_calls", "length") if calls else ("stop", "length")):
        return f"{text!r}: {reason} with {len(calls)} calls"
    for call in calls[:-1]:  # the last one may be cut
        if not isinstance(json.loads(call["function"]["arguments"]), dict):
            return f"{text!r}: {call}"
    return None


def attack(server: Server, count: int) -> list[str]:
    """Let the model speak -> what went wrong."""
    rng = random.Random(0)
    return [wrong for wrong in (failure(server, rng) for _ in range(count)) if wrong is not None]
