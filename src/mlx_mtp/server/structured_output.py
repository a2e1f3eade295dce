"""Structured output: ``response_format``, a ``tool_choice`` that requires a call, and strict tools."""

from functools import partial
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..text.answer import functions_of, start_of_calls, think_marks
from ..text.call_grammar import CallGrammar
from ..text.grammar import Grammar, in_deep_stack, make_grammar
from ..text.schema import Json
from .request import ApiError, Request, StructuredOutput


def from_response_format(value: Any, param: str) -> StructuredOutput | None:
    """The structured output of a field, OpenAI's ``response_format`` or ``text.format``: text, json_object or json_schema."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema", {"type": "object"})  # as in llama.cpp
        if not isinstance(schema, dict):
            raise ApiError(400, f"{param}.schema must be a JSON schema.", param=param)
        return StructuredOutput(param, {"json_schema": schema})
    inner = value.get("json_schema", value) if kind == "json_schema" else None
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(400, f"{param} must be text, json_object or json_schema with a schema.", param=param)
    return StructuredOutput(param, {"json_schema": schema})


def only_one(*asked: StructuredOutput | None) -> StructuredOutput | None:
    """The requested structured output; an ApiError if there are several."""
    outputs = [output for output in asked if output is not None]
    if len(outputs) > 1:
        first, second, *_ = (output.param for output in outputs)
        raise ApiError(400, f"{second} cannot be combined with {first}: send one of them.", param=second)
    return outputs[0] if outputs else None


def from_tool_choice(choice: Any, tools: list[Json]) -> StructuredOutput | None:
    """The structured output of a ``tool_choice`` of any API: ``auto``, ``none``, ``required`` (``any``), or the name of a tool.

    Args:
        tools (List[Dict[str, Any]]): The tools, in OpenAI's format.
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in ("auto", "none"):
        return None
    if kind in ("required", "any"):
        return _calls_of(None, tools)
    name = None
    if kind in ("function", "tool", "custom"):
        inner = choice.get("function", choice)
        name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        raise ApiError(400, "tool_choice must be auto, none, required or a tool by its name.", param="tool_choice")
    return _calls_of(name, tools)


def from_strict_tools(tools: list[Json]) -> StructuredOutput | None:
    """The structured output of ``tool_choice: auto`` with a ``strict`` tool: the answer is free up to its first call."""
    functions = functions_of(tools)
    is_strict = any(f.get("strict") is True for f in functions)
    return StructuredOutput("strict", calls=functions, is_required=False) if is_strict else None


def _calls_of(name: str | None, tools: list[Json]) -> StructuredOutput:
    """Calls of the tool of this name; ``None`` means any."""
    functions = functions_of(tools)
    calls = functions if name is None else [f for f in functions if f["name"] == name]
    if not calls:
        missing = "the request has no tools" if name is None else f"there is no tool {name[:50]!r}"
        raise ApiError(400, f"tool_choice requires a call, but {missing}.", param="tool_choice")
    return StructuredOutput("tool_choice", calls=calls)


def make_output_grammar(tokenizer: TokenizerWrapper, request: Request, in_reasoning: bool) -> list[Grammar]:
    """The logits processor of a request's structured output, if any. It begins after the reasoning, or with the first call.

    Compilation may take seconds, so the first call runs in the thread that tokenizes the prompt. The request keeps the grammar,
    and each call returns a copy.

    Raises:
        ApiError: The grammar cannot be read, or the model's calls cannot be forced.
    """
    output = request.structured_output
    if output is None:
        return []
    if request.grammar is None:
        try:
            request.grammar = _compile(tokenizer, output, in_reasoning)
        except (ValueError, RecursionError) as e:
            reason = "it is too deep" if isinstance(e, RecursionError) else str(e)
            raise ApiError(400, f"{output.param}: {reason}", param=output.param) from e
    return [request.grammar.copy()]


def _compile(tokenizer: TokenizerWrapper, output: StructuredOutput, in_reasoning: bool) -> Grammar:
    """Compile the grammar. A ValueError if it is invalid, and a RecursionError if it is too deep."""
    after: Any = tokenizer.think_end if in_reasoning else ""
    if not output.is_required:
        after = partial(start_of_calls, think=think_marks(tokenizer), in_reasoning=in_reasoning)
    grammar = output.grammar
    if output.calls:
        grammar = {"lark": in_deep_stack(lambda: CallGrammar(tokenizer, output.calls, output.is_required).lark)}
    return make_grammar(tokenizer, **grammar, after=after)
