"""Several processes run one model: the tokens are those of one process. See ``ranks/`` for what each of them does."""

import json
import re
from types import SimpleNamespace

import mlx.core as mx
import pytest
from checkpoints import write
from helpers import tensors, tiny_config, tiny_model
from launch import launch, run
from mlx.utils import tree_flatten

from mlx_mtp import DEMO
from mlx_mtp.checkpoint.part import fetch_part, names_of
from mlx_mtp.models.shard import check_pipeline, check_shard

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
# Two of everything that two ranks divide, and of what four do by a slow test.
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
HALVES = {"num_hidden_layers": 4, "full_attention_interval": 2, "vocab_size": 512}
# The first two layers are recurrent: a stage of a pipeline without attention.
STAGES = HALVES | {"full_attention_interval": 4}


def checkpoint(folder, family, **changes):
    """A random checkpoint in the layout of mlx-lm's conversions."""
    sizes = SIZES | {"mtp_num_hidden_layers": 1, **changes}
    weights = dict(tree_flatten(tiny_model(family, **sizes).parameters()))
    return write(folder / family, tiny_config(family, **sizes), weights)


def facts(n, how, many, folders, timeout=120):
    """What the ranks report, once all have reported the same: names of what is wrong, and values."""
    first, *others = launch(n, "generation.py", how, many, *map(str, folders), timeout=timeout)
    assert all(other == first for other in others)
    return first


def check(facts):
    collectives = [value for name, value in facts.items() if name.endswith("collectives")]
    assert [value[:3] for value in collectives] == [[True, True, True]], collectives
    wrong = [name for name, value in facts.items() if value is False]
    assert len(facts) > 20
    assert wrong == []


@pytest.mark.parametrize(("how", "sizes"), [("tensor", HALVES), ("pipeline", STAGES)])
def test_two_ranks_generate_the_tokens_of_one(tmp_path, how, sizes):
    check(facts(2, how, "few", [checkpoint(tmp_path, family, **sizes) for family in FAMILIES]))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("how", "sizes"), [("tensor", HALVES), ("pipeline", STAGES)])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_first(tmp_path, n, how, sizes, family):
    check(facts(n, how, "many", [checkpoint(tmp_path, family, **sizes)], timeout=400))
