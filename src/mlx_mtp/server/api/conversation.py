"""A conversation as a chat template takes it, whatever API it came by.

Qwen's templates take one system message, at the beginning, and the roles user, assistant and tool. Other messages are folded in
where they stand, so that a longer conversation still begins with a shorter one's prompt.
"""

import json
from contextlib import suppress
from typing import Any

from ..images import MARKED_IMAGES
from ..prompt import goes_on
from ..request import ApiError, Form
from .answer import Json

SYSTEM = ("system", "developer")


class Images(list[str]):
    """The images of a conversation, by URL, in order."""

    def add(self, url: str) -> str:
        """Take one -> what stands for it in the text until that is tokenized."""
        self.append(url)
        return MARKED_IMAGES.mark


def fold_roles(messages: list[Json]) -> list[Json]:
    """
    Messages with roles that templates take.

    The system's and the developer's messages at the beginning become one system message; later ones become the user's, marked.
    """
    n = next((i for i, m in enumerate(messages) if m["role"] not in SYSTEM), len(messages))
    texts = [text for m in messages[:n] if (text := text_of(m.get("content")))]
    first = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*first, *(_folded(m) for m in messages[n:])]


def _folded(message: Json) -> Json:
    if message["role"] not in SYSTEM:
        return message
    return {"role": "user", "content": f"<system>\n{text_of(message.get('content'))}\n</system>"}


def continues(messages: list[Json], form: Form | None) -> bool:
    """
    Whether the answer continues the last message.

    Raises:
        ApiError: The answer has a form, which its beginning would be a part of.
    """
    if goes_on(messages) and form is not None and form.is_required:
        message = f"{form.param} does not go with a last message of the assistant, which would be continued."
        raise ApiError(400, message, param=form.param)
    return goes_on(messages)


def text_of(content: Any) -> str:
    """The text of a message's content: a text, or parts with texts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def arguments_of(value: Any) -> Json:
    """The arguments of a call in a message, as an object. What is none, such as JSON that was cut, is kept as text."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            read = json.loads(value) if value.strip() else None
            json.dumps(read, ensure_ascii=False, allow_nan=False).encode()  # what a template can write
            value = read
    return value if isinstance(value, dict) else {} if value is None else {"arguments": value}


def function_tool(name: str, description: str | None, parameters: Any, strict: bool | None) -> Json:
    """A tool as templates take it, which is OpenAI's form."""
    function: Json = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function | ({"strict": True} if strict else {})}


def function_call(id: str, name: str, arguments: Json) -> Json:
    """A call in an assistant's message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
