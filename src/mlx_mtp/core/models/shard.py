"""A model on several machines: tensor parallel, with a part of every layer on each rank, or a pipeline of layers.

In a pipeline every stage has the embedding, the output layer and the whole head: mlx-lm gives each stage the backbone's output.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5
from mlx_lm.models.qwen3_next import Qwen3NextMLP

from ...errors import MTPError
from ..layers.mtp import has_head

SUMMED = ("o_proj", "out_proj", "down_proj")  # layers whose inputs are split, and whose outputs are summed
SPLIT = ("gate_proj", "up_proj")  # layers whose outputs are split


def shard_layers(layers: Sequence[Any], group: mx.distributed.Group) -> None:
    """Keep this rank's part of decoder layers, as mlx-lm's ``Model.shard`` of Qwen3.5 does."""
    no_lm_head = SimpleNamespace(args=SimpleNamespace(tie_word_embeddings=True))
    qwen3_5.Model.shard(SimpleNamespace(language_model=no_lm_head, layers=layers), group)


def shard_recurrent_layer(layer: Any, group: mx.distributed.Group) -> None:
    """Keep this rank's part of a recurrent layer of Qwen3-Next, whose projections are grouped by key head."""
    n, rank = group.size(), group.rank()
    delta = layer.linear_attn
    segments = [delta.key_dim, 2 * delta.key_dim]  # of the convolution: queries, keys, values
    shard_inplace(delta.conv1d, lambda path, weight: (0, segments), group=group)
    delta.conv1d.groups //= n
    for projection in (delta.in_proj_qkvz, delta.in_proj_ba):
        shard_inplace(projection, "all-to-sharded", group=group)
    for name in ("dt_bias", "A_log"):
        delta[name] = mx.contiguous(mx.split(delta[name], n)[rank])
    delta.out_proj = shard_linear(delta.out_proj, "sharded-to-all", group=group)  # it has its own sum
    for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"):
        setattr(delta, name, getattr(delta, name) // n)
    # A feed-forward layer or a mixture of experts, as in mlx-lm's ``Model.shard`` of Qwen3.5
    mlp = layer.mlp
    sharding = dict.fromkeys(SPLIT, "all-to-sharded") | {"down_proj": "sharded-to-all"}
    if isinstance(mlp, Qwen3NextMLP):
        for name, how in sharding.items():
            mlp[name] = shard_linear(mlp[name], how, group=group)
        return
    mlp.sharding_group = group
    for experts in (mlp.shared_expert, mlp.switch_mlp):
        for name, how in sharding.items():
            shard_inplace(experts[name], how, group=group)


def check_shard(model: Any, n: int) -> None:
    """Raise an MTPError if a model cannot be split among ``n`` ranks. Its weights are not needed."""
    if model.family.no_shard is not None:
        raise MTPError(
            f"A model of type {model.model_type} cannot be split among processes, because {model.family.no_shard}: use a "
            "pipeline (--pipeline)."
        )
    args = model.text_args
    kv_heads = args.num_key_value_heads
    sizes = {"attention heads": args.num_attention_heads}
    if model.recurrent_layers:
        sizes["key heads of its recurrent layers"] = args.linear_num_key_heads
    if kv_heads % n > 0 and (n % kv_heads > 0 or not model.family.repeats_heads):
        sizes["key-value heads"] = kv_heads
    if not args.tie_word_embeddings:
        sizes["token ids"] = args.vocab_size
    layers = [*model.layers, *(model.mtp.layers if has_head(model) else ())]
    for layer in layers:
        parameters: Any = tree_flatten(layer.parameters())
        for name, p in parameters:
            *_, module, kind = name.split(".")
            if kind in ("weight", "scales") and module in SUMMED + SPLIT:
                sizes[f"columns or groups of {name}"] = p.shape[-1 if module in SUMMED else -2]
    for what, size in sizes.items():
        if size % n > 0:
            raise MTPError(
                f"The model cannot be split among {n} processes, a number that does not divide its {size} {what}: start "
                "another number of them, or use a pipeline (--pipeline)."
            )


def check_pipeline(model: Any, n: int) -> None:
    if n > len(model.layers):
        raise MTPError(f"The model has {len(model.layers)} layers, too few for a pipeline of {n} processes.")
