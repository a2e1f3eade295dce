"""Qwen3.5, 3.6 and 3.8, dense: mlx-lm's model with the MTP head and with layers that can roll back."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3_5 as stock
from mlx_lm.models.base import gather_last_axis

from ..layers.compiled import Compiler
from ..layers.layer import Layer
from ..layers.mtp import MTPModule
from .mixin import MTPMixin, add_head, forward
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


class GatedDeltaNet(stock.GatedDeltaNet):
    def project(self, x: mx.array) -> tuple[mx.array, ...]:
        """x [B, T, H] -> the inputs of the convolution [B, T, C], z [B, T, Hv, Dv], and those of decay and beta [B, T, Hv]"""
        z = self.in_proj_z(x).reshape(*x.shape[:2], self.num_v_heads, self.head_v_dim)
        return self.in_proj_qkv(x), z, self.in_proj_a(x), self.in_proj_b(x)


class DecoderLayer(Layer, stock.DecoderLayer):
    def __init__(self, args: stock.TextModelArgs, layer_idx: int):
        super().__init__(args, layer_idx)
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(args)


class TextModel(stock.TextModel):
    def __init__(self, args: TextModelArgs):
        super().__init__(args)
        add_head(self, args, DecoderLayer)

    def __call__(
        self,
        inputs: mx.array,
        cache: Any | None = None,
        input_embeddings: mx.array | None = None,
        **options: Any,
    ) -> mx.array | tuple[mx.array, mx.array]:
        """mlx-lm's call, with the options of ``forward``."""
        return forward(self, inputs, cache, input_embeddings=input_embeddings, **options)

    def logits(self, hidden: mx.array) -> mx.array:
        if self.args.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(hidden)
        out = self.lm_head(hidden)
        if self.sharding_group is not None:
            out = gather_last_axis(out, self.sharding_group)
        return out


class Model(MTPMixin, stock.Model):
    head_prefix = "language_model.mtp."

    def __init__(self, args: ModelArgs):
        super().__init__(args)
        self.language_model = TextModel(TextModelArgs.from_dict(args.text_config))

    def __call__(
        self,
        inputs: mx.array,
        cache: Any | None = None,
        input_embeddings: mx.array | None = None,
        *,
        return_hidden: bool = False,
        n_confirmed: int = 0,
        compiler: Compiler | None = None,
    ) -> mx.array | tuple[mx.array, mx.array]:
        """mlx-lm's call, with more options.

        Args:
            inputs (mx.array): Token ids, [B, T].
            cache (List[Any], optional): One entry for each layer; further entries are ignored.
            input_embeddings (mx.array, optional): [B, T, H], in place of ``inputs``.
            return_hidden (bool): Also return the output of the final norm. Default: ``False``.
            n_confirmed (int): The number of leading tokens known to be final. If above 0, the call is recorded, and
              ``mlx_mtp.caches.recurrent.rollback`` can roll back to any token from this one on. Default: ``0``.
            compiler (Compiler, optional): Compiles the pass. Default: ``None``, it runs as in mlx-lm.

        Returns:
            mx.array or Tuple[mx.array, mx.array]: Logits [B, T, V]; with ``return_hidden`` also hidden states [B, T, H].
        """
        return self.language_model(
            inputs,
            cache,
            input_embeddings,
            return_hidden=return_hidden,
            n_confirmed=n_confirmed,
            compiler=compiler,
            drafting=self.drafting,
        )

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        """Keep this rank's part of each layer, including the head's."""
        group = group or mx.distributed.init()
        super().shard(group)
        if getattr(self.language_model, "mtp", None) is not None:
            shard_layers(self.mtp.layers, group)

    @property
    def mtp(self) -> MTPModule:
        return self.language_model.mtp

    def logits(self, hidden: mx.array) -> mx.array:
        """The output layer: [B, T, H] -> [B, T, V]."""
        return self.language_model.logits(hidden)
