"""The model's own answers to prompts (self-distillation), kept in a file so that a run that was ended goes on with them."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.loop import mtp_generate_step
from ..files import write_atomic
from ..sampling.sampler import make_sampler
from .progress import bar
from .texts import Text


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
