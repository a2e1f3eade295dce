"""GLM-4.5, 4.6 and 4.7: mlx-lm's model with its MTP head."""

from dataclasses import dataclass
from types import SimpleNamespace

import mlx.core as mx
from mlx_lm.models import glm4_moe as stock

from ..layers.attention import AttentionLayer
from ..layers.mtp import has_head
from .family import Family
from .mixin import TokensOnly
from .nextn import NAMES, NextnArgs


@dataclass
class ModelArgs(NextnArgs, stock.ModelArgs):
    mtp_num_hidden_layers: int = 0


class Attention(AttentionLayer, stock.DecoderLayer):
    def __init__(self, args: ModelArgs, layer_idx: int):
        super().__init__(args, layer_idx)
        self.head_dim = args.head_dim


FAMILY = Family(
    text_args=ModelArgs,
    attention=Attention,
    names=NAMES,
    drafter="glm4_moe_mtp",
    tries_outputs=True,
    no_images="A model of type glm4_moe takes text only: leave the images out.",
)


class Model(TokensOnly, stock.Model):
    family = FAMILY

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        group = group or mx.distributed.init()
        super().shard(group)
        if has_head(self):
            stock.Model.shard(SimpleNamespace(model=self.mtp), group)
