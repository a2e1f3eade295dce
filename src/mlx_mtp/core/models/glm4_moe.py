"""GLM-4.5, 4.6 and 4.7: mlx-lm's model with its MTP head."""

from dataclasses import dataclass

from mlx_lm.models import glm4_moe as stock

from ..layers.attention import AttentionLayer
from .family import Family
from .nextn import NAMES, NextnArgs, NextnModel


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


class Model(NextnModel, stock.Model):
    family = FAMILY
