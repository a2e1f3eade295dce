"""Qwen3.5, 3.6 and 3.8, dense: mlx-lm's model with the MTP head and with layers that can roll back."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3_5 as stock

from ..layers.layer import Layer
from ..layers.mtp import MTPModule, has_head
from .mixin import MTPModel, add_head, without_layers
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


class DecoderLayer(Layer, stock.DecoderLayer):
    pass


class TextModel(stock.TextModel):
    def __init__(self, args: TextModelArgs):
        super().__init__(without_layers(args))
        self.args = args
        add_head(self, args, DecoderLayer)


class Model(MTPModel, stock.Model):
    head_prefix = "language_model.mtp."
    text_model: Any = TextModel
    text_model_args: Any = TextModelArgs

    def __init__(self, args: ModelArgs):
        super().__init__(args)
        self.language_model = self.text_model(self.text_model_args.from_dict(args.text_config))

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        group = group or mx.distributed.init()
        super().shard(group)
        if has_head(self):
            shard_layers(self.mtp.layers, group)

    @property
    def mtp(self) -> MTPModule:
        return self.language_model.mtp
