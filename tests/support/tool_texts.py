"""Tool calls as Qwen's and GLM's chat templates write them, and models with such templates."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import pytest
from mlx.utils import tree_flatten
from transformers.utils.chat_template_utils import render_jinja_template

from mlx_mtp.checkpoint import DEMO
from mlx_mtp.text.formats import GLM, GLM_LINES, QWEN, Format

from .checkpoints import write
from .models import DATA, tiny_config, tiny_model

TEMPLATE = (DATA / "tools.jinja").read_text()
GLM_45 = (DATA / "glm.jinja").read_text()
GLM_47 = GLM_45.replace("\\n", "").replace("is_new = false", "is_new = true")
TEMPLATES = {QWEN: TEMPLATE, GLM_LINES: GLM_45, GLM: GLM_47}
FORMATS = [pytest.param(format, id=name) for format, name in zip(TEMPLATES, ("qwen", "glm-4.5", "glm-4.7"))]
every_template = pytest.mark.parametrize("format", FORMATS)
every_format = pytest.mark.parametrize("format", [FORMATS[0], FORMATS[2]])  # whose calls are parsed differently
END = "<|im_end|>"
FOLDERS = TemporaryDirectory(prefix="models-")
THINKING = "</think>", "<think>"
MARKS = (*THINKING, END, "<|im_start|>")
GLM_ENDS = "<|user|>", "<|observation|>"
CALL_TAGS = [
    f"<{slash}{name}>" for name in ("tool_call", "tool_response", "arg_key", "arg_value") for slash in ("", "/")
]
GLM_MARKS = ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "/nothink", *GLM_ENDS, *THINKING, *CALL_TAGS)
STRING, INTEGER, OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "object"}
SCHEMAS = {
    "write": {"properties": {"path": STRING, "content": STRING}},
    "add": {"properties": {"a": INTEGER, "b": INTEGER}},
    "set": {"properties": {"value": {"type": ["string", "null"]}, "options": OBJECT}},
    "now": {"type": "object", "properties": {}},
}
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]

# What texts with calls and without are made of.
IN_ALL = ["<tool_call>", "</tool_call>", "\n", " ", "```", '{"name": "add"']
TAGS = {
    QWEN: [*IN_ALL, "<function=add>", "</function>", "</parameter>"],
    GLM: [*IN_ALL, "<tool_call>add", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
}
PIECES = [*IN_ALL, ">", "true", "12", '"', "}", "{", "[", '<tool_call>\n{"name": "set", "arguments": {"value": "']
PARTS = {
    QWEN: [
        *PIECES, *TAGS[QWEN], "<function=", "<parameter=", "<parameter=a>", "<parameter=value>",
        "<tool_call>\n<function=add>\n<parameter=a>\n", "\n</parameter>\n", "\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=set>\n<parameter=options>\n",
    ],
    GLM: [
        *PIECES, *TAGS[GLM], "<arg_key>a</arg_key><arg_value>", "<arg_key>value</arg_key>\n<arg_value>", "</arg_value>\n",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>", "</arg_value></tool_call>",
        "<tool_call>set<arg_key>options</arg_key><arg_value>",
    ],
}  # fmt: skip
for of_format in (TAGS, PARTS):
    of_format[GLM_LINES] = of_format[GLM]


def render(name: str, arguments: dict, json_scalars: bool = False, format: Format = QWEN) -> str:
    """A call as the template writes it."""
    return rendered("", [(name, arguments)], json_scalars, format).lstrip("\n")


def rendered(content: str, calls: list[tuple[str, dict]], json_scalars: bool = False, format: Format = QWEN) -> str:
    """An answer without reasoning."""
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    text = render_jinja_template([[message]], chat_template=TEMPLATES[format], json_scalars=json_scalars)[0][0]
    begin = "<|im_start|>assistant\n" if format == QWEN else "</think>"
    return text.partition(begin)[2].removesuffix("<|im_end|>\n")


@cache
def model_with(*marks: str, template: str = TEMPLATE) -> str:
    """The folder of a tiny model, which is made once in a process."""
    return str(make_model(Path(mkdtemp(dir=FOLDERS.name)), marks or THINKING, template))


def make_model(folder: Path, marks: tuple[str, ...] = THINKING, template: str = TEMPLATE) -> Path:
    """A tiny model with the demo's tokenizer, Qwen's marks in the vocabulary, and a template with tools."""
    changes = {"vocab_size": 4096}
    write(folder, tiny_config("qwen3_5", **changes), dict(tree_flatten(tiny_model("qwen3_5", **changes).parameters())))
    for name in ("tokenizer_config.json", "tokenizer.json"):
        shutil.copy(DEMO / name, folder)
    return talk(folder, marks, template)


def talk(folder: Path, marks: tuple[str, ...], template: str = TEMPLATE) -> Path:
    """Give a copy of the demo the marks and ends of Qwen or of GLM, each a token, and a chat template."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for mark in marks:
        token = max(vocabulary, key=vocabulary.get)
        # The marks around thoughts and calls are text, but not as later versions of transformers save GLM's.
        is_special = mark.startswith("<|") or marks == GLM_MARKS
        added = {"id": vocabulary.pop(token), "content": mark, "special": is_special}
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], **added})
        merges.pop()
    if END in marks:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": END}))
    if marks == GLM_MARKS:
        ends = [token["id"] for token in tokenizer["added_tokens"] if token["content"] in ("<|endoftext|>", *GLM_ENDS)]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(template)
    return folder
