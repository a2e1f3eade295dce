"""Tool calls as Qwen's chat template writes them."""

from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATE = (Path(__file__).parent / "data" / "tools.jinja").read_text()
STRING, INTEGER, OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "object"}
SCHEMAS = {
    "write": {"properties": {"path": STRING, "content": STRING}},
    "add": {"properties": {"a": INTEGER, "b": INTEGER}},
    "set": {"properties": {"value": {"type": ["string", "null"]}, "options": OBJECT}},
    "now": {"type": "object", "properties": {}},
}


def render(name: str, arguments: dict, json_scalars: bool = False) -> str:
    """A call as the template writes it."""
    return rendered("", [(name, arguments)], json_scalars)


def rendered(content: str, calls: list[tuple[str, dict]], json_scalars: bool = False) -> str:
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    text = render_jinja_template([[message]], chat_template=TEMPLATE, json_scalars=json_scalars)[0][0]
    return text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
