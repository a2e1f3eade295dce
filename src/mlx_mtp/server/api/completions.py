"""OpenAI's APIs for chats, ``/v1/chat/completions``, and texts, ``/v1/completions``."""

import codecs
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from mlx_lm.server import get_system_fingerprint
from pydantic import Field

from ...core.drafts.sources import SOURCES, source_of
from ...text.answer import Reasoning
from ...text.schema import Json
from ...text.tool_calls import CallArguments, CallBegins, Text
from ..request import LOADING, ApiError, Delta, Request, StructuredOutput
from ..structured_output import from_fields, from_response_format
from . import common
from .common import WHOLE, Body, Call, Item, Limit, Many, Natural, Short, Usage, Writer, event
from .history import READ, History, error_at

DONE = b"data: [DONE]\n\n"
MAX_CHOICES = 8  # answers to a prompt
MAX_PROMPTS = 128
LEAST = -9999.0  # OpenAI's, in place of minus infinity
GUIDED = {  # fields for structured output, and the arguments of make_grammar
    "json_schema": "json_schema",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "lark",
}
TopLogprobs = Annotated[int, Ge(0), Le(20), WHOLE]
Prompt = Annotated[str, Field(min_length=1)]
Tokens = Annotated[Many[Natural], Field(min_length=1)]
Prompts = Annotated[Many[Prompt] | Many[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]

fingerprint = cache(get_system_fingerprint)


@dataclass
class Choice:
    index: int
    events: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    has_begun: bool = False  # whether a chunk with this choice was written
    steps: list[Delta] = field(default_factory=list)  # kept for their log probabilities
    sources: list[str] = field(default_factory=list)  # the sources of the tokens since the last chunk
    n_chars: int = 0  # of the tokens whose log probabilities were written
    decoder: Any = field(default_factory=partial(codecs.getincrementaldecoder("utf-8"), "replace"))


class OpenAIWriter(Writer):
    """Writes choices in pieces: a part of the content, and its log probabilities. A whole choice is made of its events."""

    prefix: str  # of the answer's id
    kind: str
    chunk_kind: str
    content: Callable[[Any], Json]  # of an event; that of ``None`` is empty
    logprobs: Callable[[Choice, list[Delta]], Json]  # of these tokens

    def __init__(self, body: "OpenAIBody"):
        super().__init__(body)
        self.id, self.created = f"{self.prefix}-{uuid.uuid4()}", int(time.time())
        self.choices = [Choice(i) for i in range(len(body.prompts) * body.n)]
        self.n_generated = 0  # tokens in the stream so far

    def loading(self) -> bytes:
        empty = {"index": 0, "finish_reason": None, **self.content(None)}
        return event({**self._head(self.chunk_kind), "choices": [empty], "status": LOADING})

    def add(self, step: Delta, choice: int = 0) -> bytes:
        c = self.choices[choice]
        self.n_generated += 1
        c.finish_reason = step.finish_reason
        c.events += step.events
        if self.body.top is not None:
            c.steps.append(step)
        c.sources += filter(None, [step.source])
        # OpenAI's client expects a chunk of each earlier choice first.
        chunks = [self._chunk(other, self._piece(other)) for other in self.choices[:choice] if not other.has_begun]
        chunks += [self._chunk(c, self._piece(c, e)) for e in step.events if self.content(e)]
        if step.finish_reason is not None:
            chunks.append(self._chunk(c, self._piece(c), step.finish_reason))
        return b"".join(chunks)

    def end(self, usage: Usage) -> bytes:
        last = b"".join(self._chunk(c, self._piece(c), "stop") for c in self.choices if c.finish_reason is None)
        if self.body.stream_options.include_usage:
            last += event({**self._head(self.chunk_kind), "choices": [], "usage": _usage(usage)})
        return last + DONE

    def whole(self, usage: Usage) -> Json:
        choices = []
        for c in self.choices:
            said = [e for e in c.events if isinstance(e, Text)]
            text = Text("".join(e.text for e in said), tokens=[i for e in said for i in e.tokens])
            piece = self.whole_choice(self._piece(Choice(c.index, steps=c.steps), text), c.events)
            choices.append({"index": c.index, "finish_reason": c.finish_reason or "stop", **piece})
        return {**self._head(self.kind), "choices": choices, "usage": _usage(usage)}

    def whole_choice(self, piece: Json, events: list[Any]) -> Json:
        """A choice of its whole text and all its events."""
        return piece

    def failed(self, error: ApiError) -> bytes:
        return event(common.error_content(error)) + DONE

    def _piece(self, c: Choice, e: Any = None) -> Json:
        piece = self.content(e)
        if self.body.top is not None:
            piece["logprobs"] = self.logprobs(c, [c.steps[i] for i in e.tokens] if isinstance(e, Text) else [])
        return piece

    def _chunk(self, c: Choice, piece: Json, finish_reason: str | None = None, **fields: Any) -> bytes:
        """A chunk of a stream, with the sources of the tokens since the last chunk if the client requests them."""
        if not c.has_begun and "delta" in piece:
            piece = {**piece, "delta": {"role": "assistant", **piece["delta"]}}
        if self.body.stream_options.include_sources:
            piece = {**piece, "sources": c.sources}
            c.sources = []
        if self.body.stream_options.continuous_usage_stats:
            # More tokens may have been generated than are in the stream.
            counts = {"prompt_tokens": self.usage().n_prompt, "completion_tokens": self.n_generated}
            fields["usage"] = {**counts, "total_tokens": sum(counts.values())}
        c.has_begun = True
        choice = {"index": c.index, "finish_reason": finish_reason, **piece}
        return event({**self._head(self.chunk_kind), "choices": [choice], **fields})

    def _head(self, kind: str) -> Json:
        head = {"id": self.id, "system_fingerprint": fingerprint(), "object": kind}
        return {**head, "model": self.body.model, "created": self.created}


class ChatWriter(OpenAIWriter):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def waiting(self, n_read: int, n_prompt: int) -> bytes:
        """A chunk without text: strict readers take no comments. Its progress is named as in llama.cpp."""
        c = self.choices[0]
        progress = {"processed": n_read, "total": n_prompt}
        return self._chunk(c, self._piece(c), prompt_progress=progress)

    def content(self, e: Any) -> Json:
        if isinstance(e, Text):
            return {"delta": {"content": e.text}}
        if isinstance(e, Reasoning):
            # Under both names that clients use: OpenRouter's, which is also mlx-lm's, and DeepSeek's.
            return {"delta": {"reasoning": e.text, "reasoning_content": e.text}}
        if isinstance(e, CallBegins):
            function = {"name": e.name, "arguments": ""}
            call = {"index": e.index, "id": common.new_id("call"), "type": "function", "function": function}
            return {"delta": {"tool_calls": [call]}}
        if isinstance(e, CallArguments):
            return {"delta": {"tool_calls": [{"index": e.index, "function": {"arguments": e.text}}]}}
        return {"delta": {}} if e is None else {}

    def logprobs(self, c: Choice, steps: list[Delta]) -> Json:
        return {"content": [logprob_of(step) for step in steps], "refusal": None}

    def whole_choice(self, piece: Json, events: list[Any]) -> Json:
        message = {"role": "assistant", **piece.pop("delta")}
        calls = list[Json]()
        if thoughts := "".join(e.text for e in events if isinstance(e, Reasoning)):
            message |= self.content(Reasoning(thoughts))["delta"]
        for e in events:
            if isinstance(e, CallBegins):
                calls += self.content(e)["delta"]["tool_calls"]
                del calls[-1]["index"]
            elif isinstance(e, CallArguments):
                calls[-1]["function"]["arguments"] += e.text
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return {"message": message, **piece}


class CompletionWriter(OpenAIWriter):
    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def content(self, e: Any) -> Json:
        return {"text": e.text} if isinstance(e, Text) else {"text": ""} if e is None else {}

    def logprobs(self, c: Choice, steps: list[Delta]) -> Json:
        """Lists, an entry for each token. ``text_offset`` counts characters from the beginning of the text."""
        told: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for step in steps:
            (piece, logprob), *top = step.logprobs
            told["tokens"].append(_name(piece))
            told["token_logprobs"].append(max(logprob, LEAST))
            told["top_logprobs"].append({_name(p): max(x, LEAST) for p, x in (*top, (piece, logprob))})
            told["text_offset"].append(c.n_chars)
            c.n_chars += len(c.decoder.decode(piece))
        return told


def _usage(usage: Usage) -> Json:
    content: Json = {
        "prompt_tokens": usage.n_prompt,
        "completion_tokens": usage.n_generated,
        "total_tokens": usage.n_prompt + usage.n_generated,
        "prompt_tokens_details": {"cached_tokens": usage.n_cached},
        "completion_tokens_details": (details := {"reasoning_tokens": usage.n_reasoning}),
    }
    if (drafts := usage.drafts) is not None:
        details["accepted_prediction_tokens"] = usage.n_accepted
        details["rejected_prediction_tokens"] = sum(d.n_drafted for d in drafts) - usage.n_accepted
        for source in dict.fromkeys([*SOURCES, *(source for d in drafts for source in d.by_source)]):
            name = f"{source_of(source)[0].split()[0]}_tokens"
            details[name] = sum(sum(d.of(source).drafted) for d in drafts)
            details[f"accepted_{name}"] = sum(sum(d.of(source).accepted) for d in drafts)
    return content


def logprob_of(step: Delta) -> Json:
    own, *top = (
        {"token": piece.decode(errors="replace"), "bytes": [*piece], "logprob": max(logprob, LEAST)}
        for piece, logprob in step.logprobs
    )
    return {**own, "top_logprobs": top}


def _name(piece: bytes) -> str:
    """A token's text, or its bytes in OpenAI's notation if it ends within a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class OpenAIBody(Body):
    LIMITS: ClassVar = ("max_completion_tokens", "max_tokens", "n_predict")
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    n_predict: Limit | None = None  # llama.cpp's
    n: Annotated[int, Ge(1), Le(MAX_CHOICES), WHOLE] = 1
    response_format: Any = None
    json_schema: Json | None = None  # llama.cpp's
    guided_json: Json | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None

    @property
    def outputs(self) -> list[StructuredOutput | None]:
        given = {name: value for name in GUIDED if (value := getattr(self, name)) is not None}
        outputs = [StructuredOutput(name, {GUIDED[name]: value}) for name, value in given.items()]
        return [*outputs, from_response_format(self.response_format, "response_format")]


class ChatMessage(Item):
    role: str


class ChatBody(OpenAIBody):
    NEEDED: ClassVar = "messages"
    writer: ClassVar = ChatWriter
    messages: Annotated[Many[ChatMessage], Field(min_length=1)]
    tools: Many[Call] | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    # As in mlx-lm: the prefix of a role, for prompts without a chat template.
    role_mapping: Annotated[dict[str, Short], common.at_most(32)] | None = None

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def to_request(self, content: Json) -> Request:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs: true.", param="top_logprobs")
        request = super().to_request(content)
        request.role_mapping = self.role_mapping
        request.n = self.n
        return request

    def conversation(self, content: Json) -> tuple[History, list[Json]]:
        for i, tool in enumerate(self.tools or []):
            if tool.function is None:
                kind = str(tool.type)[:50]
                fix = "send a function with its parameters"
                raise error_at("tools", f"tools[{i}]: {kind} without a function is not supported: {fix}.")
        history = History()
        for i, message in enumerate(content["messages"]):
            n = len(history.messages)
            history.add(message, f"messages[{i}]")
            for added in history.messages[n:][-1:]:  # the template gets the other fields as they are
                others = {name: x for name, x in message.items() if name not in READ and x is not None}
                added |= {name: x for name, x in others.items() if name not in added}
        return history, content["tools"] if self.tools else []


class CompletionBody(OpenAIBody):
    NEEDED: ClassVar = "prompt"
    writer: ClassVar = CompletionWriter
    UNUSED: ClassVar = (
        "tool_choice",
        "continue_final_message",
        "add_generation_prompt",
        "enable_thinking",
        *common.SWITCHES,
    )
    prompt: Prompt | Tokens | Prompts
    logprobs: TopLogprobs | None = None

    @property
    def prompts(self) -> list[Any]:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else [*self.prompt]

    @property
    def top(self) -> int | None:
        return self.logprobs

    def to_request(self, content: Json) -> Request:
        output, _ = from_fields(self.outputs, "none", [])
        return Request("text", self.prompts[0], [], n=self.n, param=self.NEEDED, structured_output=output)
