"""The multi-token-prediction head: one extra decoder layer, which predicts the token after next.

    input i: E[t_{i+1}] ── pre_fc_norm_embedding ──┐
                                                   ├── fc ── decoder layer ── norm ──> lm_head: a guess of t_{i+2}
             h_i ───────── pre_fc_norm_hidden ─────┘

h_i is the backbone's output after its final norm. Names and layouts are those of the published Qwen3.5, 3.6 and Qwen3-Next
checkpoints; the method is DeepSeek-V3's (arXiv:2412.19437, section 2.2), as in vLLM's qwen3_next_mtp.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ConcatenateKVCache

from ..caches.positions import Positions
from .attention import after_attention, before_attention, start_of
from .compiled import Compiler
from .passes import current_pass, in_pass, pass_of_head


class MTPModule(nn.Module):
    """The head: a decoder layer with attention, without the embedding and the lm_head that it shares with the backbone."""

    is_fed_normed = True  # whether a further draft is fed the output after the norm, or before
    pre_fc_norm_embedding: Any
    pre_fc_norm_hidden: Any
    norm: Any

    def __init__(self, args: Any, layer: nn.Module):
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.fc = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any = None) -> mx.array:
        """The embedding of the token after each position, and the position's hidden state, [B, T, H] each -> [B, T, H]

        The hidden state is the backbone's or, for a further draft, the head's own output.
        """
        return self.decode(self.combine(embeddings, hidden), cache)

    def last(self, embeddings: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """The output of the last position alone, [B, 1, H], for a draft: those before only add keys and values to the cache."""
        pass_ = current_pass()
        (layer,) = self.layers
        T = hidden.shape[1]
        start = start_of(cache)
        mask = create_attention_mask(hidden, cache)
        # The query's start is computed outside, since the CPU backend compiles a kernel for each number in a trace.
        starts = [*start, *(s + (T - 1) if T > 1 else s for s in start)]
        x, for_join, queries, keys, gates = pass_.call(_before_attention, self, embeddings, hidden, *starts)
        mask = mask[..., -1:, :] if isinstance(mask, mx.array) else None
        out = layer.through_cache(queries, keys, mask, cache, pass_, is_rotated=bool(start))
        return pass_.call(_after_attention, self, x, out, gates, for_join)

    def combine(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        """The input of the decoder layer, [B, T, H], from embeddings and hidden states [B, T, H]."""
        return self.fc(
            mx.concatenate([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], axis=-1)
        )

    def decode(self, x: mx.array, cache: Any = None) -> mx.array:
        """Run the decoder layer on the output of ``combine`` -> the head's output, [B, T, H]."""
        (layer,) = self.layers
        return self.fed(layer(x, mask=create_attention_mask(x, cache), cache=cache))

    def fed(self, out: mx.array) -> mx.array:
        """The head's output, which a further draft is fed, from that of the decoder layer, [B, T, H]."""
        return self.norm(out) if self.is_fed_normed else out

    def output(self, out: mx.array) -> mx.array:
        """The input of the output layer, [B, T, H], from the head's output."""
        return out if self.is_fed_normed else self.norm(out)


class DraftKVCache(ConcatenateKVCache):
    """The keys and values of a head that drafts at T positions in parallel: T verified ones, and T of each draft."""

    def update_and_fetch(self, keys: mx.array, values: mx.array, *index_keys: mx.array) -> tuple[mx.array, ...]:
        keys_and_values = super().update_and_fetch(keys, values)
        self.offset = self.keys.shape[-2] // keys.shape[-2]  # the position of the first draft in the next pass
        return *keys_and_values, *(x[:, :, :0] for x in index_keys)  # sparse attention selects all tokens

    def make_mask(self, n: int, **_: Any) -> mx.array:
        """[T, T + T for each draft before]: the verified positions up to this one, and its own drafts."""
        at = mx.arange(n)
        verified = at[:, None] >= at
        draft = at[:, None] == at
        return mx.concatenate([verified] + [draft] * self.offset, axis=1)


def _before_attention(mtp: Any, embeddings: mx.array, hidden: mx.array, *starts: mx.array) -> tuple[Any, ...]:
    """The head's part before attention, as ``attention.before_attention``. Only the last position has a query."""
    return before_attention(mtp.layers[0], mtp.combine(embeddings, hidden), *starts, last=True)


def _after_attention(mtp: Any, x: mx.array, out: mx.array, gates: Any, for_join: Any) -> mx.array:
    return mtp.fed(after_attention(mtp.layers[0], x, out, gates, for_join))


def has_head(model: Any) -> bool:
    """Whether a model, which may be mlx-lm's own, has the head."""
    return getattr(model, "mtp", None) is not None


def run_head(
    model: Any,
    hidden: mx.array,
    tokens: mx.array,
    cache: Any,
    embeddings: mx.array | None = None,
    positions: Positions | None = None,
    compiler: Compiler | None = None,
) -> mx.array:
    """A pass of a model's head over hidden states [B, T, H] and the token after each, [B, T] -> the last output, [B, 1, H]

    ``embeddings`` [B, T, H] are used in place of the tokens', and ``positions`` are those of a text with images.
    """
    pass_ = pass_of_head(hidden.shape[1], model.device, compiler, positions)
    if embeddings is None:
        # Not compiled: the CPU backend would compile a kernel for each place of a weight in a word of quantized weights.
        embeddings = model.model.embed_tokens(tokens)
    with in_pass(pass_):
        return model.mtp.last(embeddings, hidden, cache)
