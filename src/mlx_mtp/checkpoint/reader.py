"""The tensors of a checkpoint, from the headers of its files in a folder or on the hub, and reading single ones.

On the hub, parts are read by HTTP range requests, all from the commit of the revision at the first request.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from huggingface_hub import constants, hf_hub_url, is_offline_mode, parse_local_safetensors_file_metadata
from huggingface_hub.errors import HTTPError, SafetensorsParsingError
from huggingface_hub.utils import TensorInfo, build_hf_headers, hf_raise_for_status, http_stream_backoff
from safetensors import SafetensorError, safe_open

from ..images.tower import split_tower
from ..models.head_weights import split_head
from .catalog import resolve
from .config import EXTRA_TENSORS, Config, parse_json
from .hub import WEIGHTS, check_path, commit_of, fetch, hub_errors, is_inside, list_files

INDEX_FILE = "model.safetensors.index.json"
HEADER_BYTES = 100_000  # requested at first, enough for most headers
TRIES = 5  # for a body that breaks off


class Header(NamedTuple):
    """The checked header of a safetensors file; offsets count from ``start`` in the file."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    start: int


class CheckpointReader:
    """Reads only the requested parts of a checkpoint, a folder or a repository.

    Args:
        path_or_hf_repo (str): The checkpoint, by which errors name it.
        folder (Path, optional): Its folder, if it was downloaded.
        needed (Collection[str], optional): The files of the index that must exist. Default: ``None``, all.

    Raises:
        FileNotFoundError: It cannot be read.
    """

    def __init__(
        self,
        path_or_hf_repo: str,
        revision: str | None = None,
        *,
        folder: Path | None = None,
        needed: Collection[str] | None = None,
    ):
        self.name, self.folder, self._needed = resolve(path_or_hf_repo), folder, needed
        self._headers: dict[str, Header] = {}
        self.revision: str | None
        if folder is None and (Path(self.name).exists() or is_offline_mode()):
            self.folder = fetch(self.name, revision)
        if self.folder is not None:
            self.revision, self.files = commit_of(self.folder), [f.name for f in self.folder.glob("*")]
        else:
            check_path(self.name)
            self.revision, self.files = list_files(self.name, revision)
        self.config: Config | None = self.read_json("config.json") if "config.json" in self.files else None

    @property
    def path(self) -> Path:
        """The folder of a checkpoint that is not read on the hub."""
        assert self.folder is not None
        return self.folder

    def read(self, file: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read the bytes of a file from ``start`` to before ``stop``."""
        if self.folder is None:
            data, _ = _download(self.name, self.revision, file, start, stop)
        else:
            with (self.folder / file).open("rb") as f:
                f.seek(start)
                data = f.read(-1 if stop is None else stop - start)
        if stop is not None and len(data) != stop - start:
            raise ValueError(f"{file} of {self.name} is truncated or damaged: download or convert it again.")
        return data

    def read_json(self, file: str) -> Config:
        return parse_json(self.read(file), f"{file} of {self.name}")

    def header(self, file: str) -> Header:
        """Read and check the header of a safetensors file once, see ``read_header``."""
        if file not in self._headers:
            self._headers[file] = self._read_header(file)
        return self._headers[file]

    def _read_header(self, file: str) -> Header:
        if self.folder is not None:
            return read_header(self.folder / file, f"{file} of {self.name}")
        data, size = _download(self.name, self.revision, file, 0, HEADER_BYTES)
        length = min(8 + int.from_bytes(data[:8], "little"), size)
        if length > len(data):
            data += self.read(file, len(data), length)
        with TemporaryDirectory() as folder:
            copy = Path(folder) / "header"
            copy.write_bytes(data[:length])
            os.truncate(copy, size)  # a sparse file of the same size takes no space
            return read_header(copy, f"{file} of {self.name}")

    def has(self, file: str) -> bool:
        return file in self.files if self.folder is None else (self.folder / file).exists()

    @cached_property
    def head_file(self) -> str | None:
        """The file that the config names for the head. It may be missing. A ValueError tells if it is outside the folder."""
        extra = (self.config or {}).get(EXTRA_TENSORS)
        file = extra.get("mtp_file") if isinstance(extra, dict) else None
        if file is not None and not is_inside(file):
            raise ValueError(
                f"The config of {self.name} names {file!r} as the file of its MTP head, which is not in its folder."
            )
        return file

    @property
    def model_files(self) -> list[str]:
        """The files that mlx-lm loads."""
        files = sorted(file for file in self.files if fnmatch(file, WEIGHTS) and "/" not in file)
        if not files:
            raise FileNotFoundError(f"No safetensors found in {self.name}")
        return files

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is the output layer: where no ``lm_head`` is stored, whatever the config says."""
        tensors = (name for file in self.model_files for name in self.header(file).tensors)
        return not any(name.removeprefix("language_model.").startswith("lm_head.") for name in tensors)

    @cached_property
    def index(self) -> dict[str, str]:
        """The file of every tensor in the index; empty without one."""
        if INDEX_FILE not in self.files:
            return {}
        weights = self.read_json(INDEX_FILE).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
            raise ValueError(f"{INDEX_FILE} of {self.name} has no weight_map: download it again.")
        return weights

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """The file of every tensor, from the index, and in a folder, or without an index, from the headers.

        Raises:
            FileNotFoundError: There are no weights, or a file that the index names is missing.
            ValueError: A file is damaged, or lacks a tensor that the index names.
        """
        absent = {file for file in self.index.values() if not self.has(file)}
        if missing := sorted(absent if self._needed is None else absent.intersection(self._needed)):
            raise self._missing(missing[0], "index")
        read = [] if self.folder is None and self.index else self.model_files
        if self.head_file is not None and self.has(self.head_file):
            read.append(self.head_file)
        found = {name: file for file in read for name in self.header(file).tensors}
        if lost := sorted(name for name, file in self.index.items() if file in read and name not in found):
            raise self._lacks(lost[0])
        return self.index | found

    def _missing(self, file: str, named_by: str) -> FileNotFoundError:
        return FileNotFoundError(f"{self.name} lacks {file}, which its {named_by} names: download it again.")

    def _lacks(self, tensor: str) -> ValueError:
        return ValueError(f"{self.name} lacks the tensor {tensor}, which its index names: download it again.")

    def tensors(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Describe some tensors. Raises a ValueError if the index names one that its file lacks."""
        found = {}
        for name in names:
            tensor = self.header(self.weight_map[name]).tensors.get(name)
            if tensor is None:
                raise self._lacks(name)
            found[name] = tensor
        return found

    def head(self) -> dict[str, TensorInfo]:
        """Describe the head's tensors; empty if there is none. Raises a FileNotFoundError if its file is missing."""
        names = split_head({name: name for name in self.weight_map})[1]
        if self.head_file is not None and not self.has(self.head_file):
            raise self._missing(self.head_file, "config")
        return self.tensors(names.values())

    def tower(self) -> dict[str, TensorInfo]:
        """Describe the vision encoder's tensors; empty if there is none."""
        return self.tensors(split_tower({name: name for name in self.weight_map})[1].values())


def read_header(file: Path, name: str) -> Header:
    """Read and check the header of a safetensors file. No tensor is read, so a file may have the right size and no data.

    The safetensors library checks that the tensors have known dtypes and the sizes of their shapes, and cover the file
    without a gap or an overlap; MLX and huggingface_hub do not. ``name`` is the file's in a ValueError about it.
    """
    if file.is_dir():
        raise ValueError(f"{name} is not a safetensors file but a folder: remove or rename it.")
    try:
        with safe_open(file, framework="numpy"):
            pass
        header = parse_local_safetensors_file_metadata(file)
    except (SafetensorError, SafetensorsParsingError) as e:
        raise ValueError(f"{name} is truncated or damaged ({e}): download or convert it again.") from e
    with file.open("rb") as f:
        start = 8 + int.from_bytes(f.read(8), "little")
    return Header(header.tensors, header.metadata or {}, start)


def n_bytes(tensor: TensorInfo) -> int:
    start, stop = tensor.data_offsets
    return stop - start


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
        raise OSError(f"{file} broke off {TRIES} times.")


def _size_of_part(response: Any, file: str, start: int, stop: int) -> int:
    """The size of a file, of which a part was requested. An OSError tells if the body, still unread, is not this part."""
    if response.status_code != 206:
        raise OSError("its server does not support range requests.")
    sent = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.headers.get("Content-Range", ""))
    first, last, size = (int(n) for n in sent.groups()) if sent else (-1, -1, 0)
    if (first, last + 1) != (start, min(stop, size)):
        raise OSError(f"its server sent other bytes of {file} than asked for.")
    return size


def _read_body(response: Any, length: int | None) -> bytes:
    """Read a body. If it is not of this length, raise an OSError once it is longer or ends."""
    data = bytearray()
    for piece in response.iter_bytes():
        data += piece
        if length is not None and len(data) > length:
            break
    if length is not None and len(data) != length:
        raise OSError("its server sent another number of bytes than asked for.")
    return bytes(data)
