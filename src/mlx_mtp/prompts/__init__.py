"""Prompts for measurements: kinds of request, some with answers that copy, beginnings of Python files, and the user's."""

import re
from collections.abc import Iterable, Mapping
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import MTPError, as_mtp_error
from ..files import check_source, read_text

FOLDER = Path(__file__).parent
KINDS = (
    "python_code", "cpp_code", "explaining", "summarizing", "factual_question", "translation", "creative", "mathematics",
    "code_review",
)  # fmt: skip
COPYING = ("edit_file", "answer_from_page", "translate_json", "continue_log")  # most of the answer is in the prompt
SEPARATOR = re.compile(r"(?:\A|\n)---[ \t]*(?:\n|\Z)")
# Beginnings of Python files for the demo, which is trained only on Python.
PYTHON = (
    '"""Read and write settings."""\n\nimport json\n\n\ndef read_settings(path):\n',
    'def main(argv=None):\n    parser = argparse.ArgumentParser(description="Find files by name")\n    parser.add_argument(',
    'class Account:\n    """An account with a balance."""\n\n    def __init__(self, owner, balance=0):\n',
    '"""Functions for numbers."""\n\nimport math\n\n\ndef',
)


def nine_kinds() -> dict[str, str]:
    return _read(KINDS)


def copying_kinds() -> dict[str, str]:
    return _read(COPYING)


def built_in_tokens(tokenizer: TokenizerWrapper, vocab_size: int, n: int) -> mx.array:
    """The first tokens of a text, mostly code, without those beyond a model's vocabulary, at most n, [1, T]."""
    ids = tokenizer.encode(copying_kinds()["edit_file"])
    return mx.array([i for i in ids if i < vocab_size][:n], mx.uint32)[None]


def _read(names: Iterable[str]) -> dict[str, str]:
    return {name: (FOLDER / f"{name}.txt").read_text(encoding="utf-8").strip() for name in names}


def python_beginnings() -> dict[str, str]:
    return {f"python_{i}": text for i, text in enumerate(PYTHON, 1)}


def read_prompts(file: Path) -> dict[str, str]:
    """The texts of a file, separated by lines of three dashes, named by their position. An MTPError if there are none."""
    check_source(file, "The prompts")
    texts = SEPARATOR.split(read_text(file))
    prompts = {f"prompt_{i}": text for i, text in enumerate(texts, 1) if text.strip()}
    if not prompts:
        raise MTPError(f"{file} has no prompts: write texts, separated by lines of three dashes.")
    return prompts


def encode(tokenizer: TokenizerWrapper, text: str, context: int = 0, **template: Any) -> mx.array:
    """A prompt's tokens, [T], by the chat template, if any, extended to about ``context`` tokens by source of this package."""
    if (n := context - len(_encode(tokenizer, text, template))) > 0:
        files = (file.read_text(encoding="utf-8") for file in cycle(sorted(FOLDER.parent.glob("**/*.py"))))
        source = (tokenizer.encode(f"{code}\n\n", add_special_tokens=False, verbose=False) for code in files)
        text = f"{tokenizer.decode([*islice(chain.from_iterable(source), n)])}\n\n{text}"
    return mx.array(_encode(tokenizer, text, template))


def _encode(tokenizer: TokenizerWrapper, text: str, template: Mapping[str, Any]) -> list[int]:
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    with as_mtp_error("The chat template of the model cannot be rendered"):
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, **template))
