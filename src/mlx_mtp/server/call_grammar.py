"""The grammar of tool calls in Lark, as the chat templates of Qwen write them; see ``tool_calls``."""

import json
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools, qwen3_coder

from .request import Form
from .tool_calls import END, START
from .values import ANY, DEPTH, Types

Json = dict[str, Any]
NEWLINE = "\n"  # for Python 3.11, whose f-strings take no backslash
CALLS = r"calls: call (/\n{0,2}/ call)* /\n?/"
END_OF_VALUE = r'end_of_value[suffix="\n</parameter>\n"]: /(.|\n)*/'
ANY_PARAMETERS = r'("<parameter=" /[^\n<>]{1,256}/ ">\n" value)*'
_quote = json.dumps  # of a string in Lark


def calls_in_lark(tokenizer: TokenizerWrapper, form: Form) -> str:
    """One call of the form's tools after the other.

    Raises:
        ValueError: The model writes its calls in another way.
    """
    write = {qwen3_coder.parse_tool_call: _xml_call, json_tools.parse_tool_call: _json_call}.get(tokenizer.tool_parser)
    if write is None:
        raise ValueError("no grammar describes the calls of this model: leave it out")
    begin, end = _mark(tokenizer, START), _mark(tokenizer, END)
    rules = []
    for i, tool in enumerate(form.calls):
        is_exact = form.is_required or tool.get("strict") is True
        call = write(tool["name"], (tool.get("parameters") or {}) if is_exact else None)
        rules.append(f"call_{i}: {begin} {call} {end}")
    names = " | ".join(f"call_{i}" for i in range(len(rules)))
    start = r"/\n{0,2}/ calls" if form.is_required else "calls"
    return "\n".join([f"start: {start}", CALLS, f"call: {names}", _string_value(tokenizer), END_OF_VALUE, *rules])


def _string_value(tokenizer: TokenizerWrapper) -> str:
    """Any text up to what ends it, with the tokens that llguidance takes for no text: a file may quote the template's marks."""
    marks = sorted(token for token, added in tokenizer.added_tokens_decoder.items() if not added.special)
    return f"value: (/(.|\\n)*/ <[{','.join(map(str, marks))}]>)* end_of_value" if marks else "value: end_of_value"


def _mark(tokenizer: TokenizerWrapper, text: str) -> str:
    """A mark of the template in Lark. One that is a token of its own is no text to llguidance."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return f"<[{tokens[0]}]>" if len(tokens) == 1 else _quote(text)


def _xml_call(name: str, schema: Json | None) -> str:
    """As Qwen3-Coder and Qwen3.5 write them: each value on lines of its own, strings without quotes. No schema: any."""
    opening, end = f"\n<function={name}>\n", "</function>\n"
    if schema is None:
        return f"{_quote(opening)} {ANY_PARAMETERS} {_quote(end)}"
    types, required, parts = Types(schema), schema.get("required", []), []
    for key, of_value in schema.get("properties", {}).items():
        part = f"{_quote(f'<parameter={key}>{NEWLINE}')} {_xml_value(of_value, types, DEPTH)}"
        parts.append(part if key in required else f"({part})?")
    return " ".join([_quote(opening), *parts, _quote(end)])


def _xml_value(schema: Any, types: Types, depth: int) -> str:
    """A text where the value may be a string, with nothing but its choices checked; else JSON."""
    end = "\n</parameter>\n"
    while isinstance(schema, dict) and "$ref" in schema and depth > 0:
        schema, depth = types.target(schema["$ref"]), depth - 1
    if "string" not in (allowed := types.of_schema(schema)):
        others = {name: types.schema[name] for name in ("$defs", "definitions") if name in types.schema}
        return f"%json {json.dumps({**others, **schema})} {_quote(end)}"
    if depth == 0 or allowed == ANY:
        return "value"
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return f"({' | '.join(_xml_value(option, types, depth - 1) for option in options)})"
    if choices := schema.get("enum") or [schema[name] for name in ("const",) if name in schema]:
        texts = (choice if isinstance(choice, str) else json.dumps(choice) for choice in choices)
        return f"({' | '.join(_quote(f'{text}{end}') for text in texts)})"
    return "value"


def _json_call(name: str, schema: Json | None) -> str:
    """As Qwen3-Next writes them."""
    opening = f'\n{{"name": {json.dumps(name)}, "arguments": '
    arguments = json.dumps({"type": "object", **(schema or {})})
    return f"{_quote(opening)} %json {arguments} {_quote('}' + NEWLINE)}"
