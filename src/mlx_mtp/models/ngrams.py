"""N-gram embeddings: a layer adds, to each of its streams, vectors that belong to the last two and three tokens.

    tokens         a b c | d
    ids of d       hashes of (c, d) and of (b, c, d), several of each: rows of a table of hundreds of millions
    embedding      these rows, joined: [P]

An n-gram does not cross the end of a text, whose token also stands before the first one. The table is not loaded: rows are read
from the mapped files of the checkpoint. This is ``Qwen4ExpTextPLELayer`` of transformers (5.24).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import count, islice
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..layers.sparse import Norm

Array = Any  # an mx.array or np.ndarray
MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15  # of splitmix64
SEED_STEP = 10007
FLOAT_MODES = {
    (16, 4): "nvfp4",
    (32, 4): "mxfp4",
    (32, 8): "mxfp8",
}  # quantizations without biases, by group size and bits


def _splitmix64(x: int) -> int:
    x = (x + GAMMA) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


class NgramHash:
    """The ids of a text's n-grams in a layer's table.

    Args:
        args: The text arguments.
        place (int): The layer's place among those with n-gram embeddings.
    """

    def __init__(self, args: Any, place: int):
        self.eos: int = args.eos_token_id[0] if isinstance(args.eos_token_id, list) else args.eos_token_id
        self.n_previous, self.per_size = args.ngram_size - 1, args.heads_per_ngram
        half = max(((1 << 63) - 1) // max(args.vocab_size, 1) // 2, 1)
        seed = args.seed + SEED_STEP * place
        mixed = [_splitmix64((seed + GAMMA * (i + 1)) & MASK) for i in range(args.ngram_size)]
        self.multipliers = np.array([2 * (x % half) + 1 for x in mixed])
        n = self.n_previous * self.per_size  # rows of a token
        primes = filter(_is_prime, count(args.ngram_vocab_size_base))
        self.sizes = np.array([*islice(primes, n * place, n * (place + 1))])
        self.offsets = np.cumsum(self.sizes) - self.sizes
        self.n_rows = int(self.sizes.sum())

    def __call__(self, tokens: Array) -> Array:
        """Token ids after the ``n_previous`` before them, int64 [B, n_previous + T] -> ids [B, T, rows of a token]"""
        np_or_mx: Any = mx if isinstance(tokens, mx.array) else np
        multipliers, sizes, offsets = (np_or_mx.array(x) for x in (self.multipliers, self.sizes, self.offsets))
        T = tokens.shape[1] - self.n_previous
        previous = tokens[:, self.n_previous :]
        mixed, ids = previous * multipliers[0], []
        for i in range(1, self.n_previous + 1):
            before = tokens[:, self.n_previous - i :][:, :T]
            previous = before if i == 1 else np_or_mx.where(previous == self.eos, self.eos, before)
            mixed = mixed ^ (previous * multipliers[i])
            own = slice((i - 1) * self.per_size, i * self.per_size)
            ids.append(mixed[..., None] % sizes[own] + offsets[own])
        return np_or_mx.concatenate(ids, axis=-1)


class Quantized(NamedTuple):
    """The quantization of rows, as the arguments of ``mx.dequantize``."""

    group_size: int
    bits: int
    mode: str


class NgramTable:
    """The rows of a table, in mapped files or in memory.

    Args:
        parts (Sequence[Mapping[str, np.ndarray]]): The arrays of each part of the rows: ``weight`` and, if they are quantized,
          ``scales`` and ``biases``, each [n, ...]; bfloat16 as uint16.
        width (int): The numbers in a row.
        n_rows (int): The least number of rows.

    Raises:
        ValueError: The arrays are not those of such a table.
    """

    def __init__(self, parts: Sequence[Mapping[str, np.ndarray]], width: int, n_rows: int):
        self.parts, self.width = parts, width
        self.quantized = _quantization(parts[0], width)
        for j, part in enumerate(parts):
            own = {name: x.shape[1:] for name, x in part.items()}
            if own != {name: x.shape[1:] for name, x in parts[0].items()} or len({len(x) for x in part.values()}) > 1:
                raise ValueError(f"has other arrays in part {j} than in part 0")
        self.starts = np.cumsum([0] + [len(part["weight"]) for part in parts])
        if self.starts[-1] < n_rows:
            raise ValueError(f"has {self.starts[-1]} rows, not {n_rows}")
        self.arrays: dict[str, mx.array] | None = None  # all rows, in memory

    @property
    def nbytes(self) -> int:
        """The bytes held in memory."""
        return sum(x.nbytes for x in (self.arrays or {}).values())

    def load(self) -> None:
        """Read all rows into memory, a part at a time."""
        arrays = {}
        for name, first in self.parts[0].items():
            whole = mx.zeros((self.starts[-1].item(), *first.shape[1:]), mx.array(first[:1]).dtype)
            for start, part in zip(self.starts.tolist(), self.parts):
                whole[start : start + len(part[name])] = mx.array(part[name])
                mx.eval(whole)
            arrays[name] = whole
        self.arrays = arrays

    def __call__(self, ids: Array) -> mx.array:
        """Ids [...] -> rows [..., width]. For files, ids are on the host."""
        if self.arrays is not None:
            return self._values({name: x[ids] for name, x in self.arrays.items()})
        unique, where = np.unique(ids, return_inverse=True)  # ascending, as they are in the files
        of_part = np.searchsorted(self.starts, unique, side="right") - 1
        read: dict[str, list[np.ndarray]] = {name: [] for name in self.parts[0]}
        for j in np.unique(of_part):
            for name, x in self.parts[j].items():
                read[name].append(x[unique[of_part == j] - self.starts[j]])
        rows = self._values({name: mx.array(np.concatenate(x)) for name, x in read.items()})
        return rows[mx.array(where.reshape(ids.shape).astype(np.int32))]

    def _values(self, rows: Mapping[str, mx.array]) -> mx.array:
        """Rows as they are stored -> [..., width]"""
        if self.quantized is None:
            return _floats(rows["weight"])
        scales, biases = rows["scales"], rows.get("biases")
        if biases is not None:
            scales, biases = _floats(scales), _floats(biases)
        return mx.dequantize(rows["weight"], scales, biases, **self.quantized._asdict())


def _quantization(part: Mapping[str, np.ndarray], width: int) -> Quantized | None:
    """How rows are quantized; ``None`` if they are not."""
    (w, scales), described = (
        (part.get(name) for name in ("weight", "scales")),
        str({n: x.shape for n, x in part.items()}),
    )
    assert w is not None
    if all(x.ndim == 2 for x in part.values()):
        if part.keys() == {"weight"} and w.dtype != np.uint32 and w.shape[1] == width:
            return None
        if scales is not None and w.dtype == np.uint32 and width % scales.shape[1] == 0:
            group_size, bits = width // scales.shape[1], 32 * w.shape[1] // width
            mode = "affine" if "biases" in part else FLOAT_MODES.get((group_size, bits), "")
            if mode and (scales.dtype == np.uint8) == (mode != "affine") and bits * width == 32 * w.shape[1]:
                return Quantized(group_size, bits, mode)
    raise ValueError(f"has rows that are not {width} numbers, quantized or not ({described})")


def _floats(x: mx.array) -> mx.array:
    return x.view(mx.bfloat16) if x.dtype == mx.uint16 else x


class NgramEmbedding(nn.Module):
    """The part of a layer that makes vectors of its streams and of the n-gram embeddings of its tokens.

    Args:
        args: The text arguments.
    """

    def __init__(self, args: Any):
        super().__init__()
        H, n, P = args.hidden_size, args.hc_count, args.ple_embed_dim
        self.n_streams, self.kernel_size, self.dilation = n, args.ple_conv_kernel_size, args.ngram_size
        self.n_last = (self.kernel_size - 1) * self.dilation  # inputs of the convolution before a token that it takes
        self.key_proj = nn.Linear(P, n * H, bias=False)
        self.value_proj = nn.Linear(P, H, bias=False)
        self.norm_key, self.norm_query, self.norm_conv = (Norm(n * H, args.rms_norm_eps, n) for _ in range(3))
        self.conv1d = nn.Conv1d(n * H, n * H, self.kernel_size, dilation=self.dilation, groups=n * H, bias=False)


def add_ngrams(own: Any, x: mx.array, embeddings: mx.array, last: mx.array) -> tuple[mx.array, mx.array]:
    """
    Args:
        own (NgramEmbedding): The weights.
        x (mx.array): The streams, [B, T, n H].
        embeddings (mx.array): [B, T, P]
        last (mx.array): The last inputs of the convolution, [B, K, n H].

    Returns:
        Tuple[mx.array, mx.array]: The streams, and the inputs of the convolution, [B, K + T, n H].
    """
    streams, embeddings = (*x.shape[:2], own.n_streams, -1), embeddings.astype(x.dtype)
    keys, queries = own.norm_key(own.key_proj(embeddings)).reshape(streams), own.norm_query(x).reshape(streams)
    gate = (keys * queries).sum(axis=-1, keepdims=True) / math.sqrt(queries.shape[-1])
    gate = mx.sqrt(mx.maximum(mx.abs(gate), 1e-6)) * mx.sign(gate)
    values = (mx.sigmoid(gate) * own.value_proj(embeddings)[:, :, None]).reshape(x.shape)
    inputs = mx.concatenate([last, own.norm_conv(values)], axis=1)
    return x + values + nn.silu(own.conv1d(inputs)), inputs
