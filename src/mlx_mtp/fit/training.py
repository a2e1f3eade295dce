"""Training the head on recorded texts, with mlx-lm's trainer."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.trainer import TrainingArgs, train
from mlx_lm.tuner.utils import build_schedule

from ..models.draft_lm_head import ROUTERS
from .loss import DraftLoss
from .recording import read

PAD_TO = 64  # fewer lengths are fewer graphs to compile
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Schedule:
    """How long to train, and how fast."""

    iters: int
    batch_size: int
    learning_rate: float
    steps_per_eval: int
    seed: int

    def optimizer(self) -> optim.Optimizer:
        """AdamW; the learning rate rises for a twentieth of the time, then falls along a cosine."""
        warmup = max(self.iters // 20, 1)
        decay = [self.learning_rate, max(self.iters - warmup, 1), self.learning_rate / 100]
        schedule = build_schedule({"name": "cosine_decay", "arguments": decay, "warmup": warmup})
        return optim.AdamW(learning_rate=schedule, betas=list(BETAS), bias_correction=True)


class Progress(TrainingCallback):  # type: ignore[misc]
    """Keeps the head with the lowest validation loss, and what a later run needs to go on, in one file.

    Args:
        mtp (nn.Module): The head.
        optimizer (Optimizer): Its optimizer.
        file (Path): The file. What it holds is taken over.
    """

    def __init__(self, mtp: nn.Module, optimizer: optim.Optimizer, file: Path):
        self.mtp, self.optimizer, self.file = mtp, optimizer, file
        self.iters, self.best_iters, self.best_loss, self.first_loss = 0, 0, float("inf"), float("nan")
        self.best = self._weights()
        if file.exists():
            self._resume()

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        iters, loss = self.start + val_info["iteration"], val_info["val_loss"]
        self.iters = iters
        if self.best_loss == float("inf"):
            self.first_loss = loss
        if loss < self.best_loss:
            self.best, self.best_loss, self.best_iters = self._weights(), loss, iters
        self._save()

    start = 0  # iterations of the runs before

    def _weights(self) -> dict[str, mx.array]:
        return dict(tree_flatten(self.mtp.trainable_parameters()))

    def _save(self) -> None:
        arrays = {f"head.{name}": w for name, w in self._weights().items()}
        arrays |= {f"best.{name}": w for name, w in self.best.items()}
        arrays |= {f"optimizer.{name}": w for name, w in tree_flatten(self.optimizer.state)}
        numbers = {"iters": self.iters, "best_iters": self.best_iters}
        numbers |= {"best_loss": self.best_loss, "first_loss": self.first_loss}
        part = self.file.with_name(f"part-{self.file.name}")
        mx.save_safetensors(str(part), arrays, metadata={name: repr(x) for name, x in numbers.items()})
        os.replace(part, self.file)

    def _resume(self) -> None:
        arrays, numbers = mx.load(str(self.file), return_metadata=True)
        mx.eval(arrays)  # the file is replaced later

        def part(prefix: str) -> list[tuple[str, mx.array]]:
            return [(name.removeprefix(prefix), w) for name, w in arrays.items() if name.startswith(prefix)]

        self.mtp.load_weights(part("head."), strict=False)
        self.optimizer.state = tree_unflatten(part("optimizer."))
        self.best = dict(part("best."))
        self.start = self.iters = int(numbers["iters"])
        self.best_iters, self.best_loss = int(numbers["best_iters"]), float(numbers["best_loss"])
        self.first_loss = float(numbers["first_loss"])
        print(f"Resuming at iteration {self.start}")


def train_head(
    mtp: nn.Module, loss: DraftLoss, train_files: Sequence[Path], valid_files: Sequence[Path], how: Schedule, file: Path
) -> Progress:
    """Train what is not frozen of a head, and leave it as it was best on the validation texts.

    An interrupt ends the training, not the program.

    Args:
        train_files (Sequence[Path]): Of ``record``.
        valid_files (Sequence[Path]): Of ``record``; the best head is chosen on them.
        file (Path): Where to keep what is needed to go on after the program was ended.
    """
    optimizer = how.optimizer()
    progress = Progress(mtp, optimizer, file)
    n_left = how.iters - progress.iters
    args = TrainingArgs(
        batch_size=how.batch_size,
        iters=n_left,
        val_batches=-1,
        steps_per_eval=how.steps_per_eval,
        steps_per_report=how.steps_per_eval,
        steps_per_save=n_left + 1,  # `progress` saves
        adapter_file=os.devnull,
    )
    first = progress.start * how.batch_size
    try:
        if n_left > 0:
            train(
                mtp,
                optimizer,
                train_files,
                valid_files,
                args,
                loss=loss,
                iterate_batches=partial(iterate_batches, first=first, shuffle_seed=how.seed),
                training_callback=progress,
            )
    except KeyboardInterrupt:
        print("\nInterrupted: the best head so far is measured. Interrupt again to end without one.")
    mtp.eval()
    mtp.load_weights(list(progress.best.items()), strict=False)
    return progress


def iterate_batches(
    dataset: Sequence[Path],
    batch_size: int,
    loop: bool = False,
    first: int = 0,
    shuffle_seed: int = 0,
    **_: Any,
) -> Iterator[tuple[mx.array, ...]]:
    """The batches of recorded texts, once in order, or with ``loop`` without end, shuffled anew each time.

    Args:
        first (int): Leave out this many texts, which a run before was trained on.

    Yields:
        Tuple[mx.array, ...]: The arguments of ``DraftLoss`` after the head.
    """
    if not loop:
        for i in range(0, len(dataset), batch_size):
            yield _batch([read(file) for file in dataset[i : i + batch_size]])
        return
    n = first
    while True:
        chosen = []
        for i in range(n, n + batch_size):
            epoch, place = divmod(i, len(dataset))
            order = np.random.default_rng((shuffle_seed, epoch)).permutation(len(dataset))
            chosen.append(dataset[order[place]])
        yield _batch([read(file) for file in chosen])
        n += batch_size


def _batch(texts: Sequence[dict[str, mx.array]]) -> tuple[mx.array, ...]:
    longest = max(len(text["tokens"]) for text in texts)
    longest += -longest % PAD_TO

    def stacked(name: str) -> mx.array:
        rows = (text[name] for text in texts)
        return mx.stack([mx.pad(x, [(0, longest - len(x))] + [(0, 0)] * (x.ndim - 1)) for x in rows])

    spans = mx.stack([mx.stack([text["n_prompt"], mx.array(len(text["tokens"]))]) for text in texts])  # [B, 2]
    return stacked("tokens"), stacked("hidden"), stacked("ids"), stacked("probabilities"), spans


def unfreeze(mtp: nn.Module) -> None:
    """Make a head trainable, in float32, but for its routers: an expert that is chosen less often learns less."""
    mtp.unfreeze()
    for name, module in mtp.named_modules():
        if name.endswith(ROUTERS):
            module.freeze()
    to_float32(mtp)


def to_float32(mtp: nn.Module) -> None:
    """Cast what is trained: small steps would be lost in 16 bits."""
    mtp.update(tree_map(lambda p: p.astype(mx.float32), mtp.trainable_parameters()))
