"""The memory budget of prompt caches."""

import os
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

SHARE = 0.5  # of the memory that a model leaves; the rest is for what passes compute, and for other programs


def cache_budget(*models: Any) -> int:
    """The bytes that all prompt caches may take, including those of running requests: half of the memory beside the models."""
    return max(int(SHARE * memory_left(*models)), 0)


def memory_left(*models: Any) -> int:
    """The device's memory less the weights of these models, in bytes."""
    weights: list[Any] = [pair for model in models for pair in tree_flatten(model.parameters())]
    return device_memory() - sum(w.nbytes for _, w in weights)


def device_memory() -> int:
    """Metal's recommended limit, the memory of another GPU, or the memory of the machine, in bytes."""
    info = mx.device_info()
    for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if name in info:
            return int(info[name])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
