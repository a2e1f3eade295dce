"""What the APIs have in common: the fields of a body and their validation, and the writer of an answer."""

import inspect
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from annotated_types import Ge, Le
from jinja2.defaults import DEFAULT_NAMESPACE
from mlx_lm import server as stock
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ...core.pacing import MAX_COPY_TOKENS, MAX_DRAFT_TOKENS
from ...core.sampling import PARAMETERS
from ...text.answer import Reasoning
from ...text.schema import Json, whole
from ...text.tool_calls import CallArguments, CallBegins, Text
from ..request import NO_LIMIT, VARIABLE, ApiError, Delta, Effort, Request, StructuredOutput
from ..structured_output import from_fields
from .history import History, error_at

MAX_BIASES = 10_000  # entries of logit_bias
ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
NEVER = 2**31  # min_tokens of a text that no token of the model ends

OUTPUTS = "docs/server.md#structured-output lists those that are supported"
# Types of tools that the vendors define and clients run
OF_CLIENTS = re.compile(
    "(local_shell|shell|apply_patch|computer|computer_toolset|browser_toolset|bash|text_editor|memory)(_(use_preview|[0-9]+))?$"
)
SAMPLING = f"send {', '.join(parameter.name for parameter in PARAMETERS.values())}"
THINKING = "docs/server.md#thinking lists the fields of each API"
NO_THINKING = ("none", "minimal")  # efforts
# The fields for thinking, besides ``enable_thinking``
SWITCHES = ("thinking", "reasoning", "think", VARIABLE, "thinking_budget", "reasoning_budget", "thinking_token_budget")
# Fields that would change the answer: the values that change nothing, and the alternative. An API refuses those that it does
# not have. All other unknown fields are ignored.
REFUSED: Mapping[str, tuple[Sequence[Any], str]] = {
    "modalities": ([["text"]], "answers are texts"),
    "audio": ([], "answers are texts"),
    "web_search_options": ([], "let the client search"),
    "plugins": ([[]], "let the client call the tools"),
    "mcp_servers": ([[]], "let the client call the tools"),
    "container": ([], "let the client run the tools"),
    "moderation": ([], "moderate the texts yourself"),
    "structured_outputs": ([{}], OUTPUTS),
    "guided_choice": ([[]], OUTPUTS),
    "grammar": ([""], OUTPUTS),
    "response_format": ([{"type": "text"}], OUTPUTS),
    **dict.fromkeys(("json_schema", "guided_json", "guided_regex", "guided_grammar"), ([], OUTPUTS)),
    "allowed_token_ids": ([[]], "send logit_bias"),
    "bad_words": ([[]], "send logit_bias"),
    **dict.fromkeys(("regex", "ebnf", "structural_tag"), ([""], OUTPUTS)),
    **dict.fromkeys(("adapters", "lora", "lora_path"), ([[]], "start a server with --adapter-path")),
    "draft_model": (["default_model"], "the draft models of mlx-lm run in mlx_lm.server"),
    "prompt_logprobs": ([], "only the tokens of an answer have log probabilities"),
    "n_probs": ([0], "send logprobs"),
    **dict.fromkeys(("return_token_ids", "return_tokens", "return_tokens_as_token_ids"), ([False], "send logprobs")),
    **dict.fromkeys(
        ("skip_special_tokens", "spaces_between_special_tokens"), ([True], "an answer has no control tokens")
    ),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim"), ([False], "add it yourself")),
    "use_beam_search": ([False], "send n, and choose"),
    "length_penalty": ([1], "it is of beam search"),
    **dict.fromkeys(("mirostat", "dynatemp_range", "dry_multiplier", "top_a"), ([0], SAMPLING)),
    **dict.fromkeys(("typical_p", "tfs_z"), ([1], SAMPLING)),
    "samplers": ([[]], SAMPLING),
    "repeat_penalty": ([1], "send repetition_penalty"),
    "logits_processors": ([[]], "send logit_bias"),
    "custom_logit_processor": ([""], "send logit_bias"),
    "stop_regex": ([[], ""], "send stop"),
    **dict.fromkeys(("prompt_embeds", "input_embeds"), ([[]], "send the text, or its tokens")),
    "t_max_predict_ms": ([0, -1], "send max_tokens, or hang up"),
    "top_logprobs": ([], "send logprobs, a number, to /v1/completions"),
    "functions": ([[]], "send tools"),
    "function_call": (["auto", "none"], "send tools"),
    "tool_choice": (["auto", "none"], "send tools to /v1/chat/completions"),
    "echo": ([False], "put the prompt before the text yourself"),
    "continue_final_message": ([False], "a text is continued without it"),
    "suffix": ([""], "write the model's own fill-in-the-middle tokens into the prompt"),
    "best_of": ([1], "send n, and choose"),
    "n": ([1], "send one request for each answer"),
    "n_predict": ([-1], "send the API's own limit of tokens"),
    "previous_response_id": ([], "send it to /v1/responses, or the whole conversation"),
    "conversation": ([], "send previous_response_id, or the whole conversation as input"),
    "thread": ([], "send the whole conversation as messages"),
    "compaction": ([], "let the client summarize the conversation"),
    "documents": ([[]], "send them as messages"),
    "image_data": ([[]], "send the images in messages"),
    "chat_template": ([], "start a server with --chat-template"),
    "truncate_prompt_tokens": ([], "shorten the prompt"),
    "prompt": ([], "send the conversation itself"),
    "background": ([False], "leave it out"),
    "include_reasoning": ([True], "turn thinking off, or ignore the reasoning"),
    **dict.fromkeys(("enable_thinking", *SWITCHES), ([], THINKING)),
}


def at_most(n: int) -> BeforeValidator:
    """Refuse an object with more entries before pydantic makes an error for each of them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > n:
            raise ValueError(f"{len(value):,} entries, and {n:,} are allowed")
        return value

    return BeforeValidator(check)


def _not_zero(n: int) -> int:
    if n == 0:
        raise ValueError("Input should be at least 1, or -1 for no limit")
    return n


T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]  # pydantic otherwise makes an error for each element
Short = Annotated[str, Field(max_length=1000)]
WHOLE = BeforeValidator(whole)  # behind an integer's bounds, which pydantic then checks without calls of Python
Natural = Annotated[int, Ge(0), Le(2**31), WHOLE]
# -1 is no limit, as in llama.cpp
Budget = Annotated[int, Ge(-1), Le(2**31), WHOLE, AfterValidator(lambda n: NO_LIMIT if n == -1 else n)]
Limit = Annotated[Budget, AfterValidator(_not_zero)]
Penalty = Annotated[float, Ge(-100), Le(100)]
Stop = Annotated[Many[Short], Field(max_length=64), BeforeValidator(lambda x: [x] if isinstance(x, str) else x)]
Token = Annotated[str, Field(pattern="^[0-9]{1,9}$"), AfterValidator(int)]
Value = bool | Annotated[float, Ge(-(2**31)), Le(2**31)] | Annotated[int, Ge(-(2**31)), Le(2**31)] | Short | None
Variables = dict[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]{0,63}$")], Value]

# Arguments of apply_chat_template and the renderer, and the functions of templates: a request may set the template's own
# variables only.
RESERVED = {"self", "messages", "raise_exception", "strftime_now", *DEFAULT_NAMESPACE}.union(
    *(inspect.signature(f).parameters for f in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template))
)


def _check_variables(value: dict[str, Any]) -> dict[str, Any]:
    if reserved := RESERVED & value.keys():
        raise ValueError(f"{min(reserved)} is not a variable of the chat template")
    return value


def error_content(error: ApiError) -> Json:
    kind = "server_error" if error.status >= 500 else ERRORS.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def validated(validate: Callable[[Any], T], value: Any, where: str = "") -> T:
    """What pydantic makes of a value at this place of a body. An ApiError names the place within it and the reason, which in a
    field of several types is that of the type that was sent, or else names all of them.
    """

    def place(error: Any) -> list[Any]:
        return [x for x in error["loc"] if isinstance(x, int) or (x.isidentifier() and x not in TYPES)]

    def rank(error: Any) -> tuple[bool, int]:
        return not error["type"].endswith(("_type", "literal_error")), len(place(error))

    try:
        return validate(value)
    except ValidationError as e:
        errors = e.errors(include_url=False, include_context=False, include_input=False)
        error = max(errors, key=rank)
        reasons = [x["msg"] for x in errors if (rank(x), place(x)) == (rank(error), place(error))]
        reason = " or ".join(dict.fromkeys(reasons)).replace(" or Input should be ", " or ")
        where += "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in place(error))
        where = where.removeprefix(".")
        raise error_at(where, f"{where}: {reason}."[:500]) from e


class Part(BaseModel):
    """A part of a body. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Call(Part):
    """A tool of chat completions, or a call in a message. A custom one has other fields."""

    id: Any = None
    type: Any = "function"
    function: Json | None = None
    custom: Json | None = None


class Item(Part):
    """A message or an item of a conversation. ``History`` reads its further fields."""

    model_config = Part.model_config | {"extra": "allow"}

    type: str | None = None
    role: str | None = None
    content: str | Many[Json] | Json | None = None
    tool_calls: Many[Call] | None = None
    function_call: Json | None = None


class Tool(Part):
    """A tool of Anthropic's API and of Responses."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: Json | None = None
    input_examples: Many[Json] = []
    parameters: Json | None = None
    strict: bool | None = None
    tools: "Many[Tool] | None" = None  # the tools of a namespace
    format: Json | None = None  # of the input of a custom tool

    def check(self, where: str) -> None:
        """Raise an ApiError if the client runs this tool and its calls are of a type that no function has."""
        if self.type and OF_CLIENTS.match(self.type):
            raise error_at(where, f"{where}: {self.type[:50]} is not supported: send a function with its parameters.")


class OutputSettings(Part):
    """The fields of ``stream_options`` and ``output_config``."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's
    include_sources: bool = False
    effort: Effort | None = None
    format: Any = None


class ThinkingSettings(Part):
    """The fields of ``thinking`` and ``reasoning``."""

    type: Literal["enabled", "adaptive", "disabled"] | None = None
    enabled: bool | None = None
    effort: Effort | None = None
    budget_tokens: Budget | None = None
    max_tokens: Budget | None = None
    exclude: Literal[False] | None = None
    summary: str | None = None


TYPES = ("str", "int", "float", "bool", "none", "dict", "list")  # pydantic puts them between the names of fields
SHORT = {bool: "enabled", str: "effort"}  # the fields that are also the value of a switch by themselves
Switch = Annotated[ThinkingSettings, BeforeValidator(lambda x: {SHORT[type(x)]: x} if type(x) in SHORT else x)]


def _sampling_field(parameter: Any) -> Any:
    low, high = parameter.metadata["requested"]
    return (
        Annotated[
            parameter.type,
            Ge(low),
            Le(high),
            *([WHOLE] if parameter.type is int else []),
            AfterValidator(lambda x: max(x, 0)),
        ]
        | None
    )


SAMPLING_FIELDS: dict[str, Any] = {p.name: (_sampling_field(p), None) for p in PARAMETERS.values()}
SamplingFields: Any = create_model("SamplingFields", __base__=Part, **SAMPLING_FIELDS)


class Body(SamplingFields, Part):
    """The fields of all APIs, including the fields of mlx-lm and of this package."""

    NEEDED: ClassVar[str]  # the required field
    UNUSED: ClassVar[tuple[str, ...]] = ()  # the fields below that this API does not have
    LIMITS: ClassVar[tuple[str, ...]]  # the fields for the maximum number of tokens; the first one that is set counts
    CLAMPS: ClassVar[bool] = False  # whether a limit beyond the context means the rest of the context
    writer: ClassVar[Any]  # the ``Writer`` of answers
    error_content: ClassVar[Callable[[ApiError], Json]] = error_content

    model: str = "default_model"
    stream: bool = False
    stream_options: OutputSettings = OutputSettings()
    repetition_penalty: Annotated[float, Ge(0), Le(100)] = 0.0
    repetition_context_size: Natural = 20
    presence_penalty: Penalty = 0.0
    presence_context_size: Natural | None = None
    frequency_penalty: Penalty = 0.0
    frequency_context_size: Natural | None = None
    logit_bias: Annotated[dict[Token, Penalty], at_most(MAX_BIASES)] | None = None
    min_tokens: Natural = 0  # vLLM's
    ignore_eos: bool = False
    stop_token_ids: Annotated[Many[Natural], Field(max_length=64)] = []
    seed: Annotated[int, Ge(-(2**63)), Le(2**64 - 1), WHOLE] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None  # vLLM's
    enable_thinking: bool | None = None
    thinking: Switch | None = None
    reasoning: Switch | None = None  # OpenRouter's and that of Responses
    think: Switch | None = None  # Ollama's
    reasoning_effort: Effort | None = None
    output_config: OutputSettings = OutputSettings()
    thinking_budget: Budget | None = None
    reasoning_budget: Budget | None = None  # llama.cpp's
    thinking_token_budget: Budget | None = None  # vLLM's
    chat_template_kwargs: Annotated[Variables, at_most(32), AfterValidator(_check_variables)] | None = None
    stop_words: Stop = Field([], alias="stop")
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    num_draft_tokens: Literal["auto"] | Annotated[int, Ge(0), Le(MAX_DRAFT_TOKENS), WHOLE] | None = None
    copy_drafts: Literal["auto", "off"] | Annotated[int, Ge(1), Le(MAX_COPY_TOKENS), WHOLE] | None = None

    @property
    def reasoning_wanted(self) -> tuple[bool | None, str | None, int | None]:
        """Whether to think, the effort, and the most reasoning tokens; ``None`` for what no field says."""
        switches = [switch for switch in (self.thinking, self.reasoning, self.think) if switch is not None]
        enabled = [x.enabled if x.type is None else x.type != "disabled" for x in switches] + [self.enable_thinking]
        effort = _first([self.reasoning_effort, *(switch.effort for switch in switches), self.output_config.effort])
        budgets = [budget for switch in switches for budget in (switch.budget_tokens, switch.max_tokens)]
        budget = _first([*budgets, self.thinking_budget, self.reasoning_budget, self.thinking_token_budget])
        budget = None if budget == NO_LIMIT else budget
        implied = [None if effort is None else effort not in NO_THINKING, None if budget is None else budget > 0]
        return _first([*enabled, *implied]), effort, budget

    @property
    def top(self) -> int | None:
        """The number of likely tokens to report for each token; ``None``: no log probabilities."""
        return None

    @property
    def prompts(self) -> list[Any]:
        """The prompts of texts; a chat has one, which is not a text yet."""
        return [""]

    @property
    def outputs(self) -> list[StructuredOutput | None]:
        """The structured outputs of the API's fields: one at most."""
        return []

    @property
    def one_call(self) -> bool:
        return not self.parallel_tool_calls

    def conversation(self, content: Json) -> tuple[History, list[Json]]:
        """The history, and the tools in OpenAI's format."""
        raise NotImplementedError

    @classmethod
    def read_request(cls, content: Json, flags: Any) -> tuple[Self, Request]:
        """Make a request of the fields of a body; an ApiError if a field is wrong, or fields cannot be combined."""
        if isinstance(variables := content.get("chat_template_kwargs"), dict):  # some clients send these fields there
            given = {name: variables[name] for name in SWITCHES if name in variables}
            content = content | {name: x for name, x in given.items() if name != VARIABLE or x in get_args(Effort)}
        for name, (harmless, fix) in REFUSED.items():
            is_known = name in cls.model_fields and name not in cls.UNUSED
            if name in content and not is_known and content[name] not in harmless:
                value = json.dumps(content[name])[:100]
                raise ApiError(400, f"{name}: {value} is not supported: {fix}.", param=name)
        body = validated(cls.model_validate, content)
        if not body.stream and body.stream_options != OutputSettings():
            raise ApiError(400, "stream_options requires stream: true.", param="stream_options")
        request = body.to_request(content)
        body.set_arguments(request, flags)
        return body, request

    def to_request(self, content: Json) -> Request:
        history, all_tools = self.conversation(content)
        messages, images, askers = history.finish()
        output, tools = from_fields(self.outputs, self.tool_choice, all_tools)
        request = Request("chat", "", messages, images=images, askers=askers, param=self.NEEDED)
        request.structured_output = output
        request.one_call = self.one_call
        if tools:
            request.tools = tools
            request.shown_tools = all_tools
        if self.add_generation_prompt is self.continue_final_message:
            message = "add_generation_prompt must be the opposite of continue_final_message."
            raise ApiError(400, message, param="add_generation_prompt")
        if self.continue_final_message and request.begun is None:
            message = "continue_final_message requires a last message of the assistant, with text and without calls."
            raise ApiError(400, message, param="continue_final_message")
        if request.begun == "content" and output is not None and output.is_required:
            message = "cannot be combined with a last message of the assistant, which the answer continues."
            raise ApiError(400, f"{output.param} {message}", param=output.param)
        return request

    def set_arguments(self, request: Request, flags: Any) -> None:
        """Set the arguments of a request: the values of the body, or of the server's flags, as mlx-lm's ``do_POST``."""
        limits = [(name, limit) for name in self.LIMITS if (limit := getattr(self, name)) is not None]
        field, limit = next(iter(limits), (None, flags.max_tokens))
        request.limit = None if self.CLAMPS or limit == NO_LIMIT else field
        request.copy_drafts = flags.copy_drafts if self.copy_drafts is None else self.copy_drafts
        request.min_tokens = NEVER if self.ignore_eos else self.min_tokens
        request.stop_token_ids = self.stop_token_ids
        request.streams = self.stream
        thinks, request.effort, request.budget = self.reasoning_wanted
        variables: Json = {} if thinks is None else {"enable_thinking": thinks}
        if thinks and request.effort is not None:
            variables[VARIABLE] = request.effort
        if request.min_tokens > 0 and request.structured_output is not None:
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise ApiError(400, f"{name} cannot be combined with structured output, which may end before.", param=name)
        request.args = stock.GenerationArguments(
            model=self.model,
            sampling={name: x for name in SAMPLING_FIELDS if (x := getattr(self, name)) is not None},
            logits=stock.LogitsProcessorArguments(
                **{field.name: getattr(self, field.name) for field in fields(stock.LogitsProcessorArguments)}
            ),
            stop_words=self.stop_words,
            max_tokens=limit,
            num_draft_tokens=flags.num_draft_tokens if self.num_draft_tokens is None else self.num_draft_tokens,
            seed=None if self.seed is None else self.seed % 2**64,
            chat_template_kwargs=variables | (self.chat_template_kwargs or {}),
            logprobs=self.top is not None,
            top_logprobs=self.top or 0,
        )


def _first(values: Sequence[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def function_tool(tool: Tool, name: str | None, parameters: Json | None) -> Json:
    if name is None:
        raise ApiError(400, "tools: a tool has no name.", param="tools")
    schema = (parameters or {"type": "object"}) | ({"examples": tool.input_examples} if tool.input_examples else {})
    function = {"name": name, "description": tool.description or "", "parameters": schema}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


class Usage:
    def __init__(self, choices: list[Request], drafts: bool):
        first = choices[:: choices[0].n]  # the first answer to each prompt
        self.n_prompt = sum(request.n_prompt for request in first)
        self.n_cached = sum(request.n_cached for request in first)
        self.n_generated = sum(request.n_tokens for request in choices)
        self.n_accepted = sum(request.n_accepted for request in choices)  # drafts among these tokens
        self.n_reasoning = sum(request.n_reasoning for request in choices)
        self.drafts = [request.counts for request in choices] if drafts else None  # None if the server does not draft


class Writer:
    """Writes an answer as a stream of bytes or as a whole: blocks, such as texts and calls, the last of which may be open."""

    finish_reason: str | None = None
    stop_word: str | None = None  # that ended the text
    usage: Callable[[], Usage]  # so far
    # Of each API: pieces of a stream, but for the block of a call, and the whole answer once its blocks are closed.
    say: Callable[[Any], bytes]  # of a Text or Reasoning
    call: Callable[[CallBegins], Json]
    arguments: Callable[[CallArguments], bytes]
    opened: Callable[[Json], bytes]  # the beginning of a block
    closed: Callable[[Json], bytes]  # its end, once it is complete
    message: Callable[[Usage], Json]
    loading: Callable[[], bytes]  # the first event of a stream whose model has to be loaded
    end: Callable[[Usage], bytes]
    failed: Callable[[ApiError], bytes]

    def __init__(self, body: Any):
        self.body = body
        self.blocks: list[Json] = []  # the answer so far
        self.is_open = False  # whether the last block is open
        self.written = ""  # the arguments of the last call so far

    def begin(self, usage: Usage) -> bytes:
        return b""

    def waiting(self, n_read: int, n_prompt: int) -> bytes:
        return f": keepalive {n_read}/{n_prompt}\n\n".encode()

    def add(self, step: Delta, choice: int = 0) -> bytes:
        """The part of a stream for a step; ``choice`` is the index of the answer, in APIs with several."""
        self.finish_reason = step.finish_reason or self.finish_reason
        self.stop_word = step.stop_word
        return b"".join(map(self._add, step.events))

    def _add(self, e: Any) -> bytes:
        if isinstance(e, Text | Reasoning):
            return self.say(e)
        if isinstance(e, CallBegins):
            self.written = ""
            return self.open(self.call(e))
        if isinstance(e, CallArguments):
            self.written += e.text
            return self.arguments(e)
        return self.close()

    def open(self, block: Json) -> bytes:
        closed = self.close()
        self.blocks.append(block)
        self.is_open = True
        return closed + self.opened(block)

    def has_open(self, kind: str) -> bool:
        return self.is_open and self.blocks[-1]["type"] == kind

    def close(self) -> bytes:
        was_open = self.is_open
        self.is_open = False
        return self.closed(self.blocks[-1]) if was_open else b""

    def whole(self, usage: Usage) -> Json:
        self.close()
        return self.message(usage)


def event(data: Json, name: str | None = None) -> bytes:
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
