"""Qwen3.5, 3.6 and 3.8, dense: mlx-lm's model with the MTP head and with layers that can roll back."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3_5 as stock

from ..layers.attention import GatedAttentionLayer
from ..layers.mtp import MTPModule, has_head
from ..layers.recurrence import RecurrentLayer
from .family import Family
from .mixin import MTPModel, add_layers, without_layers
from .rope import add_mrope
from .shard import shard_layers


@dataclass
class TextModelArgs(stock.TextModelArgs):
    mtp_num_hidden_layers: int = 0


@dataclass
class ModelArgs(stock.ModelArgs):
    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> "ModelArgs":
        # mlx_mtp.load sets the number of the head's layers, from its tensors. text_config may claim a head that is missing.
        args = super().from_dict(params)
        if (n := params.get("mtp_num_hidden_layers")) is not None:
            args.text_config = {**args.text_config, "mtp_num_hidden_layers": n}
        return args


class Attention(GatedAttentionLayer, stock.DecoderLayer):
    def __init__(self, args: TextModelArgs, layer_idx: int):
        super().__init__(args, layer_idx)
        add_mrope(self.self_attn, args.rope_parameters)


class Recurrence(RecurrentLayer, stock.DecoderLayer):
    pass


FAMILY = Family(
    text_args=TextModelArgs,
    attention=Attention,
    recurrence=Recurrence,
    is_recurrent=lambda args, i: (i + 1) % args.full_attention_interval != 0,
    head_index=lambda args: args.full_attention_interval - 1,
    shifts_norms=True,
    convolution="conv1d.weight",
    drafter="qwen3_5_mtp",
    needs_head=True,
    repeats_heads=True,
)


class TextModel(stock.TextModel):
    def __init__(self, args: TextModelArgs, family: Family = FAMILY):
        super().__init__(without_layers(args))
        self.args = args
        add_layers(self, args, family)


class Model(MTPModel, stock.Model):
    family = FAMILY
    head_prefix = "language_model.mtp."
    text_model: Any = TextModel

    def __init__(self, args: ModelArgs):
        super().__init__(args)
        self.language_model = self.text_model(self.family.text_args.from_dict(args.text_config))

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        group = group or mx.distributed.init()
        super().shard(group)
        if has_head(self):
            shard_layers(self.mtp.layers, group)

    @property
    def mtp(self) -> MTPModule:
        return self.language_model.mtp
