"""Conversations of all APIs, as chat templates take them.

Qwen's templates take one system message, at the beginning, and the roles user, assistant and tool. Other messages are folded in
where they stand, so that a longer conversation still begins with a shorter one's prompt.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ...images.prompt import MARK
from ...text.schema import Json
from ..answers.structured_output import from_strict_tools, from_tool_choice, only_one
from ..engine.encode import goes_on
from ..request import ApiError, Request, StructuredOutput, Thinking

SYSTEM = ("system", "developer")


class Images(list[str]):
    """The images of a conversation, by URL, in order."""

    def add(self, url: str) -> str:
        """Add an image -> its mark in the text until that is tokenized."""
        self.append(url)
        return MARK


def fold_roles(messages: list[Json]) -> list[Json]:
    """Messages with roles that templates take.

    The system's and the developer's messages at the beginning become one system message; later ones become the user's, marked.
    """
    n = next((i for i, m in enumerate(messages) if m["role"] not in SYSTEM), len(messages))
    texts = [text for m in messages[:n] if (text := text_of(m.get("content")))]
    first = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*first, *(_folded(m) for m in messages[n:])]


def make_request(
    messages: list[Json],
    images: Images,
    tools: list[Json],
    *,
    thinking: Thinking,
    outputs: Sequence[StructuredOutput | None],
    tool_choice: Any,
    one_call: bool,
    param: str = "messages",
    role_mapping: dict[str, Any] | None = None,
) -> Request:
    """The request of a conversation, for all APIs.

    Args:
        messages (List[Dict[str, Any]]): In order, with any role.
        tools (List[Dict[str, Any]]): In OpenAI's format.
        outputs (Sequence[StructuredOutput]): The structured outputs that the API's fields ask for: one at most.
        tool_choice (Any): See ``from_tool_choice``.
        one_call (bool): Whether the answer ends with its first call.
        param (str): The field with the messages.

    Raises:
        ApiError: These do not go together.
    """
    messages = fold_roles(messages)
    output = only_one(*outputs, from_tool_choice(tool_choice, tools)) or from_strict_tools(tools)
    return Request(
        "chat",
        "",
        messages,
        tools or None,
        role_mapping,
        thinking=thinking,
        structured_output=output,
        images=images,
        goes_on=continues(messages, output),
        one_call=one_call,
        param=param,
    )


def _folded(message: Json) -> Json:
    if message["role"] not in SYSTEM:
        return message
    return {"role": "user", "content": f"<system>\n{text_of(message.get('content'))}\n</system>"}


def continues(messages: list[Json], output: StructuredOutput | None) -> bool:
    """Whether the answer continues the last message.

    Raises:
        ApiError: The answer has a structured output, of which the last message would be a part.
    """
    if goes_on(messages) and output is not None and output.is_required:
        message = f"{output.param} cannot be combined with a last message of the assistant, which the answer continues."
        raise ApiError(400, message, param=output.param)
    return goes_on(messages)


def unsupported(kind: str, where: str, param: str, fix: str) -> ApiError:
    """The error for a part of a conversation, of a kind that is not read here."""
    return ApiError(400, f"{where}: {kind[:50]} is not supported: {fix}.", param=param)


def text_of(content: Any) -> str:
    """The text of a message's content: a text, or parts with texts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def arguments_of(value: Any) -> Json:
    """The arguments of a call in a message, as an object. Others, such as JSON that was cut, are kept as text."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            read = json.loads(value) if value.strip() else None
            json.dumps(read, ensure_ascii=False, allow_nan=False).encode()  # raises if a template could not write it
            value = read
    return value if isinstance(value, dict) else {} if value is None else {"arguments": value}


def function_tool(name: str, description: str | None, parameters: Any, strict: bool | None) -> Json:
    """A tool as templates take it, which is OpenAI's format."""
    function: Json = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function | ({"strict": True} if strict else {})}


def function_call(id: str, name: str, arguments: Json) -> Json:
    """A call in an assistant's message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
