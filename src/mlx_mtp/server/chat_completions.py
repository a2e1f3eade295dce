"""An answer's events in OpenAI's format for chat completions.

A call that ``max_tokens`` has cut keeps its place: its arguments are what the model wrote, and ``finish_reason`` is "length".
"""

import uuid
from typing import Any

from .answer import Event, Reasoning
from .tool_calls import CallArguments, CallBegins, Text


class Message:
    """What a whole answer says."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []

    def add(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Text):
                self.text += event.text
            elif isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, CallBegins):
                self.tool_calls.append(_begin(event))
            elif isinstance(event, CallArguments):
                self.tool_calls[event.index]["function"]["arguments"] += event.text


def deltas(events: list[Event]) -> list[dict[str, Any]]:
    """What each event adds to a streamed answer, as arguments of mlx-lm's ``generate_response``."""
    found: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Text):
            found.append({"text": event.text})
        elif isinstance(event, Reasoning):
            found.append({"text": "", "reasoning_text": event.text})
        elif isinstance(event, CallBegins):
            found.append({"text": "", "tool_calls": [{"index": event.index, **_begin(event)}]})
        elif isinstance(event, CallArguments):
            call = {"index": event.index, "function": {"arguments": event.text}}
            found.append({"text": "", "tool_calls": [call]})
    return found


def _begin(event: CallBegins) -> dict[str, Any]:
    name = event.id or f"call_{uuid.uuid4().hex}"
    return {"id": name, "type": "function", "function": {"name": event.name, "arguments": ""}}
