"""Anthropic's API, ``/v1/messages`` and ``/v1/messages/count_tokens``.

Ignored, since the answer does not depend on them: ``metadata``, ``cache_control``, ``context_management``, ``service_tier``,
``container``, and tools that Anthropic's own servers would run. Claude Code's ``x-anthropic-billing-header``, a block of the
system prompt, is removed: it changes with every request, so no prompt would find its prefix in the prompt cache.
"""

import re
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ...text.answer import Reasoning
from ...text.schema import Json
from ...text.tool_calls import CallArguments, CallBegins, Text
from ..request import LOADING, ApiError, Delta, StructuredOutput, Thinking
from ..structured_output import from_response_format
from . import common
from .common import Body, Item, Many, Positive, Settings, Stop, Tool, Usage, Writer, event

SIGNATURE = "mlx_mtp"  # of thinking blocks: clients drop a block without one, and nothing checks it
BILLING = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)
ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
ROLES = ("user", "assistant", *common.SYSTEM)
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def error_content(error: ApiError) -> Json:
    kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessagesWriter(Writer):
    def __init__(self, body: "MessagesBody"):
        super().__init__(body)
        self.input = ""  # the input of the last call, as text
        self.stop_word: str | None = None
        self.id = common.new_id("msg")

    def begin(self, usage: Usage) -> bytes:
        message = self.message(usage) | {"content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=message)

    def waiting(self, n_read: int, n_prompt: int) -> bytes:
        return _event("ping")

    def loading(self) -> bytes:
        return _event("ping", status=LOADING)

    def add(self, step: Delta, choice: int = 0) -> bytes:
        self.stop_word = step.stop_word
        return super().add(step, choice)

    def text(self, piece: Text) -> bytes:
        return self._extend({"type": "text", "text": ""}, "text_delta", piece.text)

    def reasoning(self, piece: Reasoning) -> bytes:
        return self._extend({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", piece.text)

    def call(self, call: CallBegins) -> Json:
        self.input = ""
        return {"type": "tool_use", "id": common.new_id("toolu"), "name": call.name, "input": {}}

    def arguments(self, piece: CallArguments) -> bytes:
        self.input += piece.text
        return self._delta({"type": "input_json_delta", "partial_json": piece.text})

    def opened(self, block: Json) -> bytes:
        return _event("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def closed(self, block: Json) -> bytes:
        signed = b""
        if block["type"] == "tool_use":
            block["input"] = common.arguments_of(self.input)
        elif block["type"] == "thinking":
            block["signature"] = SIGNATURE
            signed = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        return signed + _event("content_block_stop", index=len(self.blocks) - 1)

    def _extend(self, block: Json, kind: str, text: str) -> bytes:
        """Add text to the last block, or begin this block. The text is in the field named like the type."""
        field = block["type"]
        begun = b"" if self.has_open(field) else self.open(block)
        self.blocks[-1][field] += text
        return begun + self._delta({"type": kind, field: text})

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=len(self.blocks) - 1, delta=delta)

    def end(self, usage: Usage) -> bytes:
        closed = self.close()
        message = self.message(usage)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        return closed + _event("message_delta", delta=delta, usage=message["usage"]) + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return event(error_content(error), "error")

    def message(self, usage: Usage) -> Json:
        reason = STOP_REASONS.get(self.finish_reason or "", "end_turn" if self.stop_word is None else "stop_sequence")
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": self.blocks,
            "stop_reason": reason,
            "stop_sequence": self.stop_word if reason == "stop_sequence" else None,
            "usage": {
                "input_tokens": usage.n_prompt - usage.n_cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.n_cached,
                "output_tokens": usage.n_generated,
            },
        }


class MessagesBody(Body):
    NEEDED: ClassVar = "messages"
    writer: ClassVar = MessagesWriter
    error_content: ClassVar = error_content
    LIMITS: ClassVar = ("max_tokens",)
    max_tokens: Positive | None = None
    system: str | Many[Item] | None = None
    messages: Annotated[Many[Item], Field(min_length=1)]
    tools: Many[Tool] | None = None
    tool_choice: Json = Field(default_factory=lambda: {"type": "auto"})
    thinking: Settings | None = None
    output_config: Settings = Settings()
    output_format: Any = None
    stop_words: Stop = Field([], alias="stop_sequences")

    @property
    def thinking_wanted(self) -> Thinking:
        asked, effort = self.thinking, self.output_config.effort
        if asked is None:
            return Thinking(self.enable_thinking, effort, self.thinking_budget)
        if asked.type is None:
            raise ApiError(400, "thinking.type: Field required.", param="thinking")
        budget = self.thinking_budget if asked.budget_tokens is None else asked.budget_tokens
        return Thinking(asked.type != "disabled", effort, budget)

    @property
    def outputs(self) -> list[StructuredOutput | None]:
        formats = {"output_config.format": self.output_config.format, "output_format": self.output_format}
        return [from_response_format(value, name) for name, value in formats.items()]

    @property
    def one_call(self) -> bool:
        return bool(self.tool_choice.get("disable_parallel_tool_use"))

    def conversation(self, content: Json, images: list[str]) -> tuple[list[Json], list[Json]]:
        parts = [self.system] if isinstance(self.system, str) else [[block] for block in self.system or []]
        blocks = [BILLING.sub("", common.text_of(part, "system")).strip() for part in parts]
        system = "\n\n".join(block for block in blocks if block)
        messages = [{"role": "system", "content": system}] if system else []
        for i, message in enumerate(self.messages):
            if message.role not in ROLES or message.content is None:
                kind = f"{message.role} without content" if message.role in ROLES else message.role
                raise common.unsupported(kind, f"messages[{i}]", f"send content as {', '.join(ROLES)}")
            _add_messages(messages, message, f"messages[{i}].content", images)
        ours = [tool for tool in self.tools or [] if tool.type in (None, "custom")]
        tools = ours if self.tool_choice.get("type") != "none" else []
        return messages, [common.function_tool(tool, tool.name, tool.input_schema) for tool in tools]


def _add_messages(messages: list[Json], message: Item, where: str, images: list[str]) -> None:
    """Add a message as those of a chat template: each tool result is a message of its own."""
    content = message.content
    blocks = [Item(type="text", text=content)] if isinstance(content, str) else content or []
    if message.role == "assistant":
        messages.append({"role": "assistant", "content": ""})
    n = len(messages)
    for block in blocks:
        if message.role == "assistant":
            _add_block(messages, block, where)
        elif block.type == "tool_result":
            result = common.text_of(block.content, where, images, between="\n")
            common.add_result(messages, block.tool_use_id, f"Error: {result}" if block.is_error else result)
        elif len(messages) > n and messages[-1]["role"] == message.role:
            messages[-1]["content"] += "\n" + common.text_of([block], where, images)
        else:
            messages.append({"role": message.role, "content": common.text_of([block], where, images)})


def _add_block(messages: list[Json], block: Item, where: str) -> None:
    if block.type == "thinking":
        common.add_reasoning(messages, block.thinking or "")
    elif block.type == "tool_use" and block.name is not None:
        common.add_call(messages, block.id, block.name, common.arguments_of(block.input))
    elif block.type != "redacted_thinking":
        common.assistant(messages)["content"] += common.text_of([block], where)
