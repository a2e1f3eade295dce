"""Bonsai 2: the dense model with ternary weights in mlx-lm's 2-bit pack and rotations, and the dense model's head."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx.utils import tree_unflatten
from mlx_lm.models import prism_hadamard_qwen35 as stock

from . import qwen3_5


@dataclass
class ModelArgs(qwen3_5.ModelArgs, stock.ModelArgs):
    pass


FAMILY = replace(qwen3_5.FAMILY, pack_of="qwen3_5", no_shard="a rotation mixes the inputs of each layer")


class Model(qwen3_5.Model, stock.Model):
    family = FAMILY

    def __init__(self, args: ModelArgs):
        super().__init__(args)
        # mlx-lm has packed its own text model, which the text model with a head replaces.
        modules = stock.Model(args).language_model.named_modules()
        packed = [(path, m) for path, m in modules if isinstance(m, stock.HadamardQuantizedLinear)]
        self.language_model.update_modules(tree_unflatten(packed))

    def sanitize(
        self, weights: dict[str, mx.array], head: Mapping[str, mx.array] | None = None, raw: bool = False
    ) -> dict[str, mx.array]:
        # mlx-lm requires the signs of each module in the manifest. A stage of a pipeline has only those of its layers.
        names = {name.removeprefix("language_model.") for name in weights}
        self.args.modules = [m for m in self.args.modules if f"{m['path']}.weight" in names]
        return super().sanitize(weights, head, raw)
