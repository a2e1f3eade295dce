"""Conversion of the conversations of all APIs to the messages of a chat template.

Qwen's templates accept one system message, at the beginning, and the roles user, assistant and tool. Messages with other roles
are converted in place, so that the prompt of a conversation remains a prefix of its continuations.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ...images.prompt import MARK
from ...text.schema import Json
from ..engine.encode import goes_on
from ..request import ApiError, Request, StructuredOutput
from ..structured_output import from_strict_tools, from_tool_choice, only_one
from .body import Body

SYSTEM = ("system", "developer")


class Images(list[str]):
    """The images of a conversation, by URL, in order."""

    def add(self, url: str) -> str:
        """Add an image. Return the mark that stands for it in the text."""
        self.append(url)
        return MARK


def fold_roles(messages: list[Json]) -> list[Json]:
    """Convert messages to the roles of templates.

    System and developer messages at the beginning become one system message; later ones become marked user messages.
    """
    n = next((i for i, m in enumerate(messages) if m["role"] not in SYSTEM), len(messages))
    texts = [text for m in messages[:n] if (text := text_of(m.get("content")))]
    folded = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    for m in messages[n:]:
        text = f"<system>\n{text_of(m.get('content'))}\n</system>"
        folded.append({"role": "user", "content": text} if m["role"] in SYSTEM else m)
    return folded


def make_request(
    body: Body,
    messages: list[Json],
    images: Images,
    tools: list[Json],
    *,
    outputs: Sequence[StructuredOutput | None],
    tool_choice: Any,
    one_call: bool,
) -> Request:
    """The request of a conversation, for all APIs.

    Args:
        messages (List[Dict[str, Any]]): The messages, with any role.
        tools (List[Dict[str, Any]]): In OpenAI's format.
        outputs (Sequence[StructuredOutput]): The structured outputs of the body's fields: one at most.
        tool_choice (Any): See ``from_tool_choice``.
        one_call (bool): Whether the answer ends with its first call.

    Raises:
        ApiError: The fields cannot be combined.
    """
    messages = fold_roles(messages)
    output = only_one(*outputs, from_tool_choice(tool_choice, tools)) or from_strict_tools(tools)
    continues = goes_on(messages)
    if body.continue_final_message and not continues:
        message = "continue_final_message requires a last message of the assistant, with text and without calls."
        raise ApiError(400, message, param="continue_final_message")
    if continues and output is not None and output.is_required:
        message = f"{output.param} cannot be combined with a last message of the assistant, which the answer continues."
        raise ApiError(400, message, param=output.param)
    return Request(
        "chat",
        "",
        messages,
        tools or None,
        thinking=body.thinking_wanted,
        structured_output=output,
        images=images,
        goes_on=continues,
        one_call=one_call,
        param=body.NEEDED,
    )


def unsupported(kind: str, where: str, param: str, fix: str) -> ApiError:
    """The error for an unsupported part of a conversation."""
    return ApiError(400, f"{where}: {kind[:50]} is not supported: {fix}.", param=param)


def text_of(content: Any) -> str:
    """The text of a message's content, which is a text or a list of parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def arguments_of(value: Any) -> Json:
    """The arguments of a call in a message, as an object. Invalid JSON, such as cut arguments, is kept as text."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            read = json.loads(value) if value.strip() else None
            json.dumps(read, ensure_ascii=False, allow_nan=False).encode()  # raises if a template could not write it
            value = read
    return value if isinstance(value, dict) else {} if value is None else {"arguments": value}


def function_tool(name: str, description: str | None, parameters: Any, strict: bool | None) -> Json:
    """A tool in OpenAI's format, which templates expect."""
    function: Json = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function | ({"strict": True} if strict else {})}


def function_call(id: str, name: str, arguments: Json) -> Json:
    """A call in an assistant's message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
