"""The body of a request: its JSON, its schema, and limits on its size."""

import inspect
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import extend
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ..decoding.depth import MAX_COPY_TOKENS, MAX_DRAFT_TOKENS
from .request import ApiError

MAX_VALUES = 50_000  # in one body: the schema is checked value by value
MAX_ERRORS = 16  # of which the most relevant is reported
STRING: dict[str, Any] = {"type": "string"}
SHORT: dict[str, Any] = {"type": "string", "maxLength": 1000}
BOOLEAN: dict[str, Any] = {"type": "boolean"}
TEXT = {"anyOf": [STRING, {"type": "array", "items": {"$ref": "#/$defs/text_part"}}]}


def _number(minimum: float, maximum: float) -> dict[str, Any]:
    return {"type": "number", "minimum": minimum, "maximum": maximum}


def _integer(minimum: int, maximum: int = 2**31) -> dict[str, Any]:
    return {"type": "integer", "minimum": minimum, "maximum": maximum}


FIELDS: dict[str, Any] = {
    "model": STRING,
    "messages": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/message"}},
    "prompt": {"type": "string", "minLength": 1},
    "stream": BOOLEAN,
    "stream_options": {"type": "object", "properties": {"include_usage": BOOLEAN}},
    "max_tokens": _integer(1),
    "max_completion_tokens": _integer(1),
    "n": {"const": 1},
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "top_k": _integer(0),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0, 100),
    "repetition_context_size": _integer(0),
    "presence_penalty": _number(-100, 100),
    "presence_context_size": _integer(0),
    "frequency_penalty": _number(-100, 100),
    "frequency_context_size": _integer(0),
    "xtc_probability": _number(0, 1),
    "xtc_threshold": _number(0, 0.5),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": _number(-100, 100),
    },
    "logprobs": BOOLEAN,
    "top_logprobs": _integer(0, 11),
    "seed": _integer(0, 2**64 - 1),
    "stop": {"anyOf": [SHORT, {"type": "array", "items": SHORT, "maxItems": 64}]},
    "tools": {"type": "array", "items": {"$ref": "#/$defs/tool"}},
    # mlx-lm writes a role's prefix before each of its messages.
    "role_mapping": {"type": "object", "additionalProperties": SHORT},
    "chat_template_kwargs": {
        "type": "object",
        "maxProperties": 32,
        "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]{0,63}$"},
        "additionalProperties": {"anyOf": [BOOLEAN, _number(-(2**31), 2**31), SHORT, {"type": "null"}]},
    },
    "adapters": STRING,
    "draft_model": STRING,
    "num_draft_tokens": {"anyOf": [{"const": "auto"}, _integer(0, MAX_DRAFT_TOKENS)]},
    "copy_drafts": {"anyOf": [{"enum": ["auto", "off"]}, _integer(1, MAX_COPY_TOKENS)]},
}
# Fields of OpenAI's API that would have to change the answer, and do not: their values that change nothing, and what to do.
UNSUPPORTED: dict[str, tuple[Sequence[Any], str]] = {
    "response_format": ([{"type": "text"}], "describe the format in the prompt"),
    "tool_choice": (["auto", "none"], "leave it out, or send only the tools that may be called"),
    "enable_thinking": ([], 'send "chat_template_kwargs": {"enable_thinking": false} or true'),
    "reasoning_effort": ([], 'leave it out; "chat_template_kwargs": {"enable_thinking": false} ends thinking'),
    "functions": ([[]], "send tools"),
    "function_call": (["auto", "none"], "send tools"),
}
SCHEMA = {
    "type": "object",
    "properties": FIELDS,
    "$defs": {
        "text_part": {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": STRING},
            "required": ["type", "text"],
        },
        "message": {
            "type": "object",
            "properties": {
                "role": STRING,
                "content": {"anyOf": [*TEXT["anyOf"], {"type": "null"}]},
                "tool_calls": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/tool"}}, {"type": "null"}]},
            },
            "required": ["role"],
        },
        "tool": {"type": "object", "properties": {"function": {"type": "object"}}, "required": ["function"]},
    },
}
# To Python True is an integer, and to JSON Schema 1.0.
_CHECKER = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, x: type(x) is int)
BODY = extend(Draft202012Validator, type_checker=_CHECKER)(SCHEMA)

# What apply_chat_template and the renderer take for themselves: a request may set the template's own variables only.
RESERVED = {"self", "messages"}.union(
    *(inspect.signature(f).parameters for f in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template))
)


def parse(raw: bytes) -> dict[str, Any]:
    """The body of a request, checked, without the fields that are null.

    Raises:
        ApiError: What is wrong with it.
    """
    body = {name: value for name, value in _parse_json(raw).items() if value is not None}
    _check_values(body)
    _check_supported(body)
    error = best_match(islice(BODY.iter_errors(body), MAX_ERRORS))
    if error is not None:
        where = error.json_path.removeprefix("$.")
        param = str(error.absolute_path[0]) if error.absolute_path else None
        raise ApiError(400, f"{where}: {error.message}"[:500], param=param)
    if reserved := RESERVED & body.get("chat_template_kwargs", {}).keys():
        message = f"chat_template_kwargs: {min(reserved)} is not a variable of the chat template."
        raise ApiError(400, message, param="chat_template_kwargs")
    for name, value in body.items():
        if FIELDS.get(name, {}).get("type") == "number":
            body[name] = float(value)
    if "stream_options" in body:
        body["stream_options"] = {"include_usage": False, **body["stream_options"]}
    for message in body.get("messages", []):
        _read_calls(message)
    return body


def _check_supported(body: dict[str, Any]) -> None:
    """Refuse by name what is not supported, where it would otherwise be ignored."""
    for name, (harmless, fix) in UNSUPPORTED.items():
        if name in body and body[name] not in harmless:
            value = json.dumps(body[name])[:100]
            raise ApiError(400, f"{name}: {value} is not supported: {fix}.", param=name)
    if body.get("tool_choice") == "none":
        body.pop("tools", None)
    messages = body.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ApiError(
                    400, f"messages[{i}].content: {kind[:50]} is not supported: send text.", param="messages"
                )


def _read_calls(message: dict[str, Any]) -> None:
    """Give the chat template the calls of a message as it takes them: a list, if there is one, with arguments as objects."""
    calls = message.pop("tool_calls", None)
    if calls is not None:
        message["tool_calls"] = calls
    for call in calls or []:
        call["function"]["arguments"] = _arguments(call["function"].get("arguments"))


def _arguments(value: Any) -> dict[str, Any]:
    """The arguments of a call in a message, as an object. What is none, such as JSON that was cut, is kept as text."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            read = json.loads(value) if value.strip() else None
            json.dumps(read, ensure_ascii=False, allow_nan=False).encode()  # what a template can write
            value = read
    return value if isinstance(value, dict) else {} if value is None else {"arguments": value}


def _parse_json(raw: bytes) -> dict[str, Any]:
    def finite(text: str) -> float:
        if not math.isfinite(x := float(text)):
            raise ValueError(f"{text} is not a finite number")
        return x

    try:
        body = json.loads(raw, parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"Invalid JSON in request body: {e}") from e
    if not isinstance(body, dict):
        raise ApiError(400, "Request should be a JSON dictionary")
    return body


def _check_values(body: dict[str, Any]) -> None:
    """Refuse more values than a request needs, and strings that are not Unicode text."""
    n = 0
    for name, field in body.items():
        values = [name, field]
        while values:
            value = values.pop()
            if isinstance(value, str):
                try:
                    value.encode()
                except UnicodeEncodeError as e:
                    raise ApiError(400, f"{name!a} is not Unicode text: {e.reason}.", param=f"{name!a}"[1:-1]) from e
            elif isinstance(value, dict):
                values += [*value, *value.values()]
                n += len(value)
            elif isinstance(value, list):
                values += value
                n += len(value)
            if n > MAX_VALUES:
                raise ApiError(400, f"The body has more than {MAX_VALUES:,} values.", param=name)
