"""The texts of a fit: the user's files, or prompts that the model answers. A part of them is held out."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.datasets import create_dataset

from .. import prompts

HELD_OUT = 0.1  # of the sources for validation, and as many for the test
MIN_TEST = 4  # sources, if these are not more than a third: fewer tell little of the uncertainty
MIN_TEXTS = 3  # to measure on
MAX_HELD_OUT = 32  # texts of each: more cost time at every evaluation and tell little more


@dataclass(frozen=True)
class Text:
    """Tokens, of which the first ``n_prompt`` are a prompt: the model does not write those.

    A text with a prompt alone is yet to be answered.
    """

    source: str
    tokens: list[int]
    n_prompt: int = 0


@dataclass(frozen=True)
class Split:
    """Texts to train on, to choose the best head by, and to measure it on at the end. No two share a source."""

    train: list[Text]
    valid: list[Text]
    test: list[Text]


def read_corpus(files: Sequence[Path], tokenizer: TokenizerWrapper, length: int) -> list[Text]:
    """Read files of text, and ``.jsonl`` files in the formats of ``mlx_lm.lora``.

    Args:
        files (Sequence[Path]): In UTF-8. A source is a file, or a line of a ``.jsonl`` file.
        length (int): Cut texts without a prompt into pieces of at most this many tokens.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is not UTF-8, or a ``.jsonl`` file has another format.
    """
    texts: list[Text] = []
    for file in files:
        try:
            content = file.read_text(encoding="utf-8")
            read = _read_jsonl if file.suffix == ".jsonl" else _read_file
            texts += read(str(file), content, tokenizer, length)
        except (LookupError, TypeError, ValueError) as e:  # mlx-lm and chat templates raise all of them
            raise ValueError(f"{file} cannot be read as a corpus ({e}): remove it, or correct it.") from e
    return texts


def _read_file(name: str, content: str, tokenizer: TokenizerWrapper, length: int) -> list[Text]:
    return _pieces(name, tokenizer.encode(content, verbose=False), length)


def _read_jsonl(name: str, content: str, tokenizer: TokenizerWrapper, length: int) -> list[Text]:
    rows = [json.loads(line) for line in content.splitlines() if line.strip()]
    if not rows:
        return []
    dataset = create_dataset(rows, tokenizer, SimpleNamespace(mask_prompt="text" not in rows[0]))
    texts = []
    for i, row in enumerate(rows, 1):
        tokens, n_prompt = dataset.process(row)
        source = f"{name}:{i}"
        texts += [Text(source, tokens, n_prompt)] if n_prompt else _pieces(source, tokens, length)
    return [text for text in texts if text.n_prompt < len(text.tokens)]


def _pieces(source: str, tokens: list[int], length: int) -> list[Text]:
    return [Text(source, tokens[i : i + length]) for i in range(0, len(tokens), length)]


def read_prompts(file: Path | None, tokenizer: TokenizerWrapper) -> list[Text]:
    """The prompts of a file, separated by lines of three dashes, or the built-in ones."""
    found = prompts.nine_kinds() if file is None else prompts.read_prompts(file)
    encoded: dict[str, Any] = {name: prompts.encode(tokenizer, text).tolist() for name, text in found.items()}
    return [Text(name, tokens, len(tokens)) for name, tokens in encoded.items()]


def split(texts: Sequence[Text], shortest: int, seed: int) -> Split:
    """Divide texts by their source, and shuffle each part.

    Args:
        shortest (int): Leave out texts of fewer tokens.

    Raises:
        ValueError: There are too few sources.
    """
    texts = list({tuple(text.tokens): text for text in texts if len(text.tokens) >= shortest}.values())  # each once
    sources = sorted({text.source for text in texts})
    rng = random.Random(seed)
    rng.shuffle(sources)
    n_valid = max(1, round(HELD_OUT * len(sources)))
    n_test = max(n_valid, min(MIN_TEST, len(sources) // 3))
    test, valid, train = set(sources[:n_test]), set(sources[n_test:][:n_valid]), set(sources[n_test + n_valid :])

    def part(names: set[str]) -> list[Text]:
        chosen = [text for text in texts if text.source in names]
        rng.shuffle(chosen)
        return chosen

    parts = Split(part(train), part(valid)[:MAX_HELD_OUT], part(test)[:MAX_HELD_OUT])
    if not parts.train or len(parts.test) < MIN_TEXTS:
        raise ValueError(
            f"There are {len(sources)} sources of text, too few to train on some and to measure on "
            "others: give --corpus more files, or --prompts more prompts."
        )
    return parts
