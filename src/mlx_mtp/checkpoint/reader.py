"""The tensors of a checkpoint, from the headers of its files in a folder or on the hub, and reading single ones.

On the hub, parts are read by HTTP range requests, all from the commit of the revision at the first request.
"""

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from huggingface_hub import (
    constants,
    hf_hub_url,
    is_offline_mode,
    parse_local_safetensors_file_metadata,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HTTPError, SafetensorsParsingError
from huggingface_hub.utils import TensorInfo, build_hf_headers, hf_raise_for_status, http_stream_backoff
from safetensors import SafetensorError, safe_open

from ..errors import MTPError, MTPFileNotFoundError, MTPOSError
from ..images.tower import split_tower
from ..models.head_weights import split_head
from .catalog import resolve
from .config import Config, canonical, parse_json
from .head_places import INDEX_FILE, is_models, missing_file, places_of_heads, read_index
from .hub import check_format, check_path, commit_of, fetch, hub_errors, list_files

HEADER_BYTES = 100_000  # requested at first, enough for most headers
TRIES = 5  # for a body that breaks off
DEPTH = 3  # of the folders in which a head may be


class Header(NamedTuple):
    """The checked header of a safetensors file; offsets count from ``start`` in the file."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    start: int


class CheckpointReader:
    """Reads only the requested parts of a checkpoint, a folder or a repository. Raises a FileNotFoundError without one.

    Args:
        folder: Its folder, if it was downloaded.
        needed: The files of the index that must exist. Default: ``None``, all.
    """

    def __init__(
        self,
        path_or_hf_repo: str,
        revision: str | None = None,
        *,
        folder: Path | None = None,
        needed: Collection[str] | None = None,
    ):
        check_path(path_or_hf_repo)
        check_format(path_or_hf_repo, [path_or_hf_repo])
        self.name, self.folder, self._needed = resolve(path_or_hf_repo), folder, needed
        self._headers: dict[str, Header] = {}
        self.revision: str | None
        self.files: list[str] = []
        if folder is None:
            with suppress(FileNotFoundError):  # the cache may have the files
                if not Path(self.name).exists() and not is_offline_mode():
                    self.revision, self.files = list_files(self.name, revision)
                    check_format(self.name, self.files)
            if not self.files:
                self.folder = fetch(self.name, revision, weights=())
        if self.folder is not None:
            self.revision, self.files = commit_of(self.folder), _files_in(self.folder)
        has_config = "config.json" in self.files
        self.config: Config | None = canonical(self.read_json("config.json")) if has_config else None

    @property
    def path(self) -> Path:
        """The folder of a checkpoint that is not read on the hub."""
        assert self.folder is not None
        return self.folder

    def _here(self, file: str) -> Path | None:
        """A file in the checkpoint's folder or in the hub's cache."""
        if self.folder is not None:
            return self.folder / file
        cached = try_to_load_from_cache(self.name, file, revision=self.revision)
        return Path(cached) if isinstance(cached, str) else None

    def read(self, file: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read the bytes of a file from ``start`` to before ``stop``."""
        if (here := self._here(file)) is None:
            data, _ = _download(self.name, self.revision, file, start, stop)
        else:
            with here.open("rb") as f:
                f.seek(start)
                data = f.read(-1 if stop is None else stop - start)
        if stop is not None and len(data) != stop - start:
            raise MTPError(f"{file} of {self.name} is truncated or damaged: download or convert it again.")
        return data

    def read_json(self, file: str) -> Config:
        return parse_json(self.read(file), f"{file} of {self.name}")

    def header(self, file: str) -> Header:
        """Read and check the header of a safetensors file once, see ``read_header``."""
        if file not in self._headers:
            name, here = f"{file} of {self.name}", self._here(file)
            own = _download_header(self.name, self.revision, file, name) if here is None else read_header(here, name)
            self._headers[file] = own
        return self._headers[file]

    def has(self, file: str) -> bool:
        return file in self.files if self.folder is None else (self.folder / file).exists()

    @property
    def model_files(self) -> list[str]:
        """The files that mlx-lm loads."""
        files = sorted(filter(is_models, self.files))
        if not files:
            raise MTPFileNotFoundError(f"No safetensors found in {self.name}")
        return files

    @cached_property
    def index(self) -> dict[str, str]:
        return read_index(self, INDEX_FILE) if INDEX_FILE in self.files else {}

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """``model_map`` and ``head_map``."""
        return self.model_map | self.head_map

    @cached_property
    def model_map(self) -> dict[str, str]:
        """The file of every tensor, from the index, and in a folder or without an index from the headers, which are checked."""
        named = set(self.index.values())
        absent = {file for file in named if not self.has(file)}
        if missing := sorted(absent if self._needed is None else absent.intersection(self._needed)):
            raise missing_file(self, missing[0], "index")
        read = set() if self.folder is None and self.index else {*self.model_files, *named} - absent
        found = {name: file for file in sorted(read) for name in self.header(file).tensors}
        if lost := sorted(name for name, file in self.index.items() if file in read and name not in found):
            raise _lacking(self.name, lost[0])
        return self.index | found

    @cached_property
    def head_map(self) -> dict[str, str]:
        """The file of every tensor of the head, of several the first, see ``places_of_heads``. Raises if one is damaged."""
        for place in places_of_heads(self):
            if head := split_head({name: name for name in place})[1]:
                return {name: place[name] for name in head.values()}
        return {}

    @property
    def head_files(self) -> list[str]:
        """The files of the head that mlx-lm does not load."""
        if not any(file.endswith(".safetensors") and not is_models(file) for file in self.files):
            return []  # no header is read on the hub
        return sorted({file for file in self.head_map.values() if not is_models(file)})

    def tensors(self, files: Mapping[str, str]) -> dict[str, TensorInfo]:
        """Describe tensors in these files. Raises an MTPError if a file lacks one that the index names."""
        found = {}
        for name, file in files.items():
            tensor = self.header(file).tensors.get(name)
            if tensor is None:
                raise _lacking(self.name, name)
            found[name] = tensor
        return found

    def head(self) -> dict[str, TensorInfo]:
        """Describe the head's tensors, if any. Raises an error as ``head_map``."""
        return self.tensors(self.head_map)

    def tower(self) -> dict[str, TensorInfo]:
        """Describe the vision encoder's tensors, if any."""
        names = split_tower({name: name for name in self.model_map})[1].values()
        return self.tensors({name: self.model_map[name] for name in names})


def _lacking(name: str, tensor: str) -> MTPError:
    return MTPError(f"{name} lacks the tensor {tensor}, which its index names: download it again.")


def is_tied(checkpoint: CheckpointReader) -> bool:
    """Whether the embedding is the output layer: where no ``lm_head`` is stored, whatever the config says."""
    tensors = (name for file in checkpoint.model_files for name in checkpoint.header(file).tensors)
    return not any(name.removeprefix("language_model.").startswith("lm_head.") for name in tensors)


def fetch_checkpoint(path_or_hf_repo: str, revision: str | None = None) -> CheckpointReader:
    """Fetch a checkpoint with all files of its head."""
    checkpoint = CheckpointReader(path_or_hf_repo, revision)
    folder = fetch(path_or_hf_repo, revision, *checkpoint.head_files)
    return CheckpointReader(path_or_hf_repo, folder=folder)


def _files_in(folder: Path) -> list[str]:
    """The files in a folder and its folders, and the folders in it, relative to it."""
    found = (file.relative_to(folder) for depth in range(DEPTH) for file in folder.glob("/".join(["*"] * (depth + 1))))
    return [file.as_posix() for file in found if not file.parts[0].startswith(".")]


def read_header(file: Path, name: str) -> Header:
    """Read and check the header of a safetensors file, ``name`` in errors. No tensor is read.

    The safetensors library checks that the tensors have known dtypes and the sizes of their shapes, and cover the file
    without a gap or an overlap; MLX and huggingface_hub do not.
    """
    if file.is_dir():
        raise MTPError(f"{name} is not a safetensors file but a folder: remove or rename it.")
    try:
        with safe_open(file, framework="numpy"):
            pass
        header = parse_local_safetensors_file_metadata(file)
    except (SafetensorError, SafetensorsParsingError) as e:
        raise MTPError(f"{name} is truncated or damaged ({e}): download or convert it again.") from e
    with file.open("rb") as f:
        start = 8 + int.from_bytes(f.read(8), "little")
    return Header(header.tensors, header.metadata or {}, start)


def _download_header(repo: str, revision: str | None, file: str, name: str) -> Header:
    data, size = _download(repo, revision, file, 0, HEADER_BYTES)
    length = min(8 + int.from_bytes(data[:8], "little"), size)
    if length > len(data):
        data += _download(repo, revision, file, len(data), length)[0]
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "header"
        copy.write_bytes(data[:length])
        os.truncate(copy, size)  # a sparse file of the same size takes no space
        return read_header(copy, name)


def n_bytes(*tensors: TensorInfo) -> int:
    return sum(stop - start for start, stop in (tensor.data_offsets for tensor in tensors))


def _download(repo: str, revision: str | None, file: str, start: int, stop: int | None) -> tuple[bytes, int]:
    """The bytes of a file on the hub from ``start`` to before ``stop`` or its end, and its size. Raises a FileNotFoundError."""
    url, headers = hf_hub_url(repo, file, revision=revision), build_hf_headers()
    if stop is not None:
        headers["Range"] = f"bytes={start}-{stop - 1}"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with hub_errors(repo, revision):
        for _ in range(TRIES):
            with http_stream_backoff("GET", url, headers=headers, timeout=timeout) as response:
                hf_raise_for_status(response)
                size = None if stop is None else _size_of_part(response, file, start, stop)
                with suppress(HTTPError):  # the body broke off: ask again
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
