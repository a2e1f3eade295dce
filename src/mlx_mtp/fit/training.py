"""Training the head with mlx-lm's trainer.

The backbone's hidden states and predictions are recorded on disk first, so that a training step runs only the head.
"""

import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TextIO

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.trainer import TrainingArgs, train
from mlx_lm.tuner.utils import build_schedule, linear_to_lora_layers

from ..checkpoint.config import read_json
from ..checkpoint.head_formats import load_tensors
from ..cli.display import bar, say
from ..files import save_atomic
from ..layers.drafting import ROUTERS
from ..models.mixin import MTPModel
from .loss import DraftLoss
from .texts import Text

TOP_K = 32  # the likeliest tokens of the backbone's distribution; the others have hardly any mass
ROWS = 1 << 25  # logits that are computed at once
PAD_TO = 32  # as in mlx-lm: fewer lengths need fewer compiled graphs
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BETAS = (0.9, 0.95)
SCALE = 20.0  # of adapters, as in mlx-lm


def bytes_per_token(model: MTPModel) -> int:
    """The bytes of a token on disk: its hidden state, and the ids and probabilities of the likeliest next tokens."""
    embedding = model.model.embed_tokens(mx.array([0]))  # [1, H]
    return int(embedding.nbytes + TOP_K * (mx.uint32.size + mx.float16.size) + mx.uint32.size)


def record(model: MTPModel, texts: Sequence[Text], folder: Path, name: str, batch_size: int, length: int) -> list[Path]:
    """Write a file for each text, see ``read_states``, and keep the files of an earlier run.

    The backbone runs over ``batch_size`` texts at once. Of a text, the last ``length`` positions are kept: a head can start
    within it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}-{i:05d}.safetensors" for i in range(len(texts))]
    missing = sorted((len(text.tokens), file, text) for file, text in zip(files, texts) if not file.exists())
    with bar(f"Recording {name}", "token", sum(n for n, *_ in missing)) as progress:
        for i in range(0, len(missing), batch_size):
            batch = missing[i : i + batch_size]
            for (n, file, _), arrays in zip(batch, _states(model, [text for *_, text in batch], length)):
                save_atomic(file, arrays)
                progress.update(n)
            mx.clear_cache()
    return files


def read_states(file: Path) -> dict[str, mx.array]:
    """``tokens`` [T], ``hidden`` [T, H], the likeliest ``ids`` [T, k] after each position and their ``probabilities`` [T, k],
    which sum to 1, and ``n_prompt`` []."""
    return load_tensors(file)


def _states(model: MTPModel, texts: Sequence[Text], length: int) -> Iterator[dict[str, mx.array]]:
    """Run the backbone over texts in one batch, padded on the right. Return the content of ``read_states`` for each."""
    longest = max(len(text.tokens) for text in texts)
    tokens = mx.array([text.tokens + [0] * (longest - len(text.tokens)) for text in texts], mx.uint32)  # [B, T]
    hidden = model.model(tokens)  # [B, T, H]
    mx.eval(hidden)
    n_rows = max(ROWS // model.output_layer.weight.shape[0], 1)  # at once
    for b, text in enumerate(texts):
        n = len(text.tokens)
        first = max(n - length, 0)
        ids, probabilities = zip(*(_top_k(model, hidden[b, i : min(i + n_rows, n)]) for i in range(first, n, n_rows)))
        yield {
            "tokens": tokens[b, first:n],
            "hidden": hidden[b, first:n],
            "ids": mx.concatenate(list(ids)),
            "probabilities": mx.concatenate(list(probabilities)),
            "n_prompt": mx.array(max(text.n_prompt - first, 0)),
        }


def _top_k(model: Any, hidden: mx.array) -> tuple[mx.array, mx.array]:
    """hidden [T, H] -> ids [T, k], probabilities [T, k]"""
    logits = model.logits(hidden[None])[0].astype(mx.float32)  # [T, V]
    k = min(TOP_K, logits.shape[-1])
    ids = mx.argpartition(-logits, kth=k - 1, axis=-1)[:, :k]
    probabilities = mx.softmax(mx.take_along_axis(logits, ids, axis=-1), axis=-1).astype(mx.float16)
    mx.eval(ids, probabilities)  # one chunk of logits at a time
    return ids, probabilities


@dataclass(frozen=True)
class Schedule:
    """The length and the learning rate of the training."""

    iters: int
    batch_size: int
    learning_rate: float
    steps_per_eval: int
    seed: int

    def optimizer(self) -> optim.Optimizer:
        """AdamW with a warmup of a twentieth of the time, then cosine decay."""
        warmup = max(self.iters // 20, 1)
        decay = [self.learning_rate, max(self.iters - warmup, 1), self.learning_rate / 100]
        schedule = build_schedule({"name": "cosine_decay", "arguments": decay, "warmup": warmup})
        return optim.AdamW(learning_rate=schedule, betas=list(BETAS), bias_correction=True)


class Progress(TrainingCallback):
    """Keeps the head with the lowest validation loss and, in one file, the state to resume from.

    ``start`` is the iterations of earlier runs, ``losses`` the validation loss of the original head and the lowest one.
    """

    def __init__(self, mtp: nn.Module, optimizer: optim.Optimizer, file: Path):
        self.mtp, self.optimizer, self.file = mtp, optimizer, file
        self.start = self.best_iters = 0
        self.best = self._weights()
        self.losses = (math.inf, math.inf)
        if file.exists():
            self._resume()

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        """Called by mlx-lm before the first iteration and every ``steps_per_eval`` iterations."""
        iters, loss = self.start + val_info["iteration"], val_info["val_loss"]
        first, lowest = self.losses
        if loss < lowest:
            self.best, self.best_iters, lowest = self._weights(), iters, loss
        self.losses = (loss if math.isinf(first) else first, lowest)
        self._save(iters)

    def _weights(self) -> dict[str, mx.array]:
        return dict(tree_flatten(self.mtp.trainable_parameters()))

    def _save(self, iters: int) -> None:
        parts = {"head": self._weights(), "best": self.best, "optimizer": dict(tree_flatten(self.optimizer.state))}
        arrays = {f"{part}.{name}": w for part, weights in parts.items() for name, w in weights.items()}
        numbers = json.dumps({"iters": iters, "best_iters": self.best_iters, "losses": self.losses})
        save_atomic(self.file, arrays, {"progress": numbers})

    def _resume(self) -> None:
        loaded: Any = mx.load(str(self.file), return_metadata=True)
        arrays, metadata = loaded
        mx.eval(arrays)  # the file is replaced later

        def part(name: str) -> list[tuple[str, mx.array]]:
            return [(path.removeprefix(f"{name}."), w) for path, w in arrays.items() if path.startswith(f"{name}.")]

        self.mtp.load_weights(part("head"), strict=False)
        self.optimizer.state = tree_unflatten(part("optimizer"))
        self.best = dict(part("best"))
        numbers = json.loads(metadata["progress"])
        self.start, self.best_iters, self.losses = numbers["iters"], numbers["best_iters"], tuple(numbers["losses"])
        say(f"Resuming at iteration {self.start}")


def train_head(
    mtp: nn.Module, loss: DraftLoss, train_files: Sequence[Path], valid_files: Sequence[Path], how: Schedule, file: Path
) -> Progress:
    """Train the unfrozen weights of a head on files of ``record``, and leave it with the lowest validation loss.

    Ctrl-C ends the training, not the program. A later run resumes from the state in ``file``.
    """
    optimizer = how.optimizer()
    progress = Progress(mtp, optimizer, file)
    n_left = how.iters - progress.start
    args = TrainingArgs(
        batch_size=how.batch_size,
        iters=n_left,
        val_batches=-1,
        steps_per_eval=how.steps_per_eval,
        steps_per_report=how.steps_per_eval,
        steps_per_save=n_left + 1,  # `progress` saves
        adapter_file=file.with_name("last.safetensors"),
    )
    first = progress.start * how.batch_size
    is_shown = sys.stdout.isatty()  # by mlx-lm
    try:
        if n_left > 0:
            out = redirect_stdout(sys.stdout if is_shown else _Plain(sys.stdout))
            with out, bar("Training", "iteration", n_left, disable=is_shown) as iterations:
                batches = partial(iterate_batches, first=first, shuffle_seed=how.seed, on_next=iterations.update)
                functions: Any = {"loss": loss, "iterate_batches": batches, "training_callback": progress}
                train(mtp, optimizer, train_files, valid_files, args, **functions)
                iterations.update()  # the last batch, after which no other is requested
    except KeyboardInterrupt:
        print("\nInterrupted: the best head so far is measured. Interrupt again to end without one.")
    args.adapter_file.unlink(missing_ok=True)  # keep the best head, not the last
    mtp.eval()
    mtp.load_weights(list(progress.best.items()), strict=False)
    return progress


class _Plain(io.TextIOBase):
    """Writes text to a stream without the codes of terminal colors, which mlx-lm's trainer writes to files as well."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(COLOURS.sub("", text))
        self.stream.flush()
        return len(text)


def iterate_batches(
    dataset: Sequence[Path],
    batch_size: int,
    loop: bool = False,
    first: int = 0,
    shuffle_seed: int = 0,
    on_next: Callable[[], object] = lambda: None,
    **_: Any,
) -> Iterator[tuple[mx.array, ...]]:
    """The batches of recorded texts, as arguments of ``DraftLoss`` after the head: once in order, or with ``loop`` endlessly,
    in a new random order each time.

    With ``loop``, the first ``first`` texts are skipped, which an earlier run has used, and ``on_next`` is called before each
    batch but the first.
    """
    if not loop:
        for i in range(0, len(dataset), batch_size):
            yield _batch([read_states(file) for file in dataset[i : i + batch_size]])
        return
    n = first
    while True:
        chosen = []
        for i in range(n, n + batch_size):
            epoch, place = divmod(i, len(dataset))
            order = np.random.default_rng((shuffle_seed, epoch)).permutation(len(dataset))
            chosen.append(dataset[order[place]])
        yield _batch([read_states(file) for file in chosen])
        on_next()
        n += batch_size


def _batch(texts: Sequence[dict[str, mx.array]]) -> tuple[mx.array, ...]:
    longest = max(len(text["tokens"]) for text in texts)
    longest += -longest % PAD_TO

    def stacked(name: str) -> mx.array:
        rows = (text[name] for text in texts)
        return mx.stack([mx.pad(x, [(0, longest - len(x))] + [(0, 0)] * (x.ndim - 1)) for x in rows])

    spans = mx.stack([mx.stack([text["n_prompt"], mx.array(len(text["tokens"]))]) for text in texts])  # [B, 2]
    return stacked("tokens"), stacked("hidden"), stacked("ids"), stacked("probabilities"), spans


# What is trained


@dataclass(frozen=True)
class Lora:
    """An adapter of the head, of this rank, and the folder of the backbone's adapter that is written with it."""

    rank: int
    beside: str | None

    @cached_property
    def scale(self) -> float:
        """The scale of both, which share a file. A ValueError tells if the backbone's is not LoRA, or has another rank."""
        if self.beside is None:
            return SCALE
        config = read_json(Path(self.beside) / "adapter_config.json")
        if config.get("fine_tune_type", "lora") != "lora":
            raise ValueError(f"--lora-rank writes the adapter {self.beside} too, which is not LoRA: omit --lora-rank.")
        parameters = config["lora_parameters"]
        if parameters["rank"] != self.rank:
            raise ValueError(
                f"--lora-rank must be that of {self.beside}, {parameters['rank']}, not {self.rank}: both are written in one."
            )
        return float(parameters["scale"])

    def parameters(self, keys: Iterable[str]) -> dict[str, Any]:
        """mlx-lm's ``lora_parameters`` for these modules."""
        return {"rank": self.rank, "scale": self.scale, "dropout": 0.0, "keys": sorted(keys)}


def make_trainable(mtp: nn.Module, lora: Lora | None, seed: int) -> None:
    """Unfreeze a head except its routers, or add adapters to its other linear layers, in float32: 16 bits would lose small
    updates."""
    if lora is None:
        mtp.unfreeze()
        for name, module in mtp.named_modules():
            if name.endswith(ROUTERS):
                module.freeze()
    else:
        mx.random.seed(seed)
        mtp.freeze()
        linear = [name for name, module in mtp.named_modules() if isinstance(module, nn.Linear | SwitchLinear)]
        linear_to_lora_layers(mtp, 0, lora.parameters(name for name in linear if not name.endswith(ROUTERS)))
    mtp.update(tree_map(lambda p: p.astype(mx.float32), mtp.trainable_parameters()))
