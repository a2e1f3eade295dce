"""``mlx_mtp fit``: measure, record, train, measure again, and write the head if it is better."""

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..checkpoint.config import Config, check_config, read_json
from ..checkpoint.fetched import fetch_missing_head
from ..checkpoint.head_formats import head_bits
from ..checkpoint.hub import fetch
from ..checkpoint.load import load
from ..checkpoint.output import atomic_directory, check_new, write_config, write_weights
from ..checkpoint.reader import CheckpointReader
from ..cli.display import say
from ..cli.flags import check_limits
from ..files import check_folder, check_source, write_atomic
from ..pacing.depth import MAX_DRAFT_TOKENS
from .comparison import Comparison, compare, measure
from .loss import DraftLoss
from .texts import SHORTEST, Data, Split, describe, prepare, split
from .training import Schedule, make_trainable, record, train_head

LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("iters", "batch_size", "steps_per_eval", "answers", "max_tokens"), (1, math.inf)),
    **dict.fromkeys(("temp", "seed"), (0, math.inf)),
    "max_seq_length": (SHORTEST, math.inf),
    "drafts": (1, MAX_DRAFT_TOKENS),
}
USAGE = """
## Fitted MTP head

The MTP head of this checkpoint was trained with `mlx_mtp fit` for this backbone, which is
{model} without changes. The model generates the same text.

- Trained on: {trained_on}
- Measured on: {measured_on}

```
{table}
```
{adapter}
To restore the original head: `mlx_mtp convert --graft-mtp-from {original} --model {name} --mlx-path NEW`.
"""
WITH_ADAPTER = """
It was fitted on top of the adapter {adapter}: generate with `--adapter-path {adapter}`.
"""


def fit(
    model: str,
    mlx_path: str,
    corpus: Sequence[str | Path] | None = None,
    prompts: str | Path | None = None,
    *,
    adapter_path: str | None = None,
    drafts: int = 4,
    iters: int = 500,
    batch_size: int = 4,
    learning_rate: float = 1e-4,
    max_seq_length: int = 512,
    steps_per_eval: int = 50,
    answers: int = 8,
    max_tokens: int = 256,
    temp: float = 0.7,
    cache_path: str | Path | None = None,
    seed: int = 0,
) -> Comparison:
    """Train only a model's MTP head, to predict the model's text, and write it if more drafts are accepted.

    The head does not change the model's text. After an interruption, the same call uses the answers and recorded states so
    far.

    Args:
        model (str): The path or the Hugging Face repository of a checkpoint. If it has no head, the head of its base model is
          fetched and fitted.
        mlx_path (str): The folder of the checkpoint to write.
        corpus (Sequence[Union[str, Path]], optional): Files of text like the model's future output, or ``.jsonl`` files
          of ``mlx_lm.lora``. Default: ``None``, prompts.
        prompts (Union[str, Path], optional): A file of prompts, separated by lines of three dashes, which the model answers
          first. Default: ``None``, built-in ones.
        adapter_path (str, optional): A trained adapter of ``mlx_lm.lora`` for the backbone. Default: ``None``.
        drafts (int): The number of drafts to train and measure at each position. Default: ``4``.
        iters (int): Iterations to train for. Default: ``500``.
        batch_size (int): Texts in an iteration. Default: ``4``.
        learning_rate (float): AdamW's highest learning rate. Default: ``1e-4``.
        max_seq_length (int): Cut texts into pieces of this many tokens; use the end of longer answers. Default: ``512``.
        steps_per_eval (int): Iterations between validations; the best head is kept. Default: ``50``.
        answers (int): Answers to each prompt. Default: ``8``.
        max_tokens (int): The length of an answer, and of a measured continuation. Default: ``256``.
        temp (float): The temperature of the answers. Default: ``0.7``.
        cache_path (Union[str, Path], optional): The folder for recorded states, which is kept. Default: ``None``, a folder
          next to ``mlx_path``, which is removed at the end.
        seed (int): The seed for dividing and ordering the texts. Default: ``0``.

    Returns:
        Comparison: The acceptance before and after. Nothing is written unless ``is_better``.

    Raises:
        FileNotFoundError: The checkpoint or a file is missing.
        ValueError: An argument is out of range, the target exists, there is too little text, or the head is quantized.
    """
    target, work = Path(mlx_path), Path(cache_path or f"{mlx_path}.fit")
    check_new(target)
    data = Data(corpus, prompts, max_seq_length, answers, max_tokens, temp, seed)
    how = Schedule(iters, batch_size, learning_rate, steps_per_eval, seed)
    check_arguments(data, how, drafts)
    if adapter_path is not None:
        check_folder(Path(adapter_path), "--adapter-path")
    if work.exists():
        check_folder(work, "--cache-path")
    source = fetch(model, None)
    head = fetch_missing_head(CheckpointReader(model, folder=source))  # not checked: the head may need the fit
    mtp = True if head is None else str(head.folder)
    loaded, tokenizer = load(model, adapter_path=adapter_path, lazy=True, mtp=mtp, draft_vocab=0, settings=False)
    loaded.fetched_head = head
    check_head_weights(loaded, model, adapter_path)
    texts = data.read(tokenizer)
    open_work(work, [model, adapter_path, data, texts])
    parts = prepare(loaded, tokenizer, split(texts, data.shortest, seed), data, iters * batch_size, work)

    starts = [text.tokens[: text.n_prompt or len(text.tokens) // 2] for text in parts.test]
    say(f"Measuring the original head on {len(starts)} held-out texts")
    before = measure(loaded, tokenizer, starts, drafts, max_tokens)
    best_iters = train_on(loaded, parts, max_seq_length, drafts, how, work)
    say("Measuring the fitted head on the same texts")
    comparison = compare(before, measure(loaded, tokenizer, starts, drafts, max_tokens))
    print(comparison.table())

    if comparison.is_better:
        record = describe(data, parts, drafts, best_iters)
        write_checkpoint(target, source, loaded, model, adapter_path, record, comparison.table())
        say(f"Wrote {target}")
    if cache_path is None:
        shutil.rmtree(work)
    return comparison


def train_on(model: Any, parts: Split, length: int, drafts: int, how: Schedule, work: Path) -> int:
    """Record the texts, and train the head of a model, which keeps its dtype. Return the iterations of the best head."""
    train, valid = (
        record(model, texts, work / "states", name, how.batch_size, length)
        for name, texts in (("train", parts.train), ("valid", parts.valid))
    )
    dtypes = tree_map(lambda p: p.dtype, model.mtp.parameters())
    model.freeze()
    make_trainable(model.mtp)
    loss = DraftLoss(model.model.embed_tokens, model.output_layer, drafts)
    best = train_head(model.mtp, loss, train, valid, how)
    model.mtp.update(tree_map(lambda p, dtype: p.astype(dtype), model.mtp.parameters(), dtypes))
    losses = f"{best.losses[0]:.3f} -> {min(best.losses):.3f}" if best.losses else "unknown"
    say(f"Best at iteration {best.iters}: validation loss {losses}, peak memory {mx.get_peak_memory() / 1e9:.2f} GB")
    return best.iters


def check_head_weights(model: Any, name: str, adapter_path: str | None) -> None:
    """Raise a ValueError if a model's head is quantized, or has an adapter."""
    if any("lora_a" in module for _, module in model.mtp.named_modules()):
        raise ValueError(f"The adapter {adapter_path} also adapts the head: give an adapter of the backbone only.")
    if head_bits(model.mtp) is not None:
        raise ValueError(
            f"The MTP head of {name} is quantized: give it the base model's, `mlx_mtp convert --graft-mtp-from BASE_MODEL "
            f"--model {name} --mlx-path NEW`, and fit that."
        )


def check_arguments(data: Data, how: Schedule, drafts: int) -> None:
    """Raise a ValueError if an argument is out of range, or two contradict each other."""
    if data.corpus is not None and data.prompts is not None:
        raise ValueError("Choose either --corpus or --prompts, not both.")
    given = {**vars(data), **vars(how), "drafts": drafts}
    check_limits(given, LIMITS)
    if how.learning_rate <= 0:
        raise ValueError(f"--learning-rate must be more than 0, not {how.learning_rate}.")
    for file in data.corpus or ():
        check_source(Path(file), "--corpus")
    if data.prompts is not None:
        check_source(Path(data.prompts), "--prompts")


def open_work(work: Path, source: Any) -> None:
    """Make the folder of recorded states, or raise a ValueError if an existing one is for other texts or another model."""
    file, wanted = work / "fit.json", {"digest": hashlib.sha256(repr(source).encode()).hexdigest()}
    if file.exists():
        if read_json(file) != wanted:
            raise ValueError(f"{work} was recorded with other arguments or texts: repeat them, or delete it.")
        return
    work.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(wanted))


# What a fit writes


def write_checkpoint(
    target: Path, source: Path, model: Any, name: str, adapter_path: str | None, record: dict[str, Any], table: str
) -> None:
    """Write a folder with links to the files of the fitted model, in ``source``, and the head.

    ``record`` and ``table`` go into its card: the data of the fit, and the acceptance before and after.
    """
    reader = CheckpointReader(name, folder=source)
    config: Config = check_config(reader.config, name)
    fetched = model.fetched_head
    own = {"source": name, "revision": reader.revision}
    origin = config.get("mlx_mtp") or (own if fetched is None else fetched.record)
    parameters: Any = tree_flatten(model.mtp.parameters())
    head = {model.head_prefix + path: w for path, w in parameters}
    adapter = "" if adapter_path is None else WITH_ADAPTER.format(adapter=adapter_path)
    original = origin.get("source") or name
    with atomic_directory(target) as folder:
        write_weights(folder, reader, head)
        config["mlx_mtp_fit"] = record
        write_config(folder, config, head, origin)
        with (folder / "README.md").open("a", encoding="utf-8") as card:
            card.write(USAGE.format(model=name, name=target, original=original, table=table, adapter=adapter, **record))
