"""Recording of the backbone's hidden states and predictions on disk, so that a training step runs only the head."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..cli.display import bar
from ..files import save_atomic
from ..models.protocol import MTPModel
from .texts import Text

TOP_K = 32  # the likeliest tokens of the backbone's distribution; the others have hardly any mass
ROWS = 1 << 25  # logits that are computed at once


def bytes_per_token(model: MTPModel) -> int:
    """The bytes of a token on disk: its hidden state, and the ids and probabilities of the likeliest next tokens."""
    embedding = model.model.embed_tokens(mx.array([0]))  # [1, H]
    return int(embedding.nbytes + TOP_K * (mx.uint32.size + mx.float16.size) + mx.uint32.size)


def record(model: MTPModel, texts: Sequence[Text], folder: Path, name: str, batch_size: int, length: int) -> list[Path]:
    """Write a file for each text, and keep the files of an earlier run.

    Args:
        batch_size (int): The number of texts in a pass of the backbone.
        length (int): The number of positions to keep of a longer text, from its end: a head can start within a text.

    Returns:
        List[Path]: The files, see ``read``.
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


def read(file: Path) -> dict[str, mx.array]:
    """
    Returns:
        Dict[str, mx.array]: ``tokens`` [T], ``hidden`` [T, H], the likeliest ``ids`` [T, k] after each position and their
          ``probabilities`` [T, k], which sum to 1, and ``n_prompt`` [].
    """
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    return weights


def _states(model: MTPModel, texts: Sequence[Text], length: int) -> Iterator[dict[str, mx.array]]:
    """Run the backbone over texts in one batch, padded on the right. Return the content of ``read`` for each."""
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
