"""Bodies of requests with all that a conversation of an agent has."""

from typing import Any


def text(content: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": content}


THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": ""}
USE = {"type": "tool_use", "id": "1", "name": "read", "input": {"path": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [text("no file")], "is_error": True}
READ = {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}, "cache_control": {}}
MESSAGES_BODY: dict[str, Any] = dict(
    system=[
        text("x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=00000;"),
        {**text("You are a coder."), "cache_control": {"type": "ephemeral"}},
        text("x-anthropic-billing-header: cch=2f;\nBe kind.\n"),
    ],
    messages=[
        {"role": "user", "content": [text("a"), text("b")]}, {"role": "system", "content": "Be short."},
        {"role": "assistant", "content": [THOUGHT, text("I read."), USE]},
        {"role": "user", "content": [RESULT, text("Well?")]},
    ],
    tools=[READ, {"type": "web_search_20250305", "name": "web_search"}], metadata={"user_id": "1"},
    context_management={"edits": []}, output_config={"effort": "high"}, thinking={"type": "adaptive"},
)  # fmt: skip
RESPONSES_BODY: dict[str, Any] = dict(
    instructions="You are a coder.",
    input=[
        {"type": "message", "role": "developer", "content": [text("Be short.", "input_text")]},
        {"role": "user", "content": "a"},
        {"type": "function_call", "name": "read", "call_id": "1", "arguments": '{"path": "x"}', "namespace": "fs"},
        {"type": "custom_tool_call", "name": "patch", "call_id": "2", "input": "+a"},
        {"type": "function_call_output", "call_id": "1", "output": "text"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [text("done", "input_text")]},
        {"type": "web_search_call", "id": "3", "status": "completed"},
        {"role": "developer", "content": "Go on."},
    ],
    store=True, include=["reasoning.encrypted_content"], prompt_cache_key="k",
    reasoning={"effort": "none", "summary": "auto"},
)  # fmt: skip
