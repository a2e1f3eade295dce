"""The common part of OpenAI's APIs: errors, log probabilities, and the choices of chat completions and completions."""

import codecs
import time
import uuid
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le
from mlx_lm.server import get_system_fingerprint

from ...text.schema import Json
from ..options import NO_LIMIT
from ..request import ApiError, Delta, Likely, Request, StructuredOutput
from ..structured_output import from_response_format, only_one
from .body import OPENAI, Body, Part, Positive, Stop
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
