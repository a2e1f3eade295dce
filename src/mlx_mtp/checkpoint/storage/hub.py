"""The Hugging Face hub: downloads with errors in one line, and the contents of its cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import is_offline_mode, scan_cache_dir
from huggingface_hub.errors import (
    CacheNotFound,
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, _download

from ..catalog import resolve
from .tensors import WEIGHTS

HEAD_FILE = "mtp.safetensors"
TOWER_FILE = "model-vision.safetensors"  # of a grafted tower; other programs read it as a file of the model


def fetch(path_or_hf_repo: str, revision: str | None, *files: str, weights: Sequence[str] | None = None) -> Path:
    """Return the folder of a checkpoint, downloading it if it is a repository.

    Args:
        path_or_hf_repo (str): A folder, a repository, or the name of a published model.
        files (str): Files to download besides those that mlx-lm downloads.
        weights (Sequence[str], optional): Download only these of the model's weights. Default: ``None``, all.

    Raises:
        FileNotFoundError: It is missing or cannot be downloaded; the message has the reason in one line.
    """
    check_path(path_or_hf_repo)
    path_or_hf_repo = resolve(path_or_hf_repo)
    with hub_errors(path_or_hf_repo, revision):
        others = [pattern for pattern in DEFAULT_ALLOW_PATTERNS if pattern != WEIGHTS]
        patterns = [*others, HEAD_FILE, "README.md", *files, *([WEIGHTS] if weights is None else weights)]
        return Path(_download(path_or_hf_repo, revision, allow_patterns=patterns))


def check_path(path: str | Path) -> None:
    """Raise a ValueError for a path that is empty or not UTF-8, which MLX does not support."""
    if path == "":
        raise ValueError("The name of a model is empty: give a folder or a Hugging Face repo.")
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as e:
        raise ValueError(f"The path {str(path)!a} is not UTF-8, and MLX takes no other: rename it.") from e


@contextmanager
def hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """A context that converts errors of the hub to one line with the repository and the reason."""
    try:
        yield
    except GatedRepoError as e:
        raise FileNotFoundError(
            f"{name} is gated: ask for access on its page, then log in with `hf auth login` or set HF_TOKEN."
        ) from e
    except RevisionNotFoundError as e:
        raise FileNotFoundError(f"{name} has no revision {revision}.") from e
    except RepositoryNotFoundError as e:
        raise FileNotFoundError(
            f"{name} is not a folder, and the hub has no repository of that name or you may not see it: "
            "correct the name, or log in with `hf auth login`."
        ) from e
    except HFValidationError as e:
        raise FileNotFoundError(f"{name} is neither a folder nor the name of a repository.") from e
    except (OSError, EntryNotFoundError, HTTPError) as e:
        if is_offline_mode():
            reason = "HF_HUB_OFFLINE is set and the cache lacks a part of it: unset it to download."
        else:
            reason = f"it could not be downloaded: {first_line(e)}"
        raise FileNotFoundError(f"{name} is not a folder, and {reason}") from e


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def commit_of(folder: Path) -> str | None:
    """The commit of a folder in the hub's cache, whose snapshots are named by commit."""
    return folder.name if folder.parent.name == "snapshots" else None


def cached_repositories() -> dict[str, int]:
    """The models in the hub's cache, and their bytes."""
    try:
        return {repo.repo_id: repo.size_on_disk for repo in scan_cache_dir().repos if repo.repo_type == "model"}
    except CacheNotFound:
        return {}
