"""The loss of a head: the distance of its drafts from the backbone's predictions, for K drafts at each position of a text.

    position i, draft 1    hidden h_i, token t_i+1                  ->  a draft of t_i+2
    position i, draft d    the head's output for draft d - 1, t_i+d  ->  a draft of t_i+1+d

As in decoding, draft d of position i attends to the verified positions up to i and to the drafts of position i.

The loss of a draft is the Kullback-Leibler divergence from the backbone's distribution to the head's, as in DistillSpec
(arXiv:2310.08461), and drafts are weighted by position as in FastMTP (arXiv:2509.18362, equation 2). The drafts of all
positions are made in parallel, each from the head's own output, as in EAGLE-3's training-time test (arXiv:2503.01840).
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ConcatenateKVCache

DECAY = 0.6  # of the weights of drafts, from one position to the next, as in FastMTP
LOGITS = 1 << 25  # computed at once: 128 MiB of float32


class DraftKVCache(ConcatenateKVCache):
    """The keys and values of a head that drafts at T positions in parallel: T verified ones, and T of each draft."""

    def update_and_fetch(self, keys: mx.array, values: mx.array, *index_keys: mx.array) -> tuple[mx.array, ...]:
        keys_and_values = super().update_and_fetch(keys, values)
        self.offset = self.keys.shape[-2] // keys.shape[-2]  # the position of the first draft in the next pass
        return *keys_and_values, *(x[:, :, :0] for x in index_keys)  # sparse attention selects all tokens

    def make_mask(self, n: int, **_: Any) -> mx.array:
        """[T, T + T for each draft before]: the verified positions up to this one, and its own drafts."""
        at = mx.arange(n)
        verified, own = at[:, None] >= at, at[:, None] == at
        return mx.concatenate([verified] + [own] * self.offset, axis=1)


class DraftLoss:
    """The loss of a head on a batch, as ``mlx_lm.tuner.trainer.train`` takes it, with the embedding and the output layer of the
    backbone (its ``lm_head``, or the embedding where they are tied) and ``n_drafts`` drafts at each position.
    """

    def __init__(self, embedding: nn.Module, output_layer: nn.Module, n_drafts: int):
        self.embedding, self.n_drafts = embedding, n_drafts
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
        at, out, cache = mx.arange(tokens.shape[1]), hidden, DraftKVCache()
        n_prompt, length = spans[:, :1], spans[:, 1:]
        answered = at >= n_prompt - 1  # [B, T]: drafts begin at the last token of the prompt
        losses, n_counted = [], []
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
        n = max(LOGITS // self.output_layer.weight.shape[0], 1)
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
