"""The texts of a fit: read, answered by the model itself (self-distillation), and no more than may be recorded.

Answers are kept in a file, so that a run that was ended goes on with them.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cli.display import bar, say
from ..decoding.loop import mtp_generate_step
from ..files import write_atomic
from ..sampling.sampler import make_sampler
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


def answer_all(
    model: Any,
    tokenizer: TokenizerWrapper,
    prompts: Sequence[Text],
    file: Path,
    *,
    answers: int,
    max_tokens: int,
    temp: float,
    seed: int,
) -> list[Text]:
    """Answer each prompt ``answers`` times, each time with another seed, and append every answer to a file of JSON lines.

    At temperature 0 there is one answer.
    """
    tasks = [(text, seed + i) for i in range(answers if temp > 0 else 1) for text in prompts]
    done = _read(file)
    write_atomic(file, "".join(map(_line, done)))
    todo = tasks[len(done) :]
    with file.open("a", encoding="utf-8") as f, bar("Answering", "answer", len(todo)) as progress:
        for prompt, task_seed in todo:
            done.append(_answer(model, tokenizer, prompt, max_tokens, temp, task_seed))
            f.write(_line(done[-1]))
            f.flush()
            progress.update()
    return done


def _answer(model: Any, tokenizer: TokenizerWrapper, prompt: Text, max_tokens: int, temp: float, seed: int) -> Text:
    tokens = list(prompt.tokens)
    sampler = make_sampler(temp=temp, seed=seed) if temp > 0 else None
    for token, _, _ in mtp_generate_step(mx.array(prompt.tokens), model, max_tokens=max_tokens, sampler=sampler):
        tokens.append(token)
        if token in tokenizer.eos_token_ids:
            break
    return Text(prompt.source, tokens, len(prompt.tokens))


def _read(file: Path) -> list[Text]:
    """The answers in a file, without a last line that was cut short."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [Text(**json.loads(line)) for line in lines]


def _line(text: Text) -> str:
    return json.dumps(asdict(text)) + "\n"
