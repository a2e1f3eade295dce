"""The texts of a fit: read, divided, answered by the model, and no more than may be recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .answers import answer_all
from .progress import say
from .recording import bytes_per_token
from .texts import Split, Text, read_corpus, read_prompts

SHORTEST = 32  # tokens of a text: half of it is the prompt of a measurement


@dataclass(frozen=True)
class Data:
    """The data of a fit; see ``fit``."""

    corpus: Sequence[str | Path] | None
    prompts: str | Path | None
    max_seq_length: int
    answers: int
    max_tokens: int
    temp: float
    cache_gb: float
    seed: int

    @property
    def shortest(self) -> int:
        """The fewest tokens of a text that is of use."""
        return 1 if self.corpus is None else SHORTEST

    def read(self, tokenizer: TokenizerWrapper) -> list[Text]:
        if self.corpus is not None:
            return read_corpus([Path(file) for file in self.corpus], tokenizer, self.max_seq_length)
        return read_prompts(None if self.prompts is None else Path(self.prompts), tokenizer)


def prepare(model: Any, tokenizer: TokenizerWrapper, parts: Split, data: Data, work: Path) -> Split:
    """Let the model answer the prompts, up to the limit of the recording."""
    if data.corpus is None:
        how: Any = {"answers": data.answers, "max_tokens": data.max_tokens, "temp": data.temp, "seed": data.seed}
        train = answer_all(model, tokenizer, parts.train, work / "train.jsonl", **how)
        valid = answer_all(model, tokenizer, parts.valid, work / "valid.jsonl", **how)
        parts = Split(train, valid, parts.test)
    limit = int(data.cache_gb * 1e9 / bytes_per_token(model))
    length = data.max_seq_length
    train = within(parts.train, limit - sum(min(len(text.tokens), length) for text in parts.valid), length)
    n_tokens = [sum(len(text.tokens) for text in part) for part in (train, parts.valid, parts.test)]
    say(
        f"{n_tokens[0]:,} tokens to train on, {n_tokens[1]:,} to choose the best head by, and {n_tokens[2]:,} to "
        "measure it on"
    )
    if len(train) < len(parts.train):
        say(f"--cache-gb {data.cache_gb:g} leaves out {len(parts.train) - len(train):,} texts")
    return Split(train, parts.valid, parts.test)


def within(texts: Sequence[Text], n_tokens: int, length: int) -> list[Text]:
    """The first texts, of at most this many recorded tokens together, but one at least."""
    chosen: list[Text] = []
    for text in texts:
        n_tokens -= min(len(text.tokens), length)
        if n_tokens < 0 and chosen:
            break
        chosen.append(text)
    return chosen


def describe(data: Data, parts: Split, drafts: int, iters: int) -> dict[str, Any]:
    """The model card's text about a fit."""
    n_tokens, n_sources = sum(len(text.tokens) for text in parts.train), len({text.source for text in parts.train})
    what = "of the user's files" if data.corpus is not None else "of its own answers"
    return {
        "trained_on": f"{n_tokens:,} tokens {what} ({n_sources:,} sources), {iters} iterations, {drafts} drafts",
        "measured_on": f"{len(parts.test)} other texts, greedy decoding with {drafts} drafts a step",
    }
