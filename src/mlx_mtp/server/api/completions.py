"""OpenAI's API for texts, ``/v1/completions``. A request may have several prompts, as texts or as tokens."""

from functools import partial
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
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, index: int, body: CompletionBody):
        super().__init__(index, body)
        self.text = ""
        self.tokens: list[int] = []  # of the text, by index
        self.told = TextLogprobs()

    def pieces(self, step: Delta) -> list[Json]:
        texts = [e for e in step.events if isinstance(e, Text)]
        text, tokens = "".join(e.text for e in texts), [i for e in texts for i in e.tokens]
        self.text += text
        self.tokens += tokens
        return [{"text": text, **self._logprobs(self.told, tokens)}] if text else []

    def last(self) -> Json:
        return {"text": "", **self._logprobs(self.told, [])}

    def whole(self) -> Json:
        return {"text": self.text, **self._logprobs(TextLogprobs(), self.tokens)}

    def _logprobs(self, told: TextLogprobs, tokens: list[int]) -> Json:
        return {} if self.body.top is None else {"logprobs": told.of([self.steps[i] for i in tokens])}


CompletionWriter = partial(OpenAIWriter, CompletionChoice)
