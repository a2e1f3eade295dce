"""Training the head with mlx-lm's trainer, on recorded states of the backbone.

The loss is the distance of the head's drafts from the backbone's predictions, for K drafts at each position of a text:

    position i, draft 1    hidden h_i, token t_i+1                  ->  a draft of t_i+2
    position i, draft d    the head's output for draft d - 1, t_i+d  ->  a draft of t_i+1+d

As in decoding, draft d of position i attends to the verified positions up to i and to the drafts of position i.

The loss of a draft is the Kullback-Leibler divergence from the backbone's distribution to the head's, as in DistillSpec
(arXiv:2310.08461), and drafts are weighted by position as in FastMTP (arXiv:2509.18362, equation 2). The drafts of all
positions are made in parallel, each from the head's own output, as in EAGLE-3's training-time test (arXiv:2503.01840).
"""

import io
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner import trainer
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.utils import build_schedule
from tqdm import tqdm

from ..checkpoint.heads.formats import load_tensors
from ..cli.display import say
from ..core.layers.mtp import DraftKVCache
from ..core.models.head_weights import ROUTERS
from ..core.models.mixin import MTPModel
from ..files import replacing
from .options import FitOptions
from .texts import Document, Split

TOP_K = 32  # the likeliest tokens of the backbone's distribution; the others have hardly any mass
MAX_LOGITS = 1 << 25  # computed at once: 128 MiB of float32
PAD_TO = 32  # as in mlx-lm: fewer lengths need fewer compiled graphs
BETAS = (0.9, 0.95)
DECAY = 0.6  # of the weights of drafts, from one position to the next, as in FastMTP


class DraftLoss:
    """The loss of a head on a batch, as ``mlx_lm.tuner.trainer.train`` takes it, with the embedding and the output layer of the
    backbone (its ``lm_head``, or the embedding where they are tied) and ``n_drafts`` drafts at each position.
    """

    def __init__(self, embedding: nn.Module, output_layer: nn.Module, n_drafts: int):
        self.embedding = embedding
        self.n_drafts = n_drafts
        self.output_layer: Any = output_layer
        dtype = (output_layer.scales if "scales" in output_layer else output_layer.weight).dtype
        self.dtype = mx.float32 if dtype == mx.float16 else dtype  # in which the gradients of many positions would be 0
        self.weights = [DECAY**d / sum(DECAY**i for i in range(n_drafts)) for d in range(n_drafts)]  # they sum to 1

    def __call__(
        self,
        mtp: Any,
        tokens: mx.array,  # [B, T]
        hidden: mx.array,  # the backbone's hidden states, [B, T, H]
        ids: mx.array,  # the likeliest tokens after each position, [B, T, k]
        probabilities: mx.array,  # the backbone's probabilities of these tokens, [B, T, k]
        spans: mx.array,  # the number of tokens in a text's prompt, and in the whole text, [B, 2]
    ) -> tuple[mx.array, mx.array]:
        """The mean divergence of a draft in nats, weighted by position; the number of positions."""
        at = mx.arange(tokens.shape[1])
        out = hidden
        cache = DraftKVCache()
        n_prompt = spans[:, :1]
        length = spans[:, 1:]
        answered = at >= n_prompt - 1  # [B, T]: drafts begin at the last token of the prompt
        losses = []
        n_counted = []
        for d in range(1, self.n_drafts + 1):
            # The input of position i is token i + d. `roll` moves tokens from the front to positions that do not count.
            out = mtp(self.embedding(mx.roll(tokens, -d, 1)), out, cache)  # [B, T, H]
            counts = answered & (at + d < length)
            divergence = self.divergence(mtp.output(out), mx.roll(ids, -d, 1), mx.roll(probabilities, -d, 1))
            n_counted.append(counts.sum())
            losses.append(self.weights[d - 1] * (divergence * counts).sum() / mx.maximum(n_counted[-1], 1))
        return sum(losses[1:], losses[0]), n_counted[0]

    def divergence(self, out: mx.array, ids: mx.array, probabilities: mx.array) -> mx.array:
        """[B, T, H], ids and probabilities [B, T, k] -> nats [B, T]. Few positions at a time have logits."""
        B, T, _ = out.shape
        flat = [x.reshape(B * T, -1) for x in (out, ids, probabilities)]
        n = max(MAX_LOGITS // self.output_layer.weight.shape[0], 1)
        some = mx.checkpoint(self._divergence)
        return mx.concatenate([some(*(x[i : i + n] for x in flat)) for i in range(0, B * T, n)]).reshape(B, T)

    def _divergence(self, out: mx.array, ids: mx.array, probabilities: mx.array) -> mx.array:
        """[n, H], [n, k], [n, k] -> [n]"""
        layer = self.output_layer
        logits = (layer.as_linear if hasattr(layer, "as_linear") else layer)(out.astype(self.dtype))
        logits = logits.astype(mx.float32)  # [n, V]
        chosen = mx.take_along_axis(logits, mx.stop_gradient(ids), axis=-1)
        logprobs = chosen - mx.logsumexp(logits, axis=-1, keepdims=True)
        p = mx.stop_gradient(probabilities).astype(mx.float32)
        return (p * (mx.log(mx.maximum(p, 1e-9)) - logprobs)).sum(-1)


def train(model: Any, parts: Split, how: FitOptions, work: Path) -> int:
    """Record the texts, and train the head of a model, which keeps its dtype. Return the iterations of the best head."""
    folder = work / "states"
    n = how.batch_size
    length = how.max_seq_length
    train_files = record(model, parts.train, folder, "train", n, length)
    valid_files = record(model, parts.valid, folder, "valid", n, length)
    dtypes = tree_map(lambda p: p.dtype, model.mtp.parameters())
    model.freeze()
    make_trainable(model.mtp)
    loss = DraftLoss(model.model.embed_tokens, model.output_layer, how.drafts)
    best = train_head(model.mtp, loss, train_files, valid_files, how)
    model.mtp.update(tree_map(lambda p, dtype: p.astype(dtype), model.mtp.parameters(), dtypes))
    losses = f"{best.losses[0]:.3f} -> {min(best.losses):.3f}" if best.losses else "unknown"
    say(f"Best at iteration {best.iters}: validation loss {losses}, peak memory {mx.get_peak_memory() / 1e9:.2f} GB")
    return best.iters


def record(
    model: MTPModel, texts: Sequence[Document], folder: Path, name: str, batch_size: int, length: int
) -> list[Path]:
    """Write a file for each text and its last ``length`` positions, and keep those of an earlier run.

    A file has ``tokens`` [T], ``hidden`` [T, H], ``n_prompt`` [], and the likeliest ``ids`` behind each and their
    ``probabilities``, [T, k].
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}-{i:05d}.safetensors" for i in range(len(texts))]
    missing = sorted((len(text.tokens), file, text) for file, text in zip(files, texts) if not file.exists())
    n_tokens = sum(n for n, *_ in missing)
    n_rows = max(MAX_LOGITS // model.output_layer.weight.shape[0], 1)  # at once
    with tqdm(desc=f"Recording {name}", unit=" tokens", total=n_tokens, disable=None) as progress:
        for batch in (missing[i : i + batch_size] for i in range(0, len(missing), batch_size)):
            longest, *_ = batch[-1]
            tokens = mx.array([text.tokens + [0] * (longest - n) for n, _, text in batch], mx.uint32)  # [B, T]
            _, hidden = model(tokens, return_hidden=True)  # [B, T, H]; logits are not computed
            mx.eval(hidden)
            for b, (n, file, text) in enumerate(batch):
                first = max(n - length, 0)
                tops = [_top_k(model, hidden[b, i : min(i + n_rows, n)]) for i in range(first, n, n_rows)]
                ids, probabilities = (mx.concatenate([*x]) for x in zip(*tops))
                arrays = {"tokens": tokens[b, first:n], "hidden": hidden[b, first:n]}
                arrays |= {"ids": ids, "probabilities": probabilities}
                with replacing(file) as new:
                    mx.save_safetensors(str(new), arrays | {"n_prompt": mx.array(max(text.n_prompt - first, 0))})
                progress.update(n)
            mx.clear_cache()
    return files


def _top_k(model: Any, hidden: mx.array) -> tuple[mx.array, mx.array]:
    """hidden [T, H] -> ids [T, k], probabilities [T, k]"""
    logits = model.logits(hidden[None])[0].astype(mx.float32)  # [T, V]
    k = min(TOP_K, logits.shape[-1])
    ids = mx.argpartition(-logits, kth=k - 1, axis=-1)[:, :k]
    probabilities = mx.softmax(mx.take_along_axis(logits, ids, axis=-1), axis=-1).astype(mx.float16)
    mx.eval(ids, probabilities)  # one chunk of logits at a time
    return ids, probabilities


class Best(TrainingCallback):
    """Keeps the head with the lowest validation loss, its ``weights`` after ``iters`` iterations, and all ``losses``."""

    def __init__(self, mtp: nn.Module):
        self.mtp = mtp
        self.out = sys.stdout
        self.iters, self.weights, self.losses = 0, dict(tree_flatten(mtp.trainable_parameters())), list[float]()

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        iters = val_info["iteration"]
        loss = val_info["val_loss"]
        if loss < min(self.losses, default=math.inf):
            self.weights = dict(tree_flatten(self.mtp.trainable_parameters()))
            self.iters = iters
        self.losses.append(loss)
        tqdm.write(f"[INFO] Iteration {iters}: validation loss {loss:.3f}", self.out)


def train_head(
    mtp: nn.Module, loss: DraftLoss, train_files: Sequence[Path], valid_files: Sequence[Path], how: FitOptions
) -> Best:
    """Train the unfrozen weights of a head, and leave it with the lowest validation loss. Ctrl-C ends the training alone."""
    best = Best(mtp)
    warmup = max(how.iters // 20, 1)
    decay = [how.learning_rate, max(how.iters - warmup, 1), how.learning_rate / 100]
    schedule = build_schedule({"name": "cosine_decay", "arguments": decay, "warmup": warmup})
    optimizer = optim.AdamW(learning_rate=schedule, betas=list(BETAS), bias_correction=True)
    with (
        TemporaryDirectory() as folder,
        tqdm(desc="Training", total=how.iters, disable=None) as iterations,
        redirect_stdout(io.StringIO()),  # mlx-lm writes lines with the codes of colors, to files as well
    ):
        args = trainer.TrainingArgs(
            batch_size=how.batch_size,
            iters=how.iters,
            val_batches=-1,
            steps_per_eval=how.steps_per_eval,
            steps_per_report=how.steps_per_eval,
            adapter_file=f"{folder}/last.safetensors",  # not used
            steps_per_save=how.iters + 1,
        )
        batches = partial(iterate_batches, seed=how.seed, on_next=iterations.update)
        functions: Any = {"loss": loss, "iterate_batches": batches, "training_callback": best}
        try:
            trainer.train(mtp, optimizer, train_files, valid_files, args, **functions)
            iterations.update()  # the last batch, after which no other is requested
        except KeyboardInterrupt:
            tqdm.write("Interrupted: the best head so far is measured. Interrupt again to end without one.", best.out)
    mtp.eval()
    mtp.load_weights(list(best.weights.items()), strict=False)
    return best


def iterate_batches(
    dataset: Sequence[Path],
    batch_size: int,
    loop: bool = False,
    seed: int = 0,
    on_next: Callable[[], object] = lambda: None,
    **_: Any,
) -> Iterator[tuple[mx.array, ...]]:
    """The batches of recorded texts for ``DraftLoss``: once in order, or with ``loop`` endlessly in random order."""
    order = iter(range(len(dataset)))
    if loop:
        rng = np.random.default_rng(seed)
        order = chain.from_iterable(rng.permutation(len(dataset)).tolist() for _ in count())
    while texts := [load_tensors(dataset[i]) for i in islice(order, batch_size)]:
        longest = max(len(text["tokens"]) for text in texts)
        longest += -longest % PAD_TO
        batch = []
        for name in ("tokens", "hidden", "ids", "probabilities"):
            rows = (text[name] for text in texts)
            batch.append(mx.stack([mx.pad(x, [(0, longest - len(x))] + [(0, 0)] * (x.ndim - 1)) for x in rows]))
        spans = [mx.stack([text["n_prompt"], mx.array(len(text["tokens"]))]) for text in texts]
        yield *batch, mx.stack(spans)
        if loop:
            on_next()


def make_trainable(mtp: nn.Module) -> None:
    """Unfreeze a head except what selects experts or tokens, in float32: 16 bits would lose small updates."""
    mtp.unfreeze()
    for name, module in mtp.named_modules():
        if name.endswith((*ROUTERS, "indexer")):
            module.freeze()
    mtp.update(tree_map(lambda p: p.astype(mx.float32), mtp.trainable_parameters()))
