"""OpenAI's API for texts, ``/v1/completions``."""

from typing import Annotated, Any, ClassVar

from pydantic import StringConstraints

from ..job import Delta
from ..request import Request
from ..tool_calls import Text
from .answer import Json
from .body import read
from .openai import OpenAIBody, OpenAIWriter, error_content

__all__ = ["CompletionBody", "CompletionWriter", "error_content", "read_request"]


class CompletionBody(OpenAIBody):
    REFUSED: ClassVar = {
        **OpenAIBody.REFUSED,
        "tool_choice": (["auto", "none"], "send tools to /v1/chat/completions"),
        **dict.fromkeys(
            ("enable_thinking", "thinking_budget", "reasoning_effort"),
            ([], "a text without a chat template has no thinking: leave it out"),
        ),
    }
    prompt: Annotated[str, StringConstraints(min_length=1)]


def read_request(content: Json, flags: Any) -> tuple[CompletionBody, Request, Any]:
    """The body, the request and mlx-lm's arguments."""
    body = read(CompletionBody, content)
    request = Request("text", body.prompt, [], None, None, param="prompt", form=body.form)
    return body, request, body.openai_arguments(flags)


class CompletionWriter(OpenAIWriter):
    def __init__(self, body: CompletionBody):
        super().__init__(body)
        self.text = ""

    def choices(self, step: Delta) -> list[Json]:
        return [{"text": text}] if (text := _text(step)) else []

    def last_choice(self) -> Json:
        return {"text": ""}

    def collect(self, step: Delta) -> None:
        self.text += _text(step)

    def choice(self) -> Json:
        return {"text": self.text}


def _text(step: Delta) -> str:
    return "".join(e.text for e in step.events if isinstance(e, Text))
