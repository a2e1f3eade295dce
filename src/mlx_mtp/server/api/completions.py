"""OpenAI's API for text completion, ``/v1/completions``. A request may have several prompts, as texts or as tokens."""

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
from .openai import Choice, OpenAIBody, OpenAIWriter, TextLogprobs, TopLogprobs

MAX_PROMPTS = 128
Prompt = Annotated[str, StringConstraints(min_length=1)]
Tokens = Annotated[list[Annotated[int, Ge(0), Le(2**31)]], Field(min_length=1)]
Prompts = Annotated[list[Prompt] | list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionBody(OpenAIBody):
    NEEDED: ClassVar = "prompt"
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


def read_request(content: Json, flags: Any) -> tuple[CompletionBody, Request]:
    body = read(CompletionBody, content)
    first, *others = body.prompts
    output = body.structured_output
    request = Request("text", first, [], more_prompts=others, param="prompt", structured_output=output, goes_on=True)
    body.set_openai_arguments(request, flags)
    return body, request


class CompletionChoice(Choice):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, index: int, body: CompletionBody):
        super().__init__(index, body)
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
