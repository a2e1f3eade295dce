"""Qwen3-Next: mlx-lm's model with the MTP head and with layers that can roll back."""

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.distributed import shard_linear
from mlx_lm.models import qwen3_next as stock

from ..layers.attention import GatedAttentionLayer
from ..layers.mtp import has_head
from ..layers.recurrence import RecurrentLayer
from . import qwen3_5
from .mixin import TokensOnly
from .shard import shard_layers, shard_recurrent_layer


@dataclass
class ModelArgs(stock.ModelArgs):
    mtp_num_hidden_layers: int = 0


class Attention(GatedAttentionLayer, stock.Qwen3NextDecoderLayer):
    pass


class Recurrence(RecurrentLayer, stock.Qwen3NextDecoderLayer):
    def project(self, normed: mx.array) -> tuple[mx.array, ...]:
        B, T, _ = normed.shape
        delta = self.linear_attn
        qkvz, ba = delta.in_proj_qkvz(normed), delta.in_proj_ba(normed)
        q, k, v, z, b, a = delta.fix_query_key_value_ordering(qkvz, ba)
        return mx.concatenate([t.reshape(B, T, -1) for t in (q, k, v)], axis=-1), z, a, b


FAMILY = replace(qwen3_5.FAMILY, text_args=ModelArgs, attention=Attention, recurrence=Recurrence, separates_head=True)


class Model(TokensOnly, stock.Model):
    family = FAMILY
    lm_head: Any

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        """Keep this rank's part of each layer, including the head's. mlx-lm's Qwen3-Next (0.32.2) has no ``shard``."""
        group = group or mx.distributed.init()
        if not self.args.tie_word_embeddings:
            self.lm_head = shard_linear(self.lm_head, "all-to-sharded", group=group)
            self.sharding_group = group
        for layer in self.layers:
            if layer.is_linear:
                shard_recurrent_layer(layer, group)
        shard_layers([layer for layer in self.layers if not layer.is_linear], group)
        if has_head(self):
            shard_layers(self.mtp.layers, group)
