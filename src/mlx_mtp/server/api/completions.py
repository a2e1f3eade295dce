"""OpenAI's API for texts, ``/v1/completions``. A request may have several prompts, as texts or as tokens."""

from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from pydantic import Field, StringConstraints

from ...text.schema import Json
from ...text.tool_calls import Text
from ..engine.delta import Delta
from ..request import Request
from . import refused
from .body import read
from .openai import Choice, OpenAIBody, OpenAIWriter, TextLogprobs, TopLogprobs, error_content

__all__ = ["CompletionBody", "CompletionWriter", "error_content", "read_request"]

MAX_PROMPTS = 128
Prompt = Annotated[str, StringConstraints(min_length=1)]
Tokens = Annotated[list[Annotated[int, Ge(0), Le(2**31)]], Field(min_length=1)]
Prompts = Annotated[list[Prompt] | list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionBody(OpenAIBody):
    REFUSED: ClassVar = refused.COMPLETIONS
    prompt: Prompt | Tokens | Prompts
    logprobs: TopLogprobs | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: Any = [self.prompt] if is_one else self.prompt
        return list(prompts)

    @property
    def n_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def top(self) -> int | None:
        return self.logprobs


def read_request(content: Json, flags: Any) -> tuple[CompletionBody, Request, Any]:
    """The body, the request and mlx-lm's arguments."""
    body = read(CompletionBody, content)
    first, *others = body.prompts
    request = Request(
        "text", first, [], None, None, param="prompt", structured_output=body.structured_output, goes_on=True
    )
    request.n, request.more_prompts = body.n, others
    return body, request, body.openai_arguments(flags)


class CompletionChoice(Choice):
    def __init__(self, index: int, body: CompletionBody):
        super().__init__(index, body)
        self.text = ""
        self.tokens: list[int] = []  # of the text, by index
        self.told = TextLogprobs()

    def pieces(self, step: Delta) -> list[Json]:
        text, tokens = _text(step)
        return [{"text": text, **self._logprobs(tokens)}] if text else []

    def last(self) -> Json:
        return {"text": "", **self._logprobs([])}

    def collect(self, step: Delta) -> None:
        text, tokens = _text(step)
        self.text += text
        self.tokens += tokens

    def whole(self) -> Json:
        return {"text": self.text, **self._logprobs(self.tokens)}

    def _logprobs(self, tokens: list[int]) -> Json:
        if self.body.top is None:
            return {}
        return {"logprobs": self.told.of([self.steps[i] for i in tokens])}


class CompletionWriter(OpenAIWriter):
    choice_kind = CompletionChoice


def _text(step: Delta) -> tuple[str, list[int]]:
    """The text that a step adds, and the tokens that it begins to show, by index."""
    texts = [e for e in step.events if isinstance(e, Text)]
    return "".join(e.text for e in texts), [i for e in texts for i in e.tokens]
