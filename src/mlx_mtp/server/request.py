"""A request to the server, the error that ends one, and the metrics of all of them."""

import logging
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from typing import Any, Literal

from mlx_lm.server import GenerationArguments
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ..core.decoding.counts import DraftCounts
from ..core.drafts.options import CopyDrafts
from ..errors import MTPError
from ..images.prompt import ImagePrompt
from ..prompt_store.tree import Handle
from ..text.answer import Answer, AnswerReader, Event, functions_of, think_marks
from ..text.formats import QWEN, format_of
from ..text.grammar import Grammar

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
BUDGETS = {"low": 1024, "medium": 8192}  # tokens; other efforts have no limit
VARIABLE = "reasoning_effort"  # the variable of chat templates that support efforts
NO_LIMIT = 2**31 + 1  # max_tokens of an answer that may use the rest of the context
LOADING = "loading"  # a request's item when its model has to be loaded first
STARTED = "started"  # a request's item when prefill of the tokens that are not cached begins
NO_MEMORY = "insufficient_memory"  # the code of an error 507
Options = Namespace  # the flags of ``mlx_mtp server`` by their names, as ``check`` of options.py returns them


class ApiError(Exception):
    """An error in the format of the client's API: HTTP status, sentence, wrong field (``param``), OpenAI's name (``code``)."""

    # The tokens of a prompt, at least about, and those of the context that it exceeds
    too_long: tuple[int, int] | None = None

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error: of one that nobody expects, status 500, and the log gets its traceback."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MTPError):
        return ApiError(400, str(error))
    logging.error("A request failed.", exc_info=error)
    return ApiError(500, f"The request failed: {error}")


def too_long(n_tokens: int, max_tokens: int, param: str | None = None) -> ApiError:
    message = f"This model's maximum context length is {max_tokens} tokens, but the prompt has {n_tokens}."
    error = ApiError(400, message, param=param, code="context_length_exceeded")
    error.too_long = n_tokens, max_tokens  # APIs have their own sentences for it
    return error


@dataclass
class Prompt:
    tokens: list[int]
    in_reasoning: bool | None = None  # whether the answer begins with reasoning, see ``ends_in_reasoning``
    goes_on: bool = False  # whether the answer continues a text of the client
    cuts: list[int] = field(default_factory=list)  # numbers of tokens after which to keep a snapshot, in order
    n_cached: int = 0
    is_read: bool = False  # whether its caches were read from disk, if there are any
    handle: Handle | None = None  # the prefilled part in a prompt store
    image_prompt: ImagePrompt | None = None

    def key_of(self, tokens: list[int]) -> list[int]:
        """The key of these first tokens in prompt caches. In a key, image tokens are hashes of the image."""
        if self.image_prompt is None:
            return tokens
        key = self.image_prompt.key
        return key[: len(tokens)] + tokens[len(key) :]

    @property
    def segments(self) -> list[list[int]]:
        bounds = [self.n_cached, *self.cuts, len(self.tokens)]
        return [self.tokens[i:k] for i, k in pairwise(bounds)]


@dataclass
class StructuredOutput:
    param: str  # the field of the body that requests it
    grammar: dict[str, Any] = field(default_factory=dict)  # the argument of make_grammar
    calls: list[dict[str, Any]] = field(default_factory=list)  # the functions that the answer calls
    # Whether the answer consists of calls only. Otherwise it is free up to the first call, and only the arguments of strict
    # functions follow their schemas.
    is_required: bool = True


def drop(item: Any) -> None:
    """Receives a request's items on ranks without clients."""


@dataclass(frozen=True)
class Waiting:
    """The progress of prefill, in tokens without the cached ones."""

    n_read: int
    n_prompt: int


@dataclass(frozen=True)
class Delta:
    events: list[Event]  # the token's text, reasoning and calls
    token: int
    finish_reason: str | None  # None unless the answer ends here
    stop_word: str | None = None  # the stop word that ended the text
    source: str | None = None  # "model", or the source of the accepted draft
    # If requested, of the token, and then of the likeliest tokens in order: its text, which may end within a character, and its
    # log probability before the temperature and the sampler's filters.
    logprobs: list[tuple[bytes, float]] = field(default_factory=list)


numbers = count()  # the numbers of requests


@dataclass(eq=False)
class Request:
    """A request from its arrival to the end of its answer."""

    request_type: Literal["chat", "text"]
    prompt: str | list[int]  # the beginning of a text, or its tokens
    messages: list[Any]  # the messages of a chat, for the chat template
    tools: list[Any] | None = None  # the tools that the answer may call, in OpenAI's format
    role_mapping: dict[str, Any] | None = None  # as in mlx-lm's server, for a model without a chat template
    shown_tools: list[Any] | None = None  # the tools in the prompt
    n: int = 1  # the number of answers to each prompt
    copy_drafts: CopyDrafts | None = None
    effort: str | None = None  # of its reasoning, an ``Effort``
    budget: int | None = None  # reasoning tokens, after which the end is forced
    structured_output: StructuredOutput | None = None
    grammar: Grammar | None = None  # the compiled structured output; each sequence gets a copy
    images: list[str] = field(default_factory=list)  # URLs in the order of their marks; empty once read
    askers: list[str] = field(default_factory=list)  # the role that sent each of them, or "" if an answer follows
    min_tokens: int = 0  # before an end-of-text token or one of stop_token_ids
    stop_token_ids: list[int] = field(default_factory=list)  # further tokens that end the text
    one_call: bool = False  # whether the answer ends with its first call
    limit: str | None = None  # the field that limits the answer's tokens, if it must fit in the context
    streams: bool = False  # whether the client receives the answer in pieces
    param: str = "messages"  # the field of the body with the prompt
    number: int = field(default_factory=numbers.__next__)
    arrived: float = field(default_factory=time.perf_counter)

    # The frontend's
    args: GenerationArguments = field(init=False)  # sampling parameters, limits and the like
    key: str = field(init=False)  # the path or repo of the model
    encoded: Prompt = field(init=False, default_factory=lambda: Prompt([]))
    # Receives its items from the engine: LOADING, STARTED, Waiting, Delta, ApiError, and None at the end.
    send: Callable[[Any], None] = field(init=False, default_factory=lambda: drop)
    is_gone: bool = field(init=False, default=False)  # whether its client has disconnected

    # The engine's
    answer: Answer = field(init=False)
    detokenizer: Any = field(init=False)
    n_tokens: int = field(init=False, default=0)
    n_accepted: int = field(init=False, default=0)  # accepted drafts among the tokens
    n_reasoning: int = field(init=False, default=0)  # those of its reasoning
    counts: DraftCounts = field(init=False, default_factory=DraftCounts)

    @property
    def n_prompt(self) -> int:
        return len(self.encoded.tokens)

    @property
    def n_cached(self) -> int:
        return self.encoded.n_cached

    def reasoning_limit(self, tokenizer: Any) -> int | None:
        """The reasoning tokens after which the end is forced; those of an effort only if the template does not support it."""
        if not tokenizer.has_thinking:
            return None
        if self.budget is None and VARIABLE not in str(tokenizer.chat_template):
            return BUDGETS.get(self.effort or "")
        return self.budget

    @property
    def begun(self) -> str | None:
        """The field of the last message that the answer continues: of the assistant's without calls the text, or the reasoning
        where there is no text.
        """
        last = self.messages[-1]
        names = ("content", "reasoning_content") if last["role"] == "assistant" and not last.get("tool_calls") else ()
        return next((name for name in names if (last.get(name) or "").strip()), None)

    def begin_answer(self, tokenizer: Any, patience: float | None) -> None:
        """Make the parser of the answer, see ``AnswerReader``. Without tools, calls are text; of a text, all is."""
        is_chat = self.request_type == "chat"
        prompt = self.encoded
        schemas = None
        if is_chat and self.tools and tokenizer.has_tool_calling:
            schemas = {function["name"]: function.get("parameters") for function in functions_of(self.tools)}
        think = think_marks(tokenizer) if is_chat else None
        format = format_of(tokenizer) or QWEN
        reader = AnswerReader(think, prompt.in_reasoning, schemas, patience, not self.streams, format)
        self.answer = Answer(reader, self.args.stop_words, is_chat, self.one_call, prompt.goes_on)

    def choices(self, prompts: list[Any]) -> "list[Request]":
        """A request for each answer, ``n`` to each of the prompts, this request first. Answer i has its seed plus i."""
        of_each = [prompt for prompt in prompts for _ in range(self.n)]
        again = [replace(self, prompt=prompt, n=1, number=next(numbers)) for prompt in of_each[1:]]
        args = self.args
        seed = self.args.seed
        for i, choice in enumerate([self, *again]):
            choice.args = replace(args, seed=None if seed is None else (seed + i) % 2**64)
        return [self, *again]

    def __getstate__(self) -> dict[str, Any]:
        """The state for other ranks: the prompt's tokens without its text, no client, and no grammar, which they compile."""
        unsent: dict[str, Any] = {"prompt": "", "messages": [], "images": [], "grammar": None}
        return vars(self) | unsent | {"send": drop}


SECONDS = partial(Histogram, buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300))
RATES = partial(Histogram, buckets=(1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000))
METRICS: list[tuple[Any, ...]] = [  # kind, name, help and labels
    (Counter, "requests", "Requests answered, by HTTP status.", "status"),
    (Gauge, "requests_in_flight", "Requests being generated."),
    (Gauge, "queue_length", "Requests waiting."),
    (Counter, "prompt_tokens", "Prompt tokens."),
    (Counter, "cached_prompt_tokens", "Prompt tokens found in the prompt cache."),
    (Counter, "generated_tokens", "Tokens generated."),
    (Counter, "steps", "Steps, by the number of requests at once.", "requests"),
    (Counter, "drafted_tokens", "Drafts, by source and position in the window.", "source", "position"),
    (Counter, "accepted_tokens", "Accepted drafts, by source and position.", "source", "position"),
    (SECONDS, "time_to_first_token_seconds", "From a request's arrival to its first token."),
    (RATES, "tokens_per_second", "Speed of a request, without steps that compile."),
    (Gauge, "memory_limit_bytes", "Memory limit of the server."),
    (Gauge, "memory_held_bytes", "Memory used by the server."),
]


class Metrics(dict[str, Any]):
    def __init__(self) -> None:
        self.registry = CollectorRegistry()  # one for each server, not for the process
        for kind, name, text, *labels in METRICS:
            self[name] = kind(name, text, labels, namespace="mlx_mtp", registry=self.registry)

    def finish(self, counts: DraftCounts) -> None:
        if (speed := counts.tokens_per_second) is not None:
            self["tokens_per_second"].observe(speed)
        for source, of_source in counts.by_source.items():
            for position, (drafted, accepted) in enumerate(zip(*of_source), 1):
                self["drafted_tokens"].labels(source, position).inc(drafted)
                self["accepted_tokens"].labels(source, position).inc(accepted)
