"""``mlx_mtp fit``: measure, record, train, measure again, and write the head if it is better."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tqdm import tqdm

from ..checkpoint import AUTO
from ..checkpoint.adapters import check_adapter
from ..checkpoint.checks.dtype import check_float16
from ..checkpoint.config import Config, check_config
from ..checkpoint.heads.formats import head_bits
from ..checkpoint.heads.originals import check_method, fetch_missing_head
from ..checkpoint.load import load
from ..checkpoint.output import atomic_directory, check_new, write_beside
from ..checkpoint.part import evaluate
from ..checkpoint.reader import CheckpointReader, fetch_checkpoint
from ..cli.display import say, table
from ..core.decoding.counts import DraftCounts
from ..core.models.head_weights import in_files
from ..errors import MTPError
from ..files import check_folder, write_atomic
from .options import FitOptions
from .texts import continue_text, describe, prepare, read_texts, split
from .training import train

RESAMPLES = 2000  # resamplings of the texts, for the standard errors
SURE = 2.0  # standard errors that a gain must exceed, about 95 %
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


class Comparison(NamedTuple):
    """A head before and after, on the same texts: acceptance rates by position, and the tokens per step last, [K + 1] each."""

    before: np.ndarray
    after: np.ndarray
    before_error: np.ndarray  # standard errors
    after_error: np.ndarray
    gain_error: np.ndarray  # of after - before, smaller since the texts are the same

    @property
    def is_better(self) -> bool:
        return bool(self.after[-1] - self.before[-1] > SURE * self.gain_error[-1])

    def table(self) -> str:
        names = [*(f"draft {i}" for i in range(1, len(self.before))), "tokens per step"]
        rows = [["", "before", "after", "gain"]]
        for name, b, a, be, ae, ge in zip(names, *self):
            rows.append([name, f"{b:.3f} ± {be:.3f}", f"{a:.3f} ± {ae:.3f}", f"{a - b:+.3f} ± {ge:.3f}"])
        return "\n".join(table(rows))


def fit(
    model: str,
    mlx_path: str,
    *,
    adapter_path: str | None = None,
    cache_path: str | Path | None = None,
    dtype: str = AUTO,
    **options: Any,
) -> Comparison:
    """Train only the MTP head of ``model``, or of its base model, to predict the model's text, and write a folder ``mlx_path``
    if more drafts are accepted.

    After an interruption, the same call uses the answers and recorded states so far, in ``cache_path``, by default a folder
    beside ``mlx_path`` that is removed at the end. ``dtype`` is that of ``mlx_mtp.load``, ``options`` are of ``FitOptions``.
    """
    target = Path(mlx_path)
    work = Path(cache_path or f"{mlx_path}.fit")
    check_new(target)
    how = FitOptions(**options)
    how.check()
    if adapter_path is not None:
        check_adapter(adapter_path, "--adapter-path")
    if work.exists():
        check_folder(work, "--cache-path")
    check_method(CheckpointReader(model))
    checkpoint = fetch_checkpoint(model)
    head = fetch_missing_head(checkpoint)  # not checked: the head may need the fit
    mtp = True if head is None else str(head.folder)
    loaded, tokenizer = load(
        model, adapter_path=adapter_path, lazy=True, mtp=mtp, draft_vocab=0, settings=False, dtype=dtype
    )
    if dtype == "float16":
        evaluate(loaded)
        check_float16(loaded, tokenizer, model)
    loaded.fetched_head = head
    check_head_weights(loaded, model, adapter_path)
    texts = read_texts(tokenizer, how)
    parts = split(texts, how)
    used = how.max_seq_length, how.answers, how.max_tokens, how.temp, how.seed
    open_work(work, [model, adapter_path, dtype, texts, *used])
    parts = prepare(loaded, tokenizer, parts, how, work)

    starts = [text.tokens[: text.n_prompt or len(text.tokens) // 2] for text in parts.test]
    say(f"Measuring the original head on {len(starts)} held-out texts")
    before = measure(loaded, tokenizer, starts, how.drafts, how.max_tokens)
    best_iters = train(loaded, parts, how, work)
    say("Measuring the fitted head on the same texts")
    comparison = compare(before, measure(loaded, tokenizer, starts, how.drafts, how.max_tokens))
    print(comparison.table())

    if comparison.is_better:
        record = describe(parts, how, best_iters)
        write_checkpoint(target, checkpoint, loaded, adapter_path, record, comparison.table())
        say(f"Wrote {target}")
    if cache_path is None:
        shutil.rmtree(work)
    return comparison


def measure(
    model: Any, tokenizer: TokenizerWrapper, prompts: Sequence[list[int]], n_drafts: int, max_tokens: int
) -> np.ndarray:
    """Drafts at K positions in the continuations of n texts, and those accepted with all before them, [2, n, K]"""
    of_texts = np.zeros((2, len(prompts), n_drafts), int)
    for i, prompt in enumerate(tqdm(prompts, desc="Measuring", unit="text", disable=None)):
        counts = DraftCounts()
        how: Any = {"max_tokens": max_tokens, "num_draft_tokens": n_drafts, "draft_p_min": 0.0, "counts": counts}
        continue_text(model, tokenizer, prompt, **how)
        of_texts[:, i, : len(counts.drafted)] = counts.drafted, counts.accepted
    return of_texts


def compare(before: np.ndarray, after: np.ndarray, seed: int = 0) -> Comparison:
    """Compare two heads on the same texts, as measured, with standard errors by resampling the texts (the bootstrap)."""
    n = before.shape[1]
    unbiased = (n / (n - 1)) ** 0.5
    samples = np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))
    b, a = rates(before, samples), rates(after, samples)  # [RESAMPLES, K + 1]
    everything = np.arange(n)
    errors = (unbiased * x.std(axis=0) for x in (b, a, a - b))
    return Comparison(rates(before, everything), rates(after, everything), *errors)


def rates(counts: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """The acceptance rates by position and the tokens per step, over these texts [..., n] -> [..., K + 1]"""
    drafted, accepted = counts[:, texts].sum(axis=-2)  # [..., K] each
    per_step = 1 + accepted.sum(axis=-1) / np.maximum(drafted[..., 0], 1)
    return np.concatenate([accepted / np.maximum(drafted, 1), per_step[..., None]], axis=-1)


def check_head_weights(model: Any, name: str, adapter_path: str | None) -> None:
    if any("lora_a" in module for _, module in model.mtp.named_modules()):
        raise MTPError(f"The adapter {adapter_path} also adapts the head: give an adapter of the backbone only.")
    if head_bits(model.mtp) is not None:
        raise MTPError(
            f"The MTP head of {name} is quantized: give it the base model's, `mlx_mtp convert --graft-mtp-from BASE_MODEL "
            f"--model {name} --mlx-path NEW`, and fit that."
        )


def open_work(work: Path, source: Any) -> None:
    """Make the folder of recorded states, or raise an MTPError if an existing one is for other texts or another model."""
    file = work / "fit.json"
    wanted = json.dumps({"digest": hashlib.sha256(repr(source).encode()).hexdigest()})
    if file.exists() and file.read_bytes() != wanted.encode():
        raise MTPError(f"{work} was recorded with other arguments or texts: repeat them, or delete it.")
    work.mkdir(parents=True, exist_ok=True)
    write_atomic(file, wanted)


def write_checkpoint(
    target: Path, source: CheckpointReader, model: Any, adapter_path: str | None, record: dict[str, Any], table: str
) -> None:
    """Write a folder with the model's files of ``source``, the head, and a card with ``record`` and ``table``."""
    name = source.name
    fetched = model.fetched_head
    config: Config = check_config(source.config, name)
    own = {"source": name, "revision": source.revision}
    origin = config.get("mlx_mtp") or (own if fetched is None else fetched.record)
    parameters: Any = tree_flatten(model.mtp.parameters())
    head = in_files(model, dict(parameters))
    adapter = "" if adapter_path is None else WITH_ADAPTER.format(adapter=adapter_path)
    original = origin.get("source") or name
    card = USAGE.format(model=name, name=target, original=original, table=table, adapter=adapter, **record)
    config["mlx_mtp_fit"] = record
    with atomic_directory(target) as folder:
        write_beside(folder, source, config, head, {}, origin, card)
