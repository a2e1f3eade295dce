"""Sparse attention: the tokens that an indexer selects for each query, in blocks.

    raw keys        k0 k1 k2 k3 | k4 k5 k6 k7 | k8 k9 ka kb | kc kd       of the indexer, kept for all tokens
    summaries          s0       |     s1      |     s2      |             the mean of each complete block, normed and rotated
    query at d      its best blocks by score, up to the budget, and the tokens kc, kd after the last complete block

While the budget has room for all complete blocks of a text, attention is plain. This is Qwen's sparse attention, as in
``Qwen4ExpTextQSAIndexer`` of transformers (5.24).
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Norm(nn.Module):
    """An RMSNorm with the weight 1 + w, for each of ``n_groups`` parts of the last axis; in float32, rounded once."""

    def __init__(self, size: int, eps: float, n_groups: int = 1):
        super().__init__()
        self.weight = mx.zeros(size)
        self.eps = eps
        self.n_groups = n_groups

    def __call__(self, x: mx.array) -> mx.array:
        weight = 1.0 + self.weight.astype(mx.float32)
        if self.n_groups == 1:
            return mx.fast.rms_norm(x, weight, self.eps).astype(x.dtype)
        groups = x.astype(mx.float32).reshape(*x.shape[:-1], self.n_groups, -1)
        return (mx.fast.rms_norm(groups, None, self.eps).reshape(x.shape) * weight).astype(x.dtype)


class Indexer(nn.Module):
    def __init__(self, args: Any):
        super().__init__()
        self.n_heads, self.head_dim = args.indexer_n_heads, args.indexer_head_dim
        self.block_size = args.indexer_compress_ratio  # tokens
        self.n_blocks = args.indexer_budget // self.block_size  # the blocks that a query selects
        self.index_qk_proj = nn.Linear(args.hidden_size, (self.n_heads + 1) * self.head_dim, bias=False)
        self.q_layernorm = Norm(self.head_dim, args.rms_norm_eps)
        self.k_layernorm = Norm(self.head_dim, args.rms_norm_eps)

    def __call__(self, normed: mx.array) -> tuple[mx.array, mx.array]:
        """The input of attention [B, T, H] -> raw queries [B, Hi, T, D] and keys [B, 1, T, D]"""
        B, T, _ = normed.shape
        both = self.index_qk_proj(normed).reshape(B, T, self.n_heads + 1, self.head_dim).transpose(0, 2, 1, 3)
        return both[:, :-1], both[:, -1:]

    def select(self, rope: Any, queries: mx.array, keys: mx.array, offset: int | mx.array) -> mx.array:
        """The tokens that each query attends to, [B or 1, 1, T, N], by the raw keys of all tokens, [B, 1, N, D].

        ``rope`` is that of the layer's attention, and ``offset`` the index of the first query, also [B].
        """
        T, N, size = queries.shape[2], keys.shape[2], self.block_size
        rotated = rope(self.q_layernorm(queries), offset=offset)
        products = rotated.astype(mx.float32) @ self._summaries(rope, keys).astype(mx.float32).swapaxes(-1, -2)
        scores = mx.maximum(products, 0).sum(axis=1)  # [B, T, N / size], up to a factor
        at = mx.arange(T) + mx.array(offset).reshape(-1, 1)  # the index of each query, [B or 1, T]
        n_complete = (at + 1) // size
        scores = mx.where(mx.arange(N // size) < n_complete[..., None], scores, -mx.inf)  # [B, T, N / size]
        columns = mx.arange(N)
        chosen = mx.pad(mx.repeat(_largest(scores, self.n_blocks), size, axis=-1), [(0, 0), (0, 0), (0, N % size)])
        chosen = chosen | (columns >= size * n_complete[..., None])  # [B, T, N]
        return (chosen & (columns <= at[..., None]))[:, None]

    def _summaries(self, rope: Any, keys: mx.array) -> mx.array:
        """Raw keys [B, 1, N, D] -> the summaries of the blocks, [B, 1, N / size, D]"""
        B, _, N, D = keys.shape
        n, size = N // self.block_size, self.block_size
        means = keys[:, :, : n * size].reshape(B, n, size, D).astype(mx.float32).mean(axis=2).astype(keys.dtype)
        starts = mx.tile(size * mx.arange(n), B)
        # Blocks as the rows of a batch, since positions of one row are consecutive.
        return rope(self.k_layernorm(means).reshape(B * n, 1, 1, D), offset=starts).reshape(B, 1, n, D)


def _largest(scores: mx.array, n: int) -> mx.array:
    """Whether each score [..., m] is among the n largest. Of equal ones, such as zeros, those of the latest blocks are."""
    k = scores.shape[-1] - n
    least = mx.partition(scores, k, axis=-1)[..., k : k + 1]  # the n-th largest
    above, equal = scores > least, scores == least
    n_equal = mx.cumsum(equal.astype(mx.int32), axis=-1, reverse=True)  # the equal ones from this block on
    return above | (equal & (n_equal <= n - above.sum(axis=-1, keepdims=True)))
