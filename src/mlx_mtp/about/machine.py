"""The caches of this machine."""

from collections.abc import Iterator

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from ..checkpoint.originals.head import FetchedHead, fetched_heads


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
