"""What the server makes of a request's body, up to the tokens of its prompt: no model and no server is needed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlx_lm.tokenizer_utils import load

from mlx_mtp.server.engine.encode import BoundedTokenizer, count_tokens, encode
from mlx_mtp.server.request import Prompt

from .models import DATA
from .requests import read
from .tool_texts import MARKS, model_with

STRICT = (DATA / "strict.jinja").read_text()
TAGS = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
CONTROL = "<|vision_start|>", "<|fim_prefix|>", "<|object_ref_end|>"
OPTIONS = SimpleNamespace(chat_template_args={}, max_tokens=5)


class Prompts:
    """A tokenizer with Qwen's marks, or others, and a template that is as strict as Qwen's."""

    def __init__(self, template: str = STRICT, marks: tuple[str, ...] = (*MARKS, *TAGS, *CONTROL)):
        self.tokenizer = load(Path(model_with(*marks, template=template)))
        self.bounded = BoundedTokenizer(self.tokenizer, len(self.tokenizer), 8192)

    def read(self, path: str, **body: Any) -> Prompt:
        return encode(self.bounded, read(path, **body), OPTIONS, None)

    def tokens(self, path: str, **body: Any) -> list[int]:
        return self.read(path, **body).tokens

    def text(self, path: str, **body: Any) -> str:
        return self.tokenizer.decode(self.tokens(path, **body))

    def count(self, path: str, **body: Any) -> int:
        return count_tokens(self.bounded, read(path, **body), OPTIONS)

    def ids(self, *marks: str) -> list[int]:
        return self.tokenizer.convert_tokens_to_ids(list(marks))
