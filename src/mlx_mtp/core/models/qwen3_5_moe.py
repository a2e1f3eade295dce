"""Qwen3.5, 3.6 and 3.8, mixture of experts: the dense model with mlx-lm's loading of the experts."""

from mlx_lm.models import qwen3_5_moe as stock

from . import qwen3_5

FAMILY = qwen3_5.FAMILY
ModelArgs = qwen3_5.ModelArgs


class Model(qwen3_5.Model, stock.Model):
    pass
