"""OpenAI's APIs for chats, ``/v1/chat/completions``, and texts, ``/v1/completions``.

A call that ``max_tokens`` cuts has incomplete arguments, and the ``finish_reason`` "length". A request for texts may have
several prompts, as texts or as tokens.
"""

import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from pydantic import Field, StringConstraints

from ...text.answer import Reasoning
from ...text.schema import Json
from ...text.tool_calls import CallArguments, CallBegins, Text
from ..request import ApiError, Delta, Effort, Request
from .body import COMPLETIONS, Part, Short, at_most, read
from .openai import Choice, OpenAIBody, OpenAIWriter, TextLogprobs, TopLogprobs, logprob_of
from .template_messages import Images, arguments_of, make_request, unsupported


class ImageUrl(Part):
    url: str


class ContentPart(Part):
    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None


class Function(Part):
    name: str | None = None
    arguments: Any = None


class ToolCall(Part):
    id: Any = None
    type: Any = "function"
    function: Function


class ChatMessage(Part):
    """The fields of a message that the server uses. The chat template gets all fields."""

    model_config = Part.model_config | {"extra": "allow"}

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None


class Tool(Part):
    function: Json


class ChatBody(OpenAIBody):
    NEEDED: ClassVar = "messages"
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    reasoning_effort: Effort | None = None
    # As in mlx-lm: the prefix of a role, for prompts without a chat template.
    role_mapping: Annotated[dict[str, Short], at_most(32)] | None = None

    @property
    def effort(self) -> Effort | None:
        return self.reasoning_effort

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def read_chat(content: Json, flags: Any) -> tuple[ChatBody, Request]:
    body = read(ChatBody, content)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs: true.", param="top_logprobs")
    # The client's own objects: the template writes their keys in the client's order.
    tools = content["tools"] if body.tools and body.tool_choice != "none" else []
    images = Images()
    request = make_request(
        body,
        [_message(m, f"messages[{i}].content", images) for i, m in enumerate(body.messages)],
        images,
        tools,
        outputs=[body.structured_output],
        tool_choice=body.tool_choice,
        one_call=not body.parallel_tool_calls,
    )
    request.role_mapping = body.role_mapping
    body.set_openai_arguments(request, flags)
    return body, request


def _text(part: ContentPart, where: str, images: Images) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "image_url" and part.image_url is not None:
        return images.add(part.image_url if isinstance(part.image_url, str) else part.image_url.url)
    raise unsupported(part.type, where, "messages", "send text or images")


def _message(message: ChatMessage, where: str, images: Images) -> Json:
    """A message for the chat template: without null fields, and with the arguments of calls as objects."""
    content = {name: value for name, value in message.model_dump().items() if value is not None}
    content.setdefault("content", None)
    if isinstance(message.content, list):
        content["content"] = "".join(_text(part, where, images) for part in message.content)
    if isinstance(reasoning := content.pop("reasoning", None), str):  # a name that answers have
        content.setdefault("reasoning_content", reasoning)
    for call in content.get("tool_calls", []):
        call["function"]["arguments"] = arguments_of(call["function"].get("arguments"))
    return content


class ChatChoice(Choice):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, index: int, body: ChatBody):
        super().__init__(index, body)
        self.reasoning = ""
        self.tool_calls: list[Json] = []

    def pieces(self, step: Delta) -> Iterator[Json]:
        for e in step.events:
            if isinstance(e, Text):
                self.text += e.text
                self.tokens += e.tokens
                yield self._piece({"content": e.text}, e.tokens)
            elif isinstance(e, Reasoning):
                self.reasoning += e.text
                yield self._piece(_reasoning(e.text))
            elif isinstance(e, CallBegins):
                self.tool_calls.append(_begin(e))
                yield self._piece({"tool_calls": [{"index": e.index, **self.tool_calls[-1]}]})
            elif isinstance(e, CallArguments):
                self.tool_calls[e.index]["function"]["arguments"] += e.text
                yield self._piece({"tool_calls": [{"index": e.index, "function": {"arguments": e.text}}]})

    def last(self) -> Json:
        return self._piece({})

    def _piece(self, delta: Json, tokens: Sequence[int] = ()) -> Json:
        """A chunk's choice. The first one has the role."""
        role = {} if self.has_begun else {"role": "assistant"}
        return {"delta": role | delta, **self._logprobs(tokens)}

    def _logprobs(self, tokens: Sequence[int]) -> Json:
        if self.body.top is None:
            return {}
        return {"logprobs": {"content": [logprob_of(self.steps[i]) for i in tokens], "refusal": None}}

    def whole(self) -> Json:
        message: Json = {"role": "assistant", "content": self.text or None}
        if self.reasoning:
            message |= _reasoning(self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return {"message": message, **self._logprobs(self.tokens)}


ChatWriter = partial(OpenAIWriter, ChatChoice)


def _reasoning(text: str) -> Json:
    """Reasoning under both names that clients use: OpenRouter's, which is also mlx-lm's, and DeepSeek's."""
    return {"reasoning": text, "reasoning_content": text}


def _begin(event: CallBegins) -> Json:
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": event.name, "arguments": ""}}


MAX_PROMPTS = 128
Prompt = Annotated[str, StringConstraints(min_length=1)]
Tokens = Annotated[list[Annotated[int, Ge(0), Le(2**31)]], Field(min_length=1)]
Prompts = Annotated[list[Prompt] | list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionBody(OpenAIBody):
    NEEDED: ClassVar = "prompt"
    REFUSED: ClassVar = COMPLETIONS
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


def read_completion(content: Json, flags: Any) -> tuple[CompletionBody, Request]:
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
