"""The Hugging Face hub: downloads with errors in one line, and the contents of its cache."""

import logging
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub as hf
from huggingface_hub import constants, errors, is_offline_mode, snapshot_download, try_to_load_from_cache
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, filter_repo_objects, hf_raise_for_status, http_stream_backoff
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from ..errors import MTPError, MTPFileNotFoundError, MTPOSError
from ..memory import size
from .catalog import conversion_like, resolve

WEIGHTS = "model*.safetensors"
SHOWN = 5  # models of the cache in an error
TRIES = 5  # for a body that breaks off
CARD = "README.md"
SMALL_FILES = [pattern for pattern in DEFAULT_ALLOW_PATTERNS if pattern != WEIGHTS]  # of mlx-lm
HEAD_FILE = "mtp.safetensors"
TOWER_FILE = "model-vision.safetensors"  # of a grafted tower; other programs read it as a file of the model

log = logging.getLogger(__name__)


@cache
def warn_once(message: str) -> None:
    log.warning(f"[WARNING] {message}")


def fetch(path_or_hf_repo: str, revision: str | None, *files: str, weights: Sequence[str] | None = None) -> Path:
    """A checkpoint's folder, downloaded if it is a repository: mlx-lm's files, ``files`` and ``weights``, by default all."""
    check_path(path_or_hf_repo)
    check_format(path_or_hf_repo, [path_or_hf_repo])
    name = resolve(path_or_hf_repo)
    if (folder := Path(name)).exists():
        if folder.is_dir():
            check_format(name, [file.name for file in folder.iterdir()])
        return folder
    needed = [*SMALL_FILES, *files, *([WEIGHTS] if weights is None else weights)]
    patterns = [*needed, CARD]
    try:
        commit, missing = _not_cached(name, revision, patterns)
    except FileNotFoundError as e:
        return cached_folder(name, revision, e, needed)
    if missing:
        check_download(name, commit, missing)
    else:
        revision = commit
    with hub_errors(name, revision):
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=not missing))


def cached_folder(name: str, revision: str | None, why: OSError, patterns: Sequence[str] = SMALL_FILES) -> Path:
    """The folder of a repository in the cache, which mlx-lm may have downloaded, without the card. Raises the error ``why`` of
    the hub if there is none, or an error that tells which files it lacks.
    """
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*patterns], local_files_only=True))
    except errors.IncompleteSnapshotError as e:
        missing = re.search(r"missing \((.*?)\)", str(e))
        lacks = f"the cache lacks {missing[1]}" if missing else first_line(e)
        raise MTPFileNotFoundError(f"{name} is not complete: {lacks}, and {_unreachable(why)[0]}.") from why
    except (OSError, ValueError, errors.EntryNotFoundError):
        raise why from why.__cause__
    if not is_offline_mode():
        warn_once(f"{name} is read from the cache: {_unreachable(why)[0]}.")
    return folder


def sizes_to_download(name: str, revision: str | None, patterns: Sequence[str]) -> dict[str, int]:
    """The sizes of a repository's files that fit a pattern and are not in the cache. Empty for a folder, or without the hub."""
    name = resolve(name)
    if Path(name).exists():
        return {}
    try:
        commit, missing = _not_cached(name, revision, patterns)
    except FileNotFoundError:
        return {}  # fetch tells why
    return {entry.path: entry.size for entry in _tree(name, commit) if entry.path in missing} if missing else {}


def _not_cached(name: str, revision: str | None, patterns: Sequence[str]) -> tuple[str, list[str]]:
    """The commit of a revision, and its files that fit a pattern and are not in the cache."""
    commit, files = list_files(name, revision)
    check_format(name, files)
    wanted = filter_repo_objects(files, allow_patterns=[*patterns])
    return commit, [f for f in wanted if not isinstance(try_to_load_from_cache(name, f, revision=commit), str)]


def list_files(name: str, revision: str | None) -> tuple[str, list[str]]:
    """The commit of a revision of a repository, and the names of its files, from the hub."""
    with hub_errors(name, revision):
        info = hf.HfApi().model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        files = [file.rfilename for file in info.siblings or ()]
        if not re.fullmatch("[0-9a-f]{40}", str(info.sha)):
            raise MTPError(f"the commit is {info.sha!r}")
        if outside := [file for file in files if not is_inside(file)]:
            raise MTPError(f"a file is {outside[0]!r}")
        return str(info.sha), files


def is_inside(file: Any) -> bool:
    """Whether this is the name of a file in a checkpoint's folder, relative to it."""
    return isinstance(file, str) and not PurePosixPath(file).is_absolute() and ".." not in PurePosixPath(file).parts


def check_download(name: str, commit: str, files: Collection[str]) -> None:
    """Raise an OSError if the disk has no room for files, or an ETag, by which the cache names a file, is no name."""

    def etag_of(file: str) -> str | None:
        return hf.get_hf_file_metadata(hf.hf_hub_url(name, file, revision=commit)).etag

    entries = [entry for entry in _tree(name, commit) if entry.path in files]
    with hub_errors(name, commit), ThreadPoolExecutor(8) as pool:
        for entry in entries:
            _check_etag(entry.path, entry.blob_id if entry.lfs is None else entry.lfs.sha256)
        for file, etag in zip(files, pool.map(etag_of, files)):
            _check_etag(file, etag)
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if (needed := sum(entry.size for entry in entries)) > free:
        raise MTPOSError(
            f"{name} is not downloaded: it takes {size(needed)}, and the disk of {cache} has {size(free)} free."
        )


def _tree(name: str, commit: str) -> list[RepoFile]:
    with hub_errors(name, commit):
        tree = hf.HfApi().list_repo_tree(name, recursive=True, revision=commit)
        entries = [entry for entry in tree if isinstance(entry, RepoFile)]
        if not all(isinstance(entry.size, int) for entry in entries):
            raise MTPError("the size of a file is not a number")
        return entries


def _check_etag(file: str, etag: str | None) -> None:
    if not re.fullmatch(r"\w[\w.+=-]*", etag or ""):
        raise MTPOSError(f"the ETag {etag!r} of {file} is not the name of a file, under which the cache would have it.")


def check_format(name: str, files: Collection[str]) -> None:
    if not any(file.endswith(".gguf") for file in files) or any(file.endswith(".safetensors") for file in files):
        return
    conversion = conversion_like(name)
    known = "" if conversion is None else f" The same model for MLX: --model {conversion}."
    raise MTPError(f"{name} is not loaded: GGUF is not supported, MLX reads safetensors.{known}")


def check_path(path: str | Path) -> None:
    """Raise an MTPError for a path that is empty or not UTF-8, which MLX does not support."""
    if path == "":
        raise MTPError("The name of a model is empty: give a folder or a Hugging Face repo.")
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as e:
        raise MTPError(f"The path {str(path)!a} is not UTF-8, and MLX takes no other: rename it.") from e


@contextmanager
def hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """A context that converts errors of the hub, and of parsing its answers, to one line with the repository and the reason."""
    try:
        yield
    except (OSError, errors.EntryNotFoundError, errors.HTTPError) as e:
        raise MTPFileNotFoundError(_reason(e, name, revision)) from e
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError) as e:
        reason = f"could not be read: the answer of {constants.ENDPOINT} is not the hub's ({first_line(e)})."
        if isinstance(e, errors.HFValidationError):
            reason = "is neither a folder nor the name of a repository."
        raise MTPFileNotFoundError(f"{name} {reason}") from e


def _reason(error: Exception, name: str, revision: str | None) -> str:
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: ask for access on its page, then log in with `hf auth login` or set HF_TOKEN."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision}."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{name} is not a folder, and the hub has no repository of that name or you may not see it: "
            "correct the name, or log in with `hf auth login`."
        )
    if not is_offline_mode() and _http_error(error) is None:
        return f"{name} is not a folder, and it could not be downloaded: {first_line(error)}"
    names = sorted(cached_repositories())
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    cache = f"In the cache: {', '.join(names[:SHOWN])}{more}." if names else "The cache is empty."
    return f"{name} is not a folder, and {''.join(_unreachable(error))}. {cache}"


def _unreachable(error: BaseException) -> tuple[str, str]:
    """Why nothing can be downloaded, and what to do about it."""
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set", " and the cache does not have it: unset it to download"
    if isinstance(cause := _http_error(error), errors.HfHubHTTPError):
        answer = cause.response
        return f"the Hugging Face hub answers {answer.status_code} {answer.reason_phrase}", ": try again later"
    return "there is no connection to the Hugging Face hub", " to download it"


def _http_error(error: BaseException | None) -> BaseException | None:
    """The first error of HTTP among an error and its causes: an answer of the hub, or that there was none."""
    while error is not None and not isinstance(error, errors.HTTPError):
        error = error.__cause__
    return error


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def commit_of(folder: Path) -> str | None:
    """The commit of a folder in the hub's cache, whose snapshots are named by commit."""
    return folder.name if folder.parent.name == "snapshots" else None


def cached_repositories() -> dict[str, hf.CachedRepoInfo]:
    """The repositories of models in the hub's cache, by name."""
    try:
        return {repo.repo_id: repo for repo in hf.scan_cache_dir().repos if repo.repo_type == "model"}
    except errors.CacheNotFound:
        return {}


def download(repo: str, revision: str | None, file: str, start: int, stop: int | None) -> tuple[bytes, int]:
    """The bytes of a file on the hub from ``start`` to before ``stop`` or its end, and its size. Raises a FileNotFoundError."""
    url = hf.hf_hub_url(repo, file, revision=revision)
    headers = build_hf_headers()
    if stop is not None:
        headers["Range"] = f"bytes={start}-{stop - 1}"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with hub_errors(repo, revision):
        for _ in range(TRIES):
            with http_stream_backoff("GET", url, headers=headers, timeout=timeout) as response:
                hf_raise_for_status(response)
                size = None if stop is None else _size_of_part(response, file, start, stop)
                with suppress(errors.HTTPError):  # the body broke off: ask again
                    data = _read_body(response, None if size is None or stop is None else min(stop, size) - start)
                    return data, len(data) if size is None else size
        raise MTPOSError(f"{file} broke off {TRIES} times.")


def _size_of_part(response: Any, file: str, start: int, stop: int) -> int:
    """The size of a file, of which a part was requested. Raises OSError if the body, still unread, is not this part."""
    if response.status_code != 206:
        raise MTPOSError("its server does not support range requests.")
    sent = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.headers.get("Content-Range", ""))
    first, last, size = (int(n) for n in sent.groups()) if sent else (-1, -1, 0)
    if (first, last + 1) != (start, min(stop, size)):
        raise MTPOSError(f"its server sent other bytes of {file} than asked for.")
    return size


def _read_body(response: Any, length: int | None) -> bytes:
    """Read a body. If it is not of this length, raise an OSError once it is longer or ends."""
    data = bytearray()
    for piece in response.iter_bytes():
        data += piece
        if length is not None and len(data) > length:
            break
    if length is not None and len(data) != length:
        raise MTPOSError("its server sent another number of bytes than asked for.")
    return bytes(data)
