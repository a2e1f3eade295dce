"""Checkpoints on the Hugging Face hub or in a folder: fetched whole, or read in parts.

Parts are read by HTTP range requests, all from the commit that the revision named at first. ``huggingface_hub`` finds the
token, the endpoint and whether to stay offline.
"""

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants, hf_hub_url, is_offline_mode
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, _download
from tqdm import tqdm

HEAD_FILE = "mtp.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"
CHUNK_BYTES = 16 << 20  # of one range request, which is made again as a whole when it fails
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def fetch(path_or_hf_repo: str, revision: str | None, *files: str) -> Path:
    """The folder of a checkpoint, downloaded or taken from the cache where it is a repository.

    Args:
        files (str): Names of files that are wanted besides those that mlx-lm wants.

    Raises:
        FileNotFoundError: It cannot be had, in one line that says why.
    """
    with hub_errors(path_or_hf_repo, revision):
        patterns = [*DEFAULT_ALLOW_PATTERNS, HEAD_FILE, "README.md", *files]
        return _download(path_or_hf_repo, revision, allow_patterns=patterns)


@contextmanager
def hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Say in one line which repository cannot be had, and why."""
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
            f"{name} is no folder, and the hub has no repository of that name or you may not see it: "
            "mend the name, or log in with `hf auth login`."
        ) from e
    except HFValidationError as e:
        raise FileNotFoundError(f"{name} is no folder, and not the name of a repository.") from e
    except (OSError, EntryNotFoundError, HTTPError) as e:
        if is_offline_mode():
            reason = "HF_HUB_OFFLINE is set and the cache has not all of it: download it once without."
        else:
            reason = f"it could not be downloaded: {first_line(e)}"
        raise FileNotFoundError(f"{name} is no folder, and {reason}") from e


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def commit_of(folder: Path) -> str | None:
    """The commit of a folder in the hub's cache, which names its snapshots by it."""
    return folder.name if folder.parent.name == "snapshots" else None


class Tensor(NamedTuple):
    """Where a tensor lies, by a safetensors header."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # in bytes, from the beginning of the file
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Checkpoint:
    """The files of a checkpoint, of which only the parts that are asked for are read.

    Args:
        path_or_hf_repo (str): A folder or a repository.
        revision (str, optional): Branch, tag or commit of the repository.
    """

    def __init__(self, path_or_hf_repo: str, revision: str | None = None):
        self.name = path_or_hf_repo
        self.folder: Path | None = None
        if Path(path_or_hf_repo).exists() or is_offline_mode():
            self.folder = fetch(path_or_hf_repo, revision)
            self.revision = commit_of(self.folder)
            self.files = [f.name for f in self.folder.iterdir() if f.is_file()]
        else:
            with hub_errors(path_or_hf_repo, revision):
                info = HfApi().model_info(path_or_hf_repo, revision=revision)
            self.revision = info.sha
            self.files = [f.rfilename for f in info.siblings or []]
        self.config = self.read_json("config.json") if "config.json" in self.files else None

    def _has(self, file: str) -> bool:
        return file in self.files if self.folder is None else (self.folder / file).exists()

    def read(self, file: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of a file from ``start`` to before ``stop``."""
        if self.folder is not None:
            with (self.folder / file).open("rb") as f:
                f.seek(start)
                data = f.read(-1 if stop is None else stop - start)
        else:
            url = hf_hub_url(self.name, file, revision=self.revision)
            headers = build_hf_headers()
            if stop is not None:
                headers["Range"] = f"bytes={start}-{stop - 1}"
            with hub_errors(self.name, self.revision):
                response = http_backoff("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
                hf_raise_for_status(response)
                if stop is not None and response.status_code != 206:
                    raise OSError("its server does not give parts of files.")
            data = response.content
        if stop is not None and len(data) != stop - start:
            raise ValueError(f"{file} of {self.name} is cut short or damaged: download or convert it again.")
        return data

    def read_json(self, file: str) -> dict[str, Any]:
        return parse_json(self.read(file), f"{file} of {self.name}")

    @cache  # noqa: B019 (one for each command)
    def header(self, file: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors of a safetensors file, and its metadata."""
        (size,) = struct.unpack("<Q", self.read(file, 0, 8))
        damaged = f"{file} of {self.name} is cut short or damaged: download or convert it again."
        if size > MAX_HEADER_BYTES:
            raise ValueError(damaged)
        tensors = {}
        try:
            header = parse_json(self.read(file, 8, 8 + size), file)
            metadata = header.pop("__metadata__", None) or {}
            for name, t in header.items():
                start, stop = (8 + size + offset for offset in t["data_offsets"])
                tensors[name] = Tensor(file, t["dtype"], tuple(t["shape"]), start, stop)
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(damaged) from e
        if self.folder is not None and (self.folder / file).stat().st_size < max(
            (t.stop for t in tensors.values()), default=0
        ):
            raise ValueError(damaged)
        return tensors, metadata

    def weight_map(self, head_file: str | None = None) -> dict[str, str]:
        """The file of every tensor, from the index or else from the headers; ``head_file`` need not be in the index."""
        files = sorted(f for f in self.files if fnmatch(f, WEIGHTS) and "/" not in f)
        if head_file is not None and not self._has(head_file):
            raise FileNotFoundError(f"{self.name} lacks {head_file}, which its config names: download it again.")
        if INDEX_FILE in self.files:
            weight_map = weight_map_of(self.read_json(INDEX_FILE), f"{INDEX_FILE} of {self.name}")
            if missing := sorted(file for file in set(weight_map.values()) if not self._has(file)):
                raise FileNotFoundError(f"{self.name} lacks {missing[0]}, which its index names: download it again.")
            files = []
        else:
            weight_map = {}
        for file in [*files, *([head_file] if head_file else [])]:
            weight_map.update(dict.fromkeys(self.header(file)[0], file))
        if not weight_map:
            raise FileNotFoundError(f"No safetensors found in {self.name}")
        return weight_map

    def tensors(self, names: Iterable[str], weight_map: dict[str, str]) -> dict[str, Tensor]:
        """Where some tensors lie.

        Raises:
            ValueError: The index names one that is not there.
        """
        found = {}
        for name in names:
            tensor = self.header(weight_map[name])[0].get(name)
            if tensor is None:
                raise ValueError(f"{self.name} lacks the tensor {name}, which its index names: download it again.")
            found[name] = tensor
        return found

    def save(self, tensors: dict[str, Tensor], file: Path) -> None:
        """Write some tensors to a safetensors file of their own, fetching no other byte."""
        tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].file, item[1].start)))
        header, offset = {}, 0
        runs: list[tuple[str, int, int]] = []  # file, start, stop: of tensors that lie side by side
        for name, t in tensors.items():
            header[name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [offset, offset + t.nbytes]}
            offset += t.nbytes
            if runs and (runs[-1][0], runs[-1][2]) == (t.file, t.start):
                runs[-1] = (t.file, runs[-1][1], t.stop)
            else:
                runs.append((t.file, t.start, t.stop))
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as f, tqdm(total=offset, desc="Head", unit="B", unit_scale=True, disable=None) as bar:
            f.write(struct.pack("<Q", len(text)) + text)
            for source, start, stop in runs:
                for begin in range(start, stop, CHUNK_BYTES):
                    f.write(data := self.read(source, begin, min(begin + CHUNK_BYTES, stop)))
                    bar.update(len(data))


def weight_map_of(index: dict[str, Any], name: str) -> dict[str, str]:
    """The file of every tensor that an index names; ``name`` is the index's own, for the error if it names none."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{name} has no weight_map: download it again.")
    return weight_map


def parse_json(text: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"))
    except ValueError as e:  # text that is not UTF-8, too
        raise ValueError(f"{name} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object.")
    return value
