"""The pattern of ``num_nextn_predict_layers``: the head is one more layer of the checkpoint, after the backbone's N layers.

    input i: E[t_{i+1}] ── enorm ──┐
                                   ├── eh_proj ── decoder layer ── shared_head.norm ──> lm_head: a guess of t_{i+2}
             h_i ───────── hnorm ──┘

These are the names in published checkpoints, for the same head as Qwen's: see ``core/layers/mtp.py``. Most also have copies of
the embedding and of the output layer. mlx-lm drops the layer, and loads a checkpoint that has it. In mlx-vlm's drafters (0.7)
the layer is ``model.mtp_block``, and the copies have the names of the model's. The method is DeepSeek-V3's (arXiv:2412.19437,
section 2.2), as in ``MtpLayer`` of transformers (5.24).
"""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from ..layers.mtp import has_head
from .family import HeadNames
from .mixin import TokensOnly

NAMES = HeadNames(
    prefix=r"(?:(?:model\.)?layers\.<N>\.|model\.mtp_block\.|model\.(?=(?:enorm|hnorm|eh_proj|shared_head_norm)\.))",
    marker="eh_proj.weight",
    renamed=(
        ("enorm.", "pre_fc_norm_embedding."),
        ("hnorm.", "pre_fc_norm_hidden."),
        ("eh_proj.", "fc."),
        ("shared_head.norm.", "norm."),
        ("shared_head_norm.", "norm."),
        ("shared_head.head.", "lm_head."),
        ("embed_tokens.", "embed_tokens."),
        ("", "layers.0."),
    ),
    written="model.layers.<N>.",
)


class NextnArgs:
    """The arguments of a model's experts by the names that the estimate of memory asks for."""

    n_routed_experts: int | None
    n_shared_experts: int | None
    moe_intermediate_size: int

    @property
    def num_experts(self) -> int:
        return self.n_routed_experts or 0

    @property
    def shared_expert_intermediate_size(self) -> int:
        return (self.n_shared_experts or 0) * self.moe_intermediate_size


class NextnModel(TokensOnly):
    def shard(self, group: mx.distributed.Group | None = None) -> None:
        """Keep this rank's part of each layer, as mlx-lm's model does, including the head's."""
        group = group or mx.distributed.init()
        of_mlx_lm: Any = super(NextnModel, type(self)).shard  # type: ignore[misc]
        for model in (self.model, self.mtp) if has_head(self) else (self.model,):
            of_mlx_lm(SimpleNamespace(model=model), group)
