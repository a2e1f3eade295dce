"""What OpenAI's APIs for chats and for texts have in common."""

import time
import uuid
from functools import cache
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from mlx_lm.server import get_system_fingerprint

from ..form import form_of, the_only
from ..job import Delta
from ..request import ApiError, Form
from .answer import Json, Usage, event
from .body import Body, Part, Positive, Stop, stop_words

DONE = b"data: [DONE]\n\n"
ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


fingerprint = cache(get_system_fingerprint)


class StreamOptions(Part):
    include_usage: bool = False
    include_sources: bool = False


class OpenAIBody(Body):
    """The fields of both."""

    REFUSED: ClassVar = {
        "functions": ([[]], "send tools"),
        "function_call": (["auto", "none"], "send tools"),
    }
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    n: Annotated[int, Ge(1), Le(1)] = 1
    stop: Stop | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Ge(0), Le(11)] | None = None
    response_format: Any = None
    guided_json: Json | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None

    @property
    def form(self) -> Form | None:
        """
        Raises:
            ApiError: More than one is asked for, or one that does not exist.
        """
        guided = {"json_schema": self.guided_json, "regex": self.guided_regex, "lark": self.guided_grammar}
        names = "guided_json", "guided_regex", "guided_grammar"
        forms = [Form(name, {kind: g}) for name, (kind, g) in zip(names, guided.items()) if g is not None]
        return the_only(*forms, form_of(self.response_format, "response_format"))

    def openai_arguments(self, flags: Any) -> Any:
        """mlx-lm's arguments."""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        top = -1 if self.top_logprobs is None else self.top_logprobs
        return self.arguments(flags, max_tokens, stop_words(self.stop), logprobs=self.logprobs, top_logprobs=top)


class OpenAIWriter:
    """
    Args:
        body (OpenAIBody): The request's.
    """

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: OpenAIBody):
        self.body = body
        self.id, self.created = f"{self.prefix}-{uuid.uuid4()}", int(time.time())
        self.finish_reason: str | None = None
        self.steps: list[Delta] = []
        self.sources: list[str] = []  # of the tokens that no chunk has told of

    def begin(self, usage: Usage) -> bytes:
        return b""

    def waiting(self, n_read: int, n_prompt: int) -> bytes:
        return f": keepalive {n_read}/{n_prompt}\n\n".encode()

    def add(self, step: Delta) -> bytes:
        self.finish_reason = step.finish_reason or self.finish_reason
        if self.body.stream:
            self.sources += [step.source] if step.source is not None else []
            return b"".join(self._chunk(choice, None) for choice in self.choices(step))
        self.steps.append(step)
        self.collect(step)
        return b""

    def choices(self, step: Delta) -> list[Json]:
        """What a step adds to the answer, as the only choice of each chunk."""
        raise NotImplementedError

    def last_choice(self) -> Json:
        """The choice of the chunk with the reason why the answer ends."""
        raise NotImplementedError

    def collect(self, step: Delta) -> None:
        """Take a step into the whole answer."""
        raise NotImplementedError

    def choice(self) -> Json:
        """The whole answer."""
        raise NotImplementedError

    def end(self, usage: Usage) -> bytes:
        last = self._chunk(self.last_choice(), self.finish_reason or "stop")
        if self.body.stream_options.include_usage:
            last += event({**self._head(self.kind), "choices": [], "usage": _usage(usage)})
        return last + DONE

    def _chunk(self, choice: Json, finish_reason: str | None) -> bytes:
        """A piece of a stream; the first after a token tells where it came from, if the client asks for that."""
        if self.body.stream_options.include_sources:
            choice, self.sources = {**choice, "sources": self.sources}, []
        return event(self._response(self.chunk_kind, choice, finish_reason))

    def whole(self, usage: Usage) -> Json:
        response = self._response(self.kind, self.choice(), self.finish_reason or "stop")
        choice = response["choices"][0]
        if top := [step.top_tokens for step in self.steps if step.top_tokens]:
            choice["logprobs"] = {"content": [dict(t[0], top_logprobs=t) for t in top]}
        elif self.body.logprobs:
            choice["logprobs"] = {"content": [{"id": s.token, "logprob": s.logprob} for s in self.steps]}
        return {**response, "usage": _usage(usage)}

    def failed(self, error: ApiError) -> bytes:
        return event(error_content(error)) + DONE

    def _response(self, kind: str, choice: Json, finish_reason: str | None) -> Json:
        return {**self._head(kind), "choices": [{"index": 0, "finish_reason": finish_reason, **choice}]}

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
    if (counts := usage.counts) is not None:
        content["completion_tokens_details"] = {
            "accepted_prediction_tokens": usage.n_accepted,
            "rejected_prediction_tokens": counts.n_drafted - usage.n_accepted,
            "copied_tokens": sum(counts.copied),
            "accepted_copied_tokens": sum(counts.copies_accepted),
            "forced_tokens": sum(counts.forced),
            "accepted_forced_tokens": sum(counts.forced_accepted),
        }
    return content


def error_content(error: ApiError) -> Json:
    """An error as OpenAI's APIs write it."""
    kind = "server_error" if error.status >= 500 else ERRORS.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
