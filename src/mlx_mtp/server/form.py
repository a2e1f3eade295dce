"""The form that a request asks of its answer: ``response_format``, and a ``tool_choice`` that requires a call."""

import json
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools, qwen3_coder

from ..decoding.grammar import Grammar, make_grammar
from .request import ApiError, Form, Request

Json = dict[str, Any]
NEWLINE = "\n"  # for Python 3.11, whose f-strings take no backslash
VALUE = r'value[suffix="\n</parameter>\n"]: /(.|\n)*/'  # of a string, up to what ends it
_quote = json.dumps  # of a string in Lark


def form_of(value: Any, param: str) -> Form | None:
    """
    Args:
        value (Any): OpenAI's ``response_format``, or ``text.format`` of Responses.
        param (str): The field.

    Raises:
        ApiError: It is none of ``text``, ``json_object`` and ``json_schema``.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return Form(param, {"json_schema": {"type": "object"}})
    inner = value.get("json_schema", value) if kind == "json_schema" else None
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(400, f"{param} must be text, json_object or json_schema with a schema.", param=param)
    return Form(param, {"json_schema": schema})


def the_only(*asked: Form | None) -> Form | None:
    """
    Raises:
        ApiError: More than one form is asked for.
    """
    forms = [form for form in asked if form is not None]
    if len(forms) > 1:
        first, second, *_ = (form.param for form in forms)
        raise ApiError(400, f"{second} does not go with {first}: send one of them.", param=second)
    return forms[0] if forms else None


def form_of_choice(choice: Any, tools: list[Json]) -> Form | None:
    """
    Args:
        choice (Any): A ``tool_choice`` of any API: ``auto``, ``none``, or ``required`` (``any``), or the name of a tool.
        tools (List[Dict[str, Any]]): In OpenAI's form.

    Raises:
        ApiError: It is none of these, or there is no such tool.
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in ("auto", "none"):
        return None
    if kind in ("required", "any"):
        return _form_of_calls(None, tools)
    name = {**choice, **choice.get("function", {})}.get("name") if kind in ("function", "tool", "custom") else None
    if not isinstance(name, str):
        raise ApiError(400, "tool_choice must be auto, none, required or a tool by its name.", param="tool_choice")
    return _form_of_calls(name, tools)


def _form_of_calls(name: str | None, tools: list[Json]) -> Form:
    """Calls of the tool of this name; ``None`` means any."""
    functions = [tool["function"] for tool in tools if isinstance(tool["function"].get("name"), str)]
    calls = functions if name is None else [f for f in functions if f["name"] == name]
    if not calls:
        missing = "the request has no tools" if name is None else f"there is no tool {name[:50]!r}"
        raise ApiError(400, f"tool_choice requires a call, but {missing}.", param="tool_choice")
    return Form("tool_choice", calls=calls)


def make_form(tokenizer: TokenizerWrapper, request: Request, in_reasoning: bool) -> list[Grammar]:
    """The logits processor of a request's form, if it has one; it begins behind the reasoning.

    Raises:
        ApiError: The grammar cannot be read, or the model's calls cannot be forced.
    """
    form = request.form
    if form is None:
        return []
    after = tokenizer.think_end if in_reasoning else ""
    try:
        grammar = {"lark": _calls(tokenizer, form.calls)} if form.calls else form.grammar
        return [make_grammar(tokenizer, **grammar, after=after)]
    except ValueError as e:
        raise ApiError(400, f"{form.param}: {e}", param=form.param) from e


def _calls(tokenizer: TokenizerWrapper, tools: list[Json]) -> str:
    """A grammar in Lark: one call of these tools after the other, as the model's template writes them."""
    write = {qwen3_coder.parse_tool_call: _xml_call, json_tools.parse_tool_call: _json_call}.get(tokenizer.tool_parser)
    if write is None:
        raise ValueError("the calls of this model cannot be required: leave it out")
    rules = [f"call_{i}: {write(tool['name'], tool.get('parameters') or {})}" for i, tool in enumerate(tools)]
    names = " | ".join(f"call_{i}" for i in range(len(tools)))
    return "\n".join([r"start: /\n{0,2}/ call (/\n{0,2}/ call)* /\n?/", f"call: {names}", VALUE, *rules])


def _xml_call(name: str, schema: Json) -> str:
    """As Qwen3-Coder and Qwen3.5 write them: each value on lines of its own, strings without quotes."""
    required, parts = schema.get("required", []), []
    for key, of_value in schema.get("properties", {}).items():
        part = f"{_quote(f'<parameter={key}>{NEWLINE}')} {_xml_value(of_value)}"
        parts.append(part if key in required else f"({part})?")
    opening, end = f"<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"
    return " ".join([_quote(opening), *parts, _quote(end)])


def _xml_value(schema: Any) -> str:
    """A text where the value may be a string, or the schema does not say; else JSON."""
    end = "\n</parameter>\n"
    types = schema.get("type") if isinstance(schema, dict) else None
    if types is not None and "string" not in types:  # a name, or a list of names
        return f"%json {json.dumps(schema)} {_quote(end)}"
    if types == "string" and (choices := schema.get("enum")):
        return f"({' | '.join(_quote(f'{choice}{end}') for choice in choices)})"
    return "value"


def _json_call(name: str, schema: Json) -> str:
    """As Qwen3-Next writes them."""
    opening = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": '
    arguments = json.dumps({"type": "object", **schema})
    return f"{_quote(opening)} %json {arguments} {_quote('}' + NEWLINE + '</tool_call>')}"
