"""The type of a model on two ranks, of which one has an M1: python -m tests.support.ranks.types FOLDER OVERFLOWING_FOLDER"""

import sys

import mlx.core as mx
from mlx.utils import tree_flatten

import mlx_mtp
from tests.support.launch import report

group = mx.distributed.init()
info = mx.device_info() | {"architecture": ("applegpu_g16s", "applegpu_g13s")[group.rank()]}
mx.device_info = lambda: info
for folder in sys.argv[1:]:
    for how in ("tensor_group", "pipeline_group"):
        model, _ = mlx_mtp.load(folder, **{how: group})
        parameters = tree_flatten(model.parameters())
        report(f"{folder}, {how}", sorted({str(p.dtype) for name, p in parameters if not name.endswith("A_log")}))
