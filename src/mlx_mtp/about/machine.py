"""The memory and the caches of this machine."""

import os
from collections.abc import Iterator

import mlx.core as mx
from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from ..checkpoint.originals.head import FetchedHead, fetched_heads

GB = 1e9


def total_memory() -> int:
    """The machine's memory in bytes."""
    size = mx.device_info().get("memory_size")  # of a GPU
    return int(size) if size else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory() -> int:
    """The bytes that MLX may use without swapping: on a Mac, what the system recommends for its GPU."""
    size = mx.device_info().get("max_recommended_working_set_size")
    return int(size) if size else total_memory()


def cached_repositories() -> dict[str, int]:
    """The models in the hub's cache, and their bytes."""
    try:
        return {repo.repo_id: repo.size_on_disk for repo in scan_cache_dir().repos if repo.repo_type == "model"}
    except CacheNotFound:
        return {}


def cached_heads() -> dict[str, FetchedHead]:
    """The fetched heads, by their original."""
    return {head.source: head for head in fetched_heads()}


def cache_folders() -> Iterator[tuple[str, str]]:
    """The folders of caches, each with its use."""
    yield "Models", str(constants.HF_HUB_CACHE)
    yield "Heads", f"{constants.HF_HOME}/mlx_mtp/heads"
