"""OpenAI's Responses API, ``/v1/responses``: its bodies with all items of the conversation, and its answers."""

import base64
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr, TypeAdapter, ValidationError

from ...text.answer import Reasoning
from ...text.schema import Json
from ...text.tool_calls import CallArguments, CallBegins, Text
from ..request import NO_LIMIT, ApiError, Delta, StructuredOutput
from ..structured_output import LARK, from_response_format
from . import common
from .common import Body, Item, Limit, Many, Short, ThinkingSettings, Tool, Usage, Writer, event, new_id
from .completions import TopLogprobs, logprob_of
from .history import History, arguments_of, full_name
from .stored import RESPONSE

TOOLS = TypeAdapter(Many[Tool])
CANCELLED = "cancelled"  # why an answer ends whose client has gone: it is stored, and the client may refer to it
CUT = {"length": "incomplete", CANCELLED: CANCELLED}  # the status of a response by such reasons
SHOWN = ("instructions", "model", "parallel_tool_calls", "temperature", "tool_choice", "top_p")  # as they were sent


class ResponsesWriter(Writer):
    def __init__(self, body: "ResponsesBody"):
        super().__init__(body)
        self.tools = body.named_tools
        self.steps: list[Delta] = []  # kept for their log probabilities
        self.numbers = count()  # the numbers of events
        self.is_queued = False  # whether the response was created while its model was loaded
        self.id, self.created = RESPONSE + uuid.uuid4().hex, int(time.time())
        # Stores the input and the response
        self.keep: Callable[[list[Json], Json], None] = lambda items, response: None

    def loading(self) -> bytes:
        self.is_queued, response = True, self.message(None, "queued")
        return self._event("created", response=response) + self._event("queued", response=response)

    def begin(self, usage: Usage) -> bytes:
        response = self.message(None, "in_progress")
        created = b"" if self.is_queued else self._event("created", response=response)
        return created + self._event("in_progress", response=response)

    def add(self, step: Delta, choice: int = 0) -> bytes:
        if self.body.top is not None:
            self.steps.append(step)
        return super().add(step, choice)

    def say(self, piece: Text | Reasoning) -> bytes:
        """Add text to the only part of the last item, or begin an item."""
        item: Json
        if isinstance(piece, Text):
            item = {
                "type": "message",
                "id": _id_of(self, "msg"),
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            tokens = piece.tokens if self.body.top is not None else []
            fields: Json = {"logprobs": [logprob_of(self.steps[i]) for i in tokens]}
        else:
            item = {
                "type": "reasoning",
                "id": _id_of(self, "rs"),
                "status": "in_progress",
                "summary": [],
                "content": [],
            }
            part = {"type": "reasoning_text", "text": ""}
            fields = {}
        begun = b""
        if not self.has_open(item["type"]):
            begun = self.open(item) + self._part_event("content_part.added", part=part)
            self.blocks[-1]["content"] = [part]
        whole = self.blocks[-1]["content"][0]
        whole["text"] += piece.text
        for name, more in fields.items():
            whole[name] += more
        return begun + self._part_event(f"{part['type']}.delta", delta=piece.text, **fields)

    def call(self, call: CallBegins) -> Json:
        tool, space = self.tools.get(call.name, (Tool(type="function", name=call.name), None))
        is_custom = tool.type == "custom"
        kind, prefix = ("custom_tool_call", "ctc") if is_custom else ("function_call", "fc")
        item: Json = {"type": kind, "id": _id_of(self, prefix), "call_id": new_id("call"), "name": tool.name}
        item |= {"input" if is_custom else "arguments": "", "status": "in_progress"}
        return item if space is None else {**item, "namespace": space}

    def arguments(self, piece: CallArguments) -> bytes:
        if "input" in self.blocks[-1]:  # of a custom tool, known at the end
            return b""
        self.blocks[-1]["arguments"] = self.written
        return self._item_event("function_call_arguments.delta", delta=piece.text)

    def opened(self, item: Json) -> bytes:
        return self._event("output_item.added", output_index=len(self.blocks) - 1, item=item)

    def closed(self, item: Json) -> bytes:
        item["status"] = "incomplete" if self.finish_reason in CUT else "completed"
        if item["type"] == "function_call":
            done = self._item_event("function_call_arguments.done", arguments=self.written, name=item["name"])
        elif item["type"] == "custom_tool_call":
            # The arguments of a cut call end within the string.
            arguments = arguments_of(f'{self.written}"}}' if item["status"] == "incomplete" else self.written)
            item["input"] = text = str(arguments.get("input", ""))
            done = self._item_event("custom_tool_call_input.delta", delta=text)
            done += self._item_event("custom_tool_call_input.done", input=text)
        else:
            part = item["content"][0]
            fields: Json = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
            done = self._part_event(f"{part['type']}.done", text=part["text"], **fields)
            done += self._part_event("content_part.done", part=part)
            if part["type"] == "reasoning_text" and "reasoning.encrypted_content" in (self.body.include or []):
                # Clients such as Codex send it back, so that the next prompt has the reasoning.
                item["encrypted_content"] = base64.b64encode(part["text"].encode()).decode()
        return done + self._event("output_item.done", output_index=len(self.blocks) - 1, item=item)

    def _event(self, kind: str, **data: Any) -> bytes:
        name = f"response.{kind}"
        return event({"type": name, "sequence_number": next(self.numbers), **data}, name)

    def _item_event(self, kind: str, **data: Any) -> bytes:
        return self._event(kind, item_id=self.blocks[-1]["id"], output_index=len(self.blocks) - 1, **data)

    def _part_event(self, kind: str, **data: Any) -> bytes:
        """An event of an item's only part. Reasoning is its own summary, for clients that ask for one and show that alone."""
        told = self._item_event(kind, content_index=0, **data)
        item = self.blocks[-1]
        if item["type"] == "reasoning" and self.body.reasoning is not None and self.body.reasoning.summary is not None:
            if "part" in data:
                data["part"] = {**data["part"], "type": "summary_text"}
                item["summary"] = [data["part"]]
            told += self._item_event(f"reasoning_summary_{kind.partition('_')[2]}", summary_index=0, **data)
        return told

    def end(self, usage: Usage) -> bytes:
        self.finish_reason = self.finish_reason or CANCELLED
        closed = self.close()
        response = self.message(usage)
        return closed + self._event(response["status"], response=response)

    def failed(self, error: ApiError) -> bytes:
        response = self.message(None, "failed")
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        return self._event("failed", response={**response, "error": {"code": code, "message": error.message}})

    def message(self, usage: Usage | None, status: str | None = None) -> Json:
        body = self.body
        status = status or CUT.get(str(self.finish_reason), "completed")
        counts = usage and {
            "input_tokens": usage.n_prompt,
            "input_tokens_details": {"cached_tokens": usage.n_cached},
            "output_tokens": usage.n_generated,
            "output_tokens_details": {"reasoning_tokens": usage.n_reasoning},
            "total_tokens": usage.n_prompt + usage.n_generated,
        }
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **{name: getattr(body, name) for name in SHOWN},
            "max_output_tokens": None if body.max_output_tokens == NO_LIMIT else body.max_output_tokens,
            "output": self.blocks,
            "previous_response_id": body.previous_response_id,
            "reasoning": (body.reasoning or ThinkingSettings()).model_dump(include={"effort", "summary"}),
            "store": body.store,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "usage": counts,
            "metadata": body.metadata or {},
        }
        if usage is not None:
            self.keep(self.body._items, response)
        return response


def _id_of(writer: ResponsesWriter, prefix: str) -> str:
    """The id of a next item."""
    return f"{prefix}_{writer.id.removeprefix(RESPONSE)}{len(writer.blocks)}"


class ResponsesBody(Body):
    NEEDED: ClassVar = "input"
    writer: ClassVar = ResponsesWriter
    LIMITS: ClassVar = ("max_output_tokens",)
    input: str | Annotated[Many[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    tools: Many[Tool] | None = None
    text: Json | None = None
    include: Many[str] | None = None
    top_logprobs: TopLogprobs | None = None
    metadata: Annotated[dict[str, Short], Field(max_length=16)] | None = None
    store: bool = True
    previous_response_id: str | None = None
    _earlier: list[Json] = PrivateAttr([])  # the items of the stored conversation
    _items: list[Json] = PrivateAttr([])  # those of the input

    @property
    def top(self) -> int | None:
        is_asked = self.top_logprobs or "message.output_text.logprobs" in (self.include or [])
        return (self.top_logprobs or 0) if is_asked else None

    @property
    def named_tools(self) -> dict[str, tuple[Tool, str | None]]:
        """The client's tools and their namespaces, by their names in the prompt: those of the request, and those that were
        added in the conversation, by the client or as results of its tool search.
        """
        named = dict[str, tuple[Tool, str | None]]()
        tools = [*(self.tools or [])]
        for item in (*self._earlier, *self._items):
            if item.get("type") in ("additional_tools", "tool_search_output"):
                with suppress(ValidationError):
                    added = TOOLS.validate_python(item.get("tools"))
                    tools += [tool.model_copy(update={"strict": None}) for tool in added]
        for tool in tools:
            space = tool.name if tool.type == "namespace" else None
            for t in (tool.tools or []) if tool.type == "namespace" else [tool]:
                if t.type in (None, "function", "custom") and t.name is not None:
                    named[full_name(space, t.name)] = t, space
        return named

    @property
    def outputs(self) -> list[StructuredOutput | None]:
        return [from_response_format((self.text or {}).get("format"), "text.format")]

    def conversation(self, content: Json) -> tuple[History, list[Json]]:
        for tool in self.tools or []:
            tool.check("tools")
        history = History(joins=True)
        if self.instructions:
            history.add({"role": "system", "content": self.instructions}, "instructions")
        given = content["input"]
        self._earlier = content.get("earlier", [])
        self._items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        for item in self._earlier:
            history.add(item, "previous_response_id")
        for i, item in enumerate(self._items):
            history.add(item, f"input[{i}]")
        return history, [
            _custom_tool(t, name) if t.type == "custom" else common.function_tool(t, name, t.parameters)
            for name, (t, _) in self.named_tools.items()
        ]


def _custom_tool(tool: Tool, name: str) -> Json:
    """A function whose only parameter is the input. The prompt has its grammar in the schema."""
    form = tool.format or {}
    given = {"type": "string"}
    if form.get("type") == "grammar":
        syntax = form.get("syntax")
        definition = form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            message = f"tools: the grammar of {name[:50]} needs a syntax, lark or regex, and a definition."
            raise ApiError(400, message, param="tools")
        given |= {"pattern": f"^({definition})$"} if syntax == "regex" else {LARK: definition}
    parameters = {"type": "object", "properties": {"input": given}, "required": ["input"]}
    return common.function_tool(tool.model_copy(update={"strict": len(given) > 1}), name, parameters)
