"""Greedy MTP on several ranks beside plain decoding of the whole model: python greedy.py tensor|pipeline FAMILY..."""

import sys

import mlx.core as mx
from helpers import PROMPT, mtp, plain, tiny_model
from launch import report

from mlx_mtp.distributed.ranks import Ranks

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
group = mx.distributed.init()
how, *families = sys.argv[1:]


def on_ranks(family, **changes):
    model = tiny_model(family, num_hidden_layers=4, **SIZES, **changes)
    want = plain(PROMPT, model, max_tokens=24)
    if how == "tensor":
        model.shard(group)
    else:
        model.model.pipeline(group)
    mx.eval(model.parameters())
    model.ranks = Ranks(group)
    return model, want


for family in families:
    model, want = on_ranks(family, full_attention_interval=4 if how == "pipeline" else 2)
    for k in (0, 1, 2, 3, 4, "auto"):
        report(group.rank(), f"{family} {k}", mtp(PROMPT, model, max_tokens=24, num_draft_tokens=k) == want)
