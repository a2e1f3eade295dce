"""N-gram embeddings: a layer adds, to each of its streams, vectors that belong to the last two and three tokens.

    tokens         a b c | d
    ids of d       hashes of (c, d) and of (b, c, d), several of each: rows of a table of hundreds of millions
    embedding      these rows, joined: [P]

An n-gram does not cross the end of a text, whose token also stands before the first one. The table is not loaded: rows are read
from the files of the checkpoint. This is ``Qwen4ExpTextPLELayer`` of transformers (5.24).
"""

import math
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...errors import MTPError
from ..layers.sparse import Norm

Array = Any  # an mx.array or np.ndarray
Quantized = dict[str, Any]  # the quantization of rows, as the arguments of ``mx.dequantize``
MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15  # of splitmix64
SEED_STEP = 10007
BLOCK = 64 << 20  # bytes of rows that are read at once where all are
# Quantizations without biases, by group size and bits
FLOAT_MODES = {(16, 4): "nvfp4", (32, 4): "mxfp4", (32, 8): "mxfp8"}


def _splitmix64(x: int) -> int:
    x = (x + GAMMA) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


class NgramHash:
    """The ids of a text's n-grams in the table of a layer, given its place among those with n-gram embeddings."""

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
        mixed = previous * multipliers[0]
        ids = []
        for i in range(1, self.n_previous + 1):
            before = tokens[:, self.n_previous - i :][:, :T]
            previous = before if i == 1 else np_or_mx.where(previous == self.eos, self.eos, before)
            mixed = mixed ^ (previous * multipliers[i])
            of_size = slice((i - 1) * self.per_size, i * self.per_size)
            ids.append(mixed[..., None] % sizes[of_size] + offsets[of_size])
        return np_or_mx.concatenate(ids, axis=-1)


class NgramTable:
    """A table of n-gram embeddings, whose rows are read when they are used. An MTPError if the stored rows do not fit."""

    def __init__(self, rows: Any, width: int, n_rows: int):
        self.rows = rows
        self.quantized = _quantization(rows.layout, width)
        if len(rows) < n_rows:
            raise MTPError(f"has {len(rows)} rows, not {n_rows}")
        self.arrays: dict[str, mx.array] | None = None  # all rows, once they are in memory

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.arrays or {}).values())

    def load(self) -> None:
        arrays = {}
        for name, (width, dtype) in self.rows.layout.items():
            arrays[name] = mx.zeros((len(self.rows), width), mx.array(np.zeros(1, dtype)).dtype)
        for begin, end in self.blocks(0, len(self.rows)):
            for name, x in self.rows.read_range(begin, end).items():
                arrays[name][begin:end] = mx.array(x)
            mx.eval(arrays)
        self.arrays = arrays

    def blocks(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Ranges of rows that take little memory."""
        n = BLOCK // sum(width * np.dtype(dtype).itemsize for width, dtype in self.rows.layout.values())
        for i in range(begin, end, n):
            yield i, min(i + n, end)

    def __call__(self, ids: Array) -> mx.array:
        """Ids [...] -> rows [..., width]. Unless the rows are in memory, ids are on the host."""
        if self.arrays is not None:
            return self.values({name: x[mx.array(ids)] for name, x in self.arrays.items()})
        unique, where = np.unique(ids, return_inverse=True)
        values = self.values({name: mx.array(x) for name, x in self.rows.read(unique).items()})
        return values[mx.array(where.reshape(ids.shape).astype(np.int32))]

    def values(self, rows: Mapping[str, mx.array]) -> mx.array:
        """Rows as they are stored -> [..., width]"""
        if self.quantized is None:
            return floats(rows["weight"])
        scales, biases = rows["scales"], rows.get("biases")
        if biases is not None:
            scales, biases = floats(scales), floats(biases)
        return mx.dequantize(rows["weight"], scales, biases, **self.quantized)


def _quantization(layout: Mapping[str, tuple[int, Any]], width: int) -> Quantized | None:
    """How rows are quantized; ``None`` if they are not."""
    (n, dtype), (n_groups, of_scales) = (layout.get(name, (0, None)) for name in ("weight", "scales"))
    if layout.keys() == {"weight"} and n == width and dtype != np.uint32:
        return None
    if n_groups > 0 and width % n_groups == 0 and dtype == np.uint32 and (32 * n) % width == 0:
        group_size, bits = width // n_groups, 32 * n // width
        mode = "affine" if layout.get("biases") == layout["scales"] else FLOAT_MODES.get((group_size, bits))
        if mode is not None and (mode == "affine") == (of_scales != np.uint8):
            return {"group_size": group_size, "bits": bits, "mode": mode}
    found = ", ".join(f"{name} of {n} {np.dtype(dtype).name}" for name, (n, dtype) in layout.items())
    raise MTPError(f"has rows that are not {width} numbers, quantized or not ({found})")


def floats(x: mx.array) -> mx.array:
    """bfloat16 from the uint16 in which NumPy reads it; others as they are."""
    return x.view(mx.bfloat16) if x.dtype == mx.uint16 else x


class NgramEmbedding(nn.Module):
    """The part of a layer that makes vectors of its streams and of the n-gram embeddings of its tokens."""

    def __init__(self, args: Any):
        super().__init__()
        H, n, P = args.hidden_size, args.hc_count, args.ple_embed_dim
        self.n_streams, self.kernel_size, self.dilation = n, args.ple_conv_kernel_size, args.ngram_size
        self.n_last = (self.kernel_size - 1) * self.dilation  # inputs of the convolution before a token that it takes
        self.key_proj = nn.Linear(P, n * H, bias=False)
        self.value_proj = nn.Linear(P, H, bias=False)
        self.norm_key, self.norm_query, self.norm_conv = (Norm(n * H, args.rms_norm_eps, n) for _ in range(3))
        self.conv1d = nn.Conv1d(n * H, n * H, self.kernel_size, dilation=self.dilation, groups=n * H, bias=False)


def add_ngrams(module: Any, x: mx.array, embeddings: mx.array, last: mx.array) -> tuple[mx.array, mx.array]:
    """Streams x [B, T, n H], embeddings [B, T, P] and the last inputs of the convolution [B, K, n H] -> streams, and inputs."""
    streams = (*x.shape[:2], module.n_streams, -1)
    embeddings = embeddings.astype(x.dtype)
    keys = module.norm_key(module.key_proj(embeddings)).reshape(streams)
    queries = module.norm_query(x).reshape(streams)
    gate = (keys * queries).sum(axis=-1, keepdims=True) / math.sqrt(queries.shape[-1])
    gate = mx.sqrt(mx.maximum(mx.abs(gate), 1e-6)) * mx.sign(gate)
    values = (mx.sigmoid(gate) * module.value_proj(embeddings)[:, :, None]).reshape(x.shape)
    inputs = mx.concatenate([last, module.norm_conv(values)], axis=1)
    return x + values + nn.silu(module.conv1d(inputs)), inputs
