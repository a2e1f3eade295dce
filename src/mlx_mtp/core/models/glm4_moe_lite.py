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

from ..layers.attention import Arrays, AttentionHeads, AttentionLayer, attend, split_heads
from ..layers.mtp import has_head
from ..layers.passes import Pass, current_pass
from ..pacing import MAX_WINDOW
from .family import Family
from .mixin import TokensOnly
from .nextn import NAMES, NextnArgs


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
        own = self.self_attn
        return {"keys": (1, own.kv_lora_rank), "values": (1, own.qk_rope_head_dim)}

    def score_bytes(self, n: int) -> int:
        """Also the scores of the rotated part, and these with the mask."""
        return super().score_bytes(n) + 2 * self.heads.queries * n

    def context_bytes(self, n: int) -> int:
        """Keys and values of each head."""
        own = self.self_attn
        return own.num_heads * (own.qk_nope_head_dim + own.v_head_dim) * n

    def __call__(self, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
        if isinstance(mask, str):  # mlx-lm's layer takes arrays
            return self.run(x, mask, self.make_cache() if cache is None else cache, current_pass())
        return super().__call__(x, mask, cache)

    def project_queries(self, normed: mx.array) -> tuple[Arrays, Arrays]:
        own = self.self_attn
        x = own.q_proj(normed) if own.q_lora_rank is None else own.q_b_proj(own.q_a_layernorm(own.q_a_proj(normed)))
        first, rotated = mx.split(split_heads(x, own.num_heads), [own.qk_nope_head_dim], axis=-1)
        return [first, rotated], []

    def project_keys(self, normed: mx.array) -> Arrays:
        own = self.self_attn
        latent, rotated = mx.split(own.kv_a_proj_with_mqa(normed), [own.kv_lora_rank], axis=-1)
        return [own.kv_a_layernorm(latent)[:, None], rotated[:, None]]

    def rotate(self, arrays: Arrays, offset: int | mx.array) -> Arrays:
        first, rotated = arrays
        return [first, self.self_attn.rope(rotated, offset=offset)]

    def attend(
        self, queries: Arrays, held: Sequence[Any], mask: Any, cache: Any, first: int | mx.array, this: Pass
    ) -> mx.array:
        own = self.self_attn
        query, rotated = queries
        latent, rotated_keys = held
        T, N = query.shape[2], latent.shape[2]
        scores = (rotated * own.scale) @ rotated_keys.swapaxes(-1, -2)  # [B, Hq, T, N]
        if isinstance(mask, str):  # causal
            mask = mx.arange(N) <= mx.arange(N - T, N)[:, None]
        if mask is not None:
            scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
        if T > MAX_WINDOW:
            keys, values = own.embed_q(latent, transpose=False), own.unembed_out(latent)
            return attend(query, keys, values, cache, own.scale, scores, this)
        out = attend(own.embed_q(query), latent, latent, cache, own.scale, scores, this)
        return own.unembed_out(out)


FAMILY = Family(
    text_args=ModelArgs,
    attention=Attention,
    names=NAMES,
    drafter="glm4_moe_lite_mtp",
    tries_outputs=True,
    no_kv_bits="latent attention takes no quantized keys and values in mlx-lm",
    no_images="A model of type glm4_moe_lite takes text only: leave the images out.",
)


class Model(TokensOnly, stock.Model):
    family = FAMILY

    def prepared(self, head: dict[str, mx.array]) -> dict[str, mx.array]:
        """With the two parts of ``kv_b_proj`` that mlx-lm's attention has."""
        args = copy(self.args)
        args.num_hidden_layers = 1
        attention = {name: w for name, w in head.items() if name.startswith("layers.0.self_attn.")}
        others = {name: w for name, w in head.items() if name not in attention}
        named = {f"model.{name}": w for name, w in attention.items()}
        converted = stock.Model.sanitize(SimpleNamespace(args=args), named)
        return others | {name.removeprefix("model."): w for name, w in converted.items()}

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        group = group or mx.distributed.init()
        super().shard(group)
        if has_head(self):
            stock.Model.shard(SimpleNamespace(model=self.mtp), group)
