"""The texts of a fit: the user's files, or prompts that the model answers itself (self-distillation).

A part of the texts is held out.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.datasets import create_dataset
from tqdm import tqdm

from .. import prompts
from ..cli.display import say
from ..core.batch.generate_step import mtp_generate_step
from ..core.models.mixin import check_ids, n_ids
from ..core.sampling.sampler import make_sampler
from ..errors import MTPError
from ..files import read_text, write_atomic
from .options import SHORTEST, FitOptions

HELD_OUT = 0.1  # the share of sources for validation, and for the test
MIN_TEST = 4  # sources, unless these are more than a third: with fewer, the uncertainty is unknown
MIN_TEXTS = 3  # to measure on
MAX_HELD_OUT = 32  # texts of each: more texts cost time at every evaluation for little information


@dataclass(frozen=True)
class Document:
    """Tokens. The first ``n_prompt`` are a prompt, which is not trained on; a text that is only a prompt has no answer yet."""

    source: str
    tokens: list[int]
    n_prompt: int = 0


class Split(NamedTuple):
    """Texts for training, validation and the test. They have no common source."""

    train: list[Document]
    valid: list[Document]
    test: list[Document]


def read_texts(tokenizer: TokenizerWrapper, how: FitOptions) -> list[Document]:
    """Those of the corpus, or the prompts of a file, or the built-in ones."""
    if how.corpus is not None:
        return read_corpus([Path(file) for file in how.corpus], tokenizer, how.max_seq_length)
    found = prompts.nine_kinds() if how.prompts is None else prompts.read_prompts(Path(how.prompts))
    encoded: dict[str, Any] = {name: prompts.encode(tokenizer, text).tolist() for name, text in found.items()}
    return [Document(name, tokens, len(tokens)) for name, tokens in encoded.items()]


def read_corpus(files: Sequence[Path], tokenizer: TokenizerWrapper, length: int) -> list[Document]:
    """Read files, each a source, and ``.jsonl`` files of ``mlx_lm.lora``, whose lines are. Texts are cut at ``length``."""
    texts: list[Document] = []
    for file in files:
        try:
            content = read_text(file)
            if file.suffix != ".jsonl":
                texts += _pieces(str(file), tokenizer.encode(content, verbose=False), length)
                continue
            if rows := [json.loads(line) for line in content.split("\n") if line.strip()]:
                dataset = create_dataset(rows, tokenizer, SimpleNamespace(mask_prompt="text" not in rows[0]))
            for i, row in enumerate(rows, 1):
                tokens, n_prompt = dataset.process(row)
                source = f"{file}:{i}"
                texts += [Document(source, tokens, n_prompt)] if n_prompt else _pieces(source, tokens, length)
        except (LookupError, TypeError, ValueError) as e:  # all raised by mlx-lm and chat templates
            raise MTPError(f"{file} cannot be read as a corpus ({e}): remove it, or correct it.") from e
    return [text for text in texts if text.n_prompt < len(text.tokens)]


def _pieces(source: str, tokens: list[int], length: int) -> list[Document]:
    return [Document(source, tokens[i : i + length]) for i in range(0, len(tokens), length)]


def split(texts: Sequence[Document], how: FitOptions) -> Split:
    """Divide texts by source, without short ones of a corpus, and shuffle each part. Raises MTPError if there are too few."""
    shortest = 1 if how.corpus is None else SHORTEST
    texts = list({tuple(text.tokens): text for text in texts if len(text.tokens) >= shortest}.values())  # each once
    sources = sorted({text.source for text in texts})
    rng = random.Random(how.seed)
    rng.shuffle(sources)
    n_valid = max(1, round(HELD_OUT * len(sources)))
    n_test = max(n_valid, min(MIN_TEST, len(sources) // 3))
    test = set(sources[:n_test])
    valid = set(sources[n_test:][:n_valid])
    train = set(sources[n_test + n_valid :])

    def part(names: set[str]) -> list[Document]:
        chosen = [text for text in texts if text.source in names]
        rng.shuffle(chosen)
        return chosen

    parts = Split(part(train), part(valid)[:MAX_HELD_OUT], part(test)[:MAX_HELD_OUT])
    if not parts.train or len(parts.test) < MIN_TEXTS:
        raise MTPError(
            f"There are {len(sources)} sources of text, too few to train on some and to measure on "
            "others: give --corpus more files, or --prompts more prompts."
        )
    return parts


def prepare(model: Any, tokenizer: TokenizerWrapper, parts: Split, how: FitOptions, work: Path) -> Split:
    if how.corpus is None:
        train = answer_all(model, tokenizer, parts.train, work / "train.jsonl", how)
        valid = answer_all(model, tokenizer, parts.valid, work / "valid.jsonl", how)
        parts = Split(train, valid, parts.test)
    check_ids(chain.from_iterable(text.tokens for text in chain(*parts)), n_ids(model), "The text")
    parts = parts._replace(train=parts.train[: how.iters * how.batch_size])
    n, k, m = (sum(len(text.tokens) for text in part) for part in parts)
    say(f"{n:,} tokens to train on, {k:,} to choose the best head by, and {m:,} to measure it on")
    return parts


def describe(parts: Split, how: FitOptions, iters: int) -> dict[str, Any]:
    n_tokens = sum(len(text.tokens) for text in parts.train)
    n_sources = len({text.source for text in parts.train})
    what = "of the user's files" if how.corpus is not None else "of its own answers"
    return {
        "trained_on": f"{n_tokens:,} tokens {what} ({n_sources:,} sources), {iters} iterations, {how.drafts} drafts",
        "measured_on": f"{len(parts.test)} other texts, greedy decoding with {how.drafts} drafts a step",
    }


def answer_all(
    model: Any, tokenizer: TokenizerWrapper, prompts: Sequence[Document], file: Path, how: FitOptions
) -> list[Document]:
    """Answer each prompt with different seeds, at temperature 0 once, and append each answer to a file, to resume with."""
    n_answers = how.answers if how.temp > 0 else 1
    tasks = [(text, how.seed + i) for i in range(n_answers) for text in prompts]
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []  # without an incomplete last one
    done = [Document(**json.loads(line)) for line in lines]
    write_atomic(file, "".join(f"{line}\n" for line in lines))
    todo = tasks[len(done) :]
    with file.open("a", encoding="utf-8") as f:
        for prompt, seed in tqdm(todo, desc="Answering", unit="answer", disable=None):
            sampler = make_sampler(temp=how.temp, seed=seed) if how.temp > 0 else None
            tokens = continue_text(model, tokenizer, prompt.tokens, max_tokens=how.max_tokens, sampler=sampler)
            done.append(Document(prompt.source, tokens, len(prompt.tokens)))
            f.write(json.dumps(asdict(done[-1])) + "\n")
            f.flush()
    return done


def continue_text(model: Any, tokenizer: TokenizerWrapper, prompt: list[int], **options: Any) -> list[int]:
    """A prompt and its continuation up to a stop token, with these options of ``mtp_generate_step``."""
    tokens = list(prompt)
    for token, _, _ in mtp_generate_step(mx.array(prompt), model, **options):
        tokens.append(token)
        if token in tokenizer.eos_token_ids:
            break
    return tokens
