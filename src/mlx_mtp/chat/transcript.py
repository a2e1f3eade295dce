"""The messages of a conversation, and the file that keeps them: ``{"messages": [...]}``, as in OpenAI's API."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..files import check_source, write_atomic


@dataclass
class Message:
    """
    Args:
        role (str): "system", "user" or "assistant".
        content (str): The text.
        images (List[str]): The files of the images before it.
    """

    role: str
    content: str
    images: list[str] = field(default_factory=list)


def save(file: Path, messages: Sequence[Message]) -> None:
    """Write or replace a file.

    Raises:
        OSError: It cannot be written.
    """
    rows = [{name: value for name, value in asdict(message).items() if value != []} for message in messages]
    write_atomic(file, json.dumps({"messages": rows}, indent=2, ensure_ascii=False) + "\n")


def load(file: Path) -> list[Message]:
    """Read a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds something else.
    """
    check_source(file, "/load")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        messages = [_checked(row) for row in content["messages"]]
    except (ValueError, LookupError, TypeError) as e:
        raise ValueError(f"{file} is not a conversation that /save wrote.") from e
    return messages


def _checked(row: dict[str, Any]) -> Message:
    """
    Raises:
        TypeError, ValueError: It is not a message.
    """
    message = Message(**row)
    texts = [message.content, *message.images]
    if message.role not in ("system", "user", "assistant") or not all(isinstance(text, str) for text in texts):
        raise ValueError(row)
    return message
