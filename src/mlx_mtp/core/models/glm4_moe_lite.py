"""GLM-4.7-Flash: mlx-lm's model, whose attention is latent, with its MTP head.

The cache has one latent [B, 1, N, R] for all heads, as its keys, and one rotated key [B, 1, N, Dr], as its values. A pass over
many tokens expands the latents to keys and values of each head. One over few moves the queries to the latents instead, as
mlx-lm's pass over one token: so a window rounds as plain decoding does, and reads the latents alone.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models import glm4_moe_lite as stock

from ...errors import MTPError
from ..layers.attention import Arrays, AttentionHeads, AttentionLayer, attend, split_heads
from ..layers.passes import Pass, current_pass
from ..pacing import MAX_WINDOW
from .family import Family, Weights
from .nextn import NAMES, NextnArgs, NextnModel


@dataclass
class ModelArgs(NextnArgs, stock.ModelArgs):
    mtp_num_hidden_layers: int = 0


class Attention(AttentionLayer, stock.Glm4MoeLiteDecoderLayer):
    @property
    def heads(self) -> AttentionHeads:
        """Those of a pass over few tokens, without the rotated part."""
        return AttentionHeads(self.self_attn.num_heads, 1, self.self_attn.kv_lora_rank)

    @property
    def row_sizes(self) -> dict[str, tuple[int, int]]:
        attention = self.self_attn
        return {"keys": (1, attention.kv_lora_rank), "values": (1, attention.qk_rope_head_dim)}

    def score_bytes(self, n: int) -> int:
        """Also the scores of the rotated part, and these with the mask."""
        return super().score_bytes(n) + 2 * self.heads.queries * n

    def context_bytes(self, n: int) -> int:
        """Keys and values of each head."""
        attention = self.self_attn
        return attention.num_heads * (attention.qk_nope_head_dim + attention.v_head_dim) * n

    def __call__(self, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
        if isinstance(mask, str):  # mlx-lm's layer takes arrays
            return self.run(x, mask, self.make_cache() if cache is None else cache, current_pass())
        return super().__call__(x, mask, cache)

    def project_queries(self, normed: mx.array) -> tuple[Arrays, Arrays]:
        attention = self.self_attn
        x = (
            attention.q_proj(normed)
            if attention.q_lora_rank is None
            else attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(normed)))
        )
        first, rotated = mx.split(split_heads(x, attention.num_heads), [attention.qk_nope_head_dim], axis=-1)
        return [first, rotated], []

    def project_keys(self, normed: mx.array) -> Arrays:
        attention = self.self_attn
        latent, rotated = mx.split(attention.kv_a_proj_with_mqa(normed), [attention.kv_lora_rank], axis=-1)
        return [attention.kv_a_layernorm(latent)[:, None], rotated[:, None]]

    def rotate(self, arrays: Arrays, offset: int | mx.array) -> Arrays:
        first, rotated = arrays
        return [first, self.self_attn.rope(rotated, offset=offset)]

    def attend(
        self, queries: Arrays, cached: Sequence[Any], mask: Any, cache: Any, first: int | mx.array, pass_: Pass
    ) -> mx.array:
        attention = self.self_attn
        query, rotated = queries
        latent, rotated_keys = cached
        T, N = query.shape[2], latent.shape[2]
        scores = (rotated * attention.scale) @ rotated_keys.swapaxes(-1, -2)  # [B, Hq, T, N]
        if isinstance(mask, str):  # causal
            mask = mx.arange(N) <= mx.arange(N - T, N)[:, None]
        if mask is not None:
            scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
        if T > MAX_WINDOW:
            keys, values = attention.embed_q(latent, transpose=False), attention.unembed_out(latent)
            return attend(query, keys, values, cache, attention.scale, scores, pass_)
        out = attend(attention.embed_q(query), latent, latent, cache, attention.scale, scores, pass_)
        return attention.unembed_out(out)


def with_parts(args: ModelArgs, head: Weights) -> Weights:
    """A head with the two parts of ``kv_b_proj`` that mlx-lm's attention has."""
    attention = {name: w for name, w in head.items() if name.startswith("layers.0.self_attn.")}
    others = {name: w for name, w in head.items() if name not in attention}
    args = copy(args)
    args.num_hidden_layers = 1
    named = {f"model.{name}": w for name, w in attention.items()}
    try:
        converted = stock.Model.sanitize(SimpleNamespace(args=args), named)
    except (KeyError, ValueError) as e:  # mlx-lm's, of shapes, and of quantized weights without biases
        raise MTPError(f"The MTP head does not fit this model: its kv_b_proj cannot be divided ({e}).") from e
    return others | {name.removeprefix("model."): w for name, w in converted.items()}


FAMILY = Family(
    text_args=ModelArgs,
    attention=Attention,
    names=NAMES,
    prepared=with_parts,
    drafter="glm4_moe_lite_mtp",
    tries_outputs=True,
    no_kv_bits="latent attention takes no quantized keys and values in mlx-lm",
    no_images="A model of type glm4_moe_lite takes text only: leave the images out.",
)


class Model(NextnModel, stock.Model):
    family = FAMILY
