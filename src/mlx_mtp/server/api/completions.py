"""OpenAI's APIs for chats, ``/v1/chat/completions``, and texts, ``/v1/completions``.

A call that ``max_tokens`` cuts has incomplete arguments, and the ``finish_reason`` "length". A request for texts may have
several prompts, as texts or as tokens.
"""

import codecs
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le
from mlx_lm.server import get_system_fingerprint
from pydantic import Field, StringConstraints

from ...text.answer import Reasoning
from ...text.schema import Json
from ...text.tool_calls import CallArguments, CallBegins, Text
from ..request import NO_LIMIT, ApiError, Delta, Effort, Likely, Request, StructuredOutput
from ..structured_output import from_response_format, only_one
from .body import (
    COMPLETIONS,
    OPENAI,
    Body,
    Natural,
    Part,
    Positive,
    Short,
    Stop,
    add_image,
    arguments_of,
    at_most,
    make_request,
    read,
    unsupported,
)
from .writer import Usage, Writer, event

DONE = b"data: [DONE]\n\n"
MAX_CHOICES = 8  # answers to a prompt
MAX_TOP = 20
LEAST = -9999.0  # OpenAI's, in place of minus infinity
TopLogprobs = Annotated[int, Ge(0), Le(MAX_TOP)]
ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

fingerprint = cache(get_system_fingerprint)


class StreamOptions(Part):
    include_usage: bool = False
    include_sources: bool = False


class OpenAIBody(Body):
    """The fields of chat completions and completions."""

    REFUSED: ClassVar = OPENAI
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    n_predict: Literal[-1] | Positive | None = None  # llama.cpp's; -1: no limit
    n: Annotated[int, Ge(1), Le(MAX_CHOICES)] = 1
    stop: Stop | None = None
    response_format: Any = None
    json_schema: Json | None = None  # llama.cpp's
    guided_json: Json | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None

    @property
    def n_choices(self) -> int:
        """The number of answers."""
        return self.n

    @property
    def structured_output(self) -> StructuredOutput | None:
        names = {
            "json_schema": "json_schema",
            "guided_json": "json_schema",
            "guided_regex": "regex",
            "guided_grammar": "lark",
        }
        guided = [
            (name, {kind: getattr(self, name)}) for name, kind in names.items() if getattr(self, name) is not None
        ]
        outputs = [StructuredOutput(name, grammar) for name, grammar in guided]
        return only_one(*outputs, from_response_format(self.response_format, "response_format"))

    def set_openai_arguments(self, request: Request, flags: Any) -> None:
        limits = self.max_completion_tokens, self.max_tokens, NO_LIMIT if self.n_predict == -1 else self.n_predict
        max_tokens = next((limit for limit in limits if limit is not None), None)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        request.n = self.n
        self.set_arguments(request, flags, max_tokens, stop)


class Choice:
    """One of the answers to a request."""

    prefix: str  # of the answer's id
    kind: str
    chunk_kind: str

    def __init__(self, index: int, body: Any):
        self.index, self.body = index, body
        self.text = ""
        self.tokens: list[int] = []  # the tokens of the text, by index
        self.finish_reason: str | None = None
        self.has_begun = False  # whether a chunk with this choice was written
        self.steps: list[Delta] = []  # kept for their log probabilities
        self.sources: list[str] = []  # the sources of the tokens since the last chunk

    def read(self, step: Delta) -> None:
        """Update the state with a step, before its chunks are written."""
        self.finish_reason = step.finish_reason or self.finish_reason
        if self.body.top is not None:
            self.steps.append(step)
        if step.source is not None:
            self.sources.append(step.source)

    def pieces(self, step: Delta) -> Iterable[Json]:
        """The choices of a step's chunks. Also collects the parts of the whole answer."""
        raise NotImplementedError

    def last(self) -> Json:
        """The choice of a chunk without content, such as the last one."""
        raise NotImplementedError

    def whole(self) -> Json:
        """The whole answer."""
        raise NotImplementedError


class OpenAIWriter(Writer):
    def __init__(self, choice_kind: type[Choice], body: OpenAIBody):
        self.body, self.choice_kind = body, choice_kind
        self.id, self.created = f"{choice_kind.prefix}-{uuid.uuid4()}", int(time.time())
        self.choices = [choice_kind(i, body) for i in range(body.n_choices)]

    def add(self, step: Delta, choice: int = 0) -> bytes:
        c = self.choices[choice]
        c.read(step)
        # OpenAI's client expects a chunk of each earlier choice first.
        silent = [other for other in self.choices[:choice] if not other.has_begun]
        chunks = b"".join(self._chunk(other, other.last()) for other in silent)
        chunks += b"".join(self._chunk(c, piece) for piece in c.pieces(step))
        return chunks if step.finish_reason is None else chunks + self._chunk(c, c.last(), step.finish_reason)

    def end(self, usage: Usage) -> bytes:
        last = b"".join(self._chunk(c, c.last(), "stop") for c in self.choices if c.finish_reason is None)
        if self.body.stream_options.include_usage:
            last += event({**self._head(self.choice_kind.chunk_kind), "choices": [], "usage": _usage(usage)})
        return last + DONE

    def _chunk(self, c: Choice, piece: Json, finish_reason: str | None = None) -> bytes:
        """A chunk of a stream, with the sources of the tokens since the last chunk if the client requests them."""
        if self.body.stream_options.include_sources:
            piece, c.sources = {**piece, "sources": c.sources}, []
        c.has_begun = True
        choice = {"index": c.index, "finish_reason": finish_reason, **piece}
        return event({**self._head(self.choice_kind.chunk_kind), "choices": [choice]})

    def whole(self, usage: Usage) -> Json:
        choices = [{"index": c.index, "finish_reason": c.finish_reason or "stop", **c.whole()} for c in self.choices]
        return {**self._head(self.choice_kind.kind), "choices": choices, "usage": _usage(usage)}

    def failed(self, error: ApiError) -> bytes:
        return event(error_content(error)) + DONE

    def _head(self, kind: str) -> Json:
        return {
            "id": self.id,
            "system_fingerprint": fingerprint(),
            "object": kind,
            "model": self.body.model,
            "created": self.created,
        }


def _usage(usage: Usage) -> Json:
    content: Json = {
        "prompt_tokens": usage.n_prompt,
        "completion_tokens": usage.n_generated,
        "total_tokens": usage.n_prompt + usage.n_generated,
        "prompt_tokens_details": {"cached_tokens": usage.n_cached},
    }
    if (drafts := usage.drafts) is not None:
        content["completion_tokens_details"] = {
            "accepted_prediction_tokens": usage.n_accepted,
            "rejected_prediction_tokens": sum(d.n_drafted for d in drafts) - usage.n_accepted,
            "copied_tokens": sum(sum(d.copied) for d in drafts),
            "accepted_copied_tokens": sum(sum(d.copies_accepted) for d in drafts),
            "forced_tokens": sum(sum(d.forced) for d in drafts),
            "accepted_forced_tokens": sum(sum(d.forced_accepted) for d in drafts),
        }
    return content


def error_content(error: ApiError) -> Json:
    """An error in the format of OpenAI's APIs."""
    kind = "server_error" if error.status >= 500 else ERRORS.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def logprob_of(step: Delta) -> Json:
    """A token's log probabilities in the format of chat completions and Responses, with the likeliest tokens."""
    assert step.likely is not None
    return {**_token(step.likely), "top_logprobs": [_token(t) for t in step.top]}


def _token(t: Likely) -> Json:
    return {"token": t.piece.decode(errors="replace"), "bytes": [*t.piece], "logprob": max(t.logprob, LEAST)}


class TextLogprobs:
    """The log probabilities of a text's tokens in the format of completions, as lists."""

    def __init__(self) -> None:
        self.n_chars = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, steps: Sequence[Delta]) -> Json:
        """The next tokens. ``text_offset`` counts characters from the beginning of the text."""
        offsets = []
        for step in steps:
            assert step.likely is not None
            offsets.append(self.n_chars)
            self.n_chars += len(self.decoder.decode(step.likely.piece))
        own = [step.likely for step in steps if step.likely is not None]
        return {
            "tokens": [_name(t) for t in own],
            "token_logprobs": [max(t.logprob, LEAST) for t in own],
            "top_logprobs": [{_name(t): max(t.logprob, LEAST) for t in (*s.top, s.likely) if t} for s in steps],
            "text_offset": offsets,
        }


def _name(t: Likely) -> str:
    """A token's text, or its bytes in OpenAI's notation if it ends within a character."""
    try:
        return t.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in t.piece)


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
    images: list[str] = []
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


def _text(part: ContentPart, where: str, images: list[str]) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "image_url" and part.image_url is not None:
        return add_image(images, part.image_url if isinstance(part.image_url, str) else part.image_url.url)
    raise unsupported(part.type, where, "messages", "send text or images")


def _message(message: ChatMessage, where: str, images: list[str]) -> Json:
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
Tokens = Annotated[list[Natural], Field(min_length=1)]
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
