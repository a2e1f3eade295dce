"""Anthropic's API, ``/v1/messages`` and ``/v1/messages/count_tokens``."""

import re
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ...text.answer import Reasoning
from ...text.schema import Json
from ...text.tool_calls import CallArguments, CallBegins, Text
from ..request import LOADING, ApiError, StructuredOutput
from ..structured_output import from_response_format
from . import common
from .common import Body, Item, Limit, Many, Part, Stop, Tool, Usage, Writer, event
from .history import SYSTEM, History, arguments_of, error_at, parts_of

SIGNATURE = "mlx_mtp"  # of thinking blocks: clients drop a block without one, and nothing checks it
# Claude Code's, in the system prompt: it changes with every request, so no prompt would find its prefix in the prompt cache.
BILLING = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)
ERRORS = {**common.ERRORS, 413: "request_too_large", 503: "overloaded_error"}
ROLES = ("user", "assistant", *SYSTEM)
# With these, the clients' runners of tools send the whole conversation again.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": []}
OF_MCP = ("mcp_tool_reference", "mcp_toolset_reference")
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def error_content(error: ApiError) -> Json:
    kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if error.too_long is not None:  # Claude Code reads the numbers, and summarizes the conversation
        message = "prompt is too long: {} tokens > {} maximum".format(*error.too_long)
    details = {"details": NO_THREADS} if error.param == "thread" else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


class MessagesWriter(Writer):
    def __init__(self, body: "MessagesBody"):
        super().__init__(body)
        self.id = common.new_id("msg")

    def begin(self, usage: Usage) -> bytes:
        message = self.message(usage) | {"content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=message)

    def waiting(self, n_read: int, n_prompt: int) -> bytes:
        return _event("ping")

    def loading(self) -> bytes:
        return _event("ping", status=LOADING)

    def say(self, piece: Text | Reasoning) -> bytes:
        """Add text to the last block, or begin one. The text is in the field named like the type."""
        kind, more = ("text", {}) if isinstance(piece, Text) else ("thinking", {"signature": ""})
        begun = b"" if self.has_open(kind) else self.open({"type": kind, kind: "", **more})
        self.blocks[-1][kind] += piece.text
        return begun + self._delta({"type": f"{kind}_delta", kind: piece.text})

    def call(self, call: CallBegins) -> Json:
        return {"type": "tool_use", "id": common.new_id("toolu"), "name": call.name, "input": {}}

    def arguments(self, piece: CallArguments) -> bytes:
        return self._delta({"type": "input_json_delta", "partial_json": piece.text})

    def opened(self, block: Json) -> bytes:
        return _event("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def closed(self, block: Json) -> bytes:
        signed = b""
        if block["type"] == "tool_use":
            block["input"] = arguments_of(self.written)
        elif block["type"] == "thinking":
            block["signature"] = SIGNATURE
            signed = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        return signed + _event("content_block_stop", index=len(self.blocks) - 1)

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
                "output_tokens_details": {"thinking_tokens": usage.n_reasoning},
            },
        }


class Change(Part):
    """The tool of a block that adds or removes one, by its name or its definition."""

    type: str | None = None
    name: str | None = None
    definition: Tool | None = None


class MessagesBody(Body):
    NEEDED: ClassVar = "messages"
    writer: ClassVar = MessagesWriter
    error_content: ClassVar = error_content
    LIMITS: ClassVar = ("max_tokens",)
    CLAMPS: ClassVar = True
    max_tokens: Limit | None = None
    system: str | Many[Json] | None = None
    messages: Annotated[Many[Item], Field(min_length=1)]
    tools: Many[Tool] | None = None
    tool_choice: Json = Field(default_factory=lambda: {"type": "auto"})
    output_format: Any = None
    stop_words: Stop = Field([], alias="stop_sequences")

    @property
    def outputs(self) -> list[StructuredOutput | None]:
        formats = {"output_config.format": self.output_config.format, "output_format": self.output_format}
        return [from_response_format(value, name) for name, value in formats.items()]

    @property
    def one_call(self) -> bool:
        return bool(self.tool_choice.get("disable_parallel_tool_use"))

    def conversation(self, content: Json) -> tuple[History, list[Json]]:
        history = History(between="\n")
        for where, block in parts_of(self.system, "system"):
            text = block if isinstance(block, str) else block.get("text")
            part = block if not isinstance(text, str) else BILLING.sub("", text).strip()
            history.add({"role": "system", "content": part}, where, within="")
        asked = max((i for i, message in enumerate(content["messages"]) if message.get("role") == "user"), default=-1)
        for i, message in enumerate(content["messages"]):
            where = f"messages[{i}]"
            if message.get("role") not in ROLES:
                raise error_at(where, f"{where}.role: Input should be {', '.join(ROLES)}.")
            if message.get("output_config"):
                raise error_at(where, f"{where}.output_config is not supported: send output_config with the request.")
            if message.get("clear_at") != "next_user_message" or i > asked:
                history.add(message, where)
        offered = self._changed_tools(history)
        ours = [tool for tool in offered if tool.type in (None, "custom")]
        return history, [common.function_tool(tool, tool.name, tool.input_schema) for tool in ours]

    def _changed_tools(self, history: History) -> list[Tool]:
        """The tools of the request as the conversation changes them: by blocks that define, name or remove one."""
        known = {tool.name: tool for tool in self.tools or []}
        offered = known.copy()
        for tool in self.tools or []:
            tool.check("tools")
        for where, block in history.changes:
            change = common.validated(Change.model_validate, block.get("tool"), f"{where}.tool")
            added = change.definition or known.get(change.name)
            if change.type in OF_MCP:  # whose names are others than those of the request's tools
                raise error_at(where, f"{where}: {change.type} is not supported: let the client call the tools.")
            if block["type"] == "tool_removal":
                offered.pop(change.name, None)
            elif added is None:
                raise error_at(
                    where, f"{where}: the request defines no tool {str(change.name)[:50]!r}: define it here."
                )
            else:
                added.check(where)
                known[added.name] = offered[added.name] = added
        return [*offered.values()]
