"""How much memory prompt caches may take."""

import os
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

SHARE = 0.5  # of the memory that a model leaves; the rest is for what passes compute, and for other programs


def cache_budget(*models: Any) -> int:
    """The bytes of prompt caches, those of running requests included: half of the memory that these models leave."""
    return max(int(SHARE * memory_left(*models)), 0)


def memory_left(*models: Any) -> int:
    """The bytes beside these models."""
    weights: list[Any] = [pair for model in models for pair in tree_flatten(model.parameters())]
    return device_memory() - sum(w.nbytes for _, w in weights)


def device_memory() -> int:
    """What Metal recommends to use at most, the memory of another GPU, or that of the machine, in bytes."""
    info = mx.device_info()
    for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if name in info:
            return int(info[name])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
