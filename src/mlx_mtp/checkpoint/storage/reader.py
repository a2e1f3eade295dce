"""Reader of parts of a checkpoint in a folder or on the hub: config, headers and single tensors.

On the hub, parts are read by HTTP range requests, all from the commit of the revision at the first request.
"""

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import constants, hf_hub_url, is_offline_mode
from huggingface_hub.utils import TensorInfo, build_hf_headers, hf_raise_for_status, http_backoff

from ...images.tower import split_tower
from ...layers.mtp import split_head
from ..catalog import resolve
from ..config import Config, parse_json
from ..head_formats import head_file_of, is_raw_head_file
from .hub import check_path, commit_of, fetch, hub_errors, list_files
from .tensors import INDEX_FILE, WEIGHTS, Header, read_header, tensor_names, weight_map_of

HEADER_BYTES = 100_000  # requested at first, enough for most headers


class CheckpointReader:
    """Reads only the requested parts of a checkpoint.

    Args:
        path_or_hf_repo (str): A folder or a repository.
        revision (str, optional): Branch, tag or commit of the repository.
        needs_head (bool): Whether a head file named in the config must exist. Default: ``True``.

    Raises:
        FileNotFoundError: The checkpoint is missing or cannot be read.
    """

    def __init__(self, path_or_hf_repo: str, revision: str | None = None, needs_head: bool = True):
        self.name = path_or_hf_repo = resolve(path_or_hf_repo)
        self.revision: str | None
        self.folder: Path | None = None
        self._needs_head = needs_head
        if Path(path_or_hf_repo).exists() or is_offline_mode():
            self.folder = fetch(path_or_hf_repo, revision)
            self.revision = commit_of(self.folder)
            self.files = [f.name for f in self.folder.iterdir() if f.is_file()]
        else:
            check_path(path_or_hf_repo)
            self.revision, self.files = list_files(path_or_hf_repo, revision)
        self.config: Config | None = self.read_json("config.json") if "config.json" in self.files else None

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

    @cache  # noqa: B019 (a command makes one or two readers)
    def header(self, file: str) -> Header:
        """Read and check the header of a safetensors file, see ``read_header``."""
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

    @cached_property
    def head_file(self) -> str | None:
        """The file that the config names for the head."""
        return head_file_of(self.name, self.config or {})

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """The file of every tensor, from the index or, without an index, from the headers.

        Raises:
            FileNotFoundError: There are no weights, or a file that the index or the config names is missing.
            ValueError: A file is damaged.
        """
        head_files = []
        if self.head_file is not None and (self._needs_head or self._has(self.head_file)):
            head_files = [self.head_file]
        if self.folder is not None:
            tensor_names(self.folder, *head_files)
        if missing := [file for file in head_files if not self._has(file)]:
            raise FileNotFoundError(f"{self.name} lacks {missing[0]}, which its config names: download it again.")
        weight_map = self._index()
        files = [] if weight_map else sorted(f for f in self.files if fnmatch(f, WEIGHTS) and "/" not in f)
        for file in [*files, *head_files]:
            weight_map.update(dict.fromkeys(self.header(file).tensors, file))
        if not weight_map:
            raise FileNotFoundError(f"No safetensors found in {self.name}")
        return weight_map

    def _index(self) -> dict[str, str]:
        if INDEX_FILE not in self.files:
            return {}
        weight_map = weight_map_of(self.read_json(INDEX_FILE), f"{INDEX_FILE} of {self.name}")
        if missing := sorted(file for file in set(weight_map.values()) if not self._has(file)):
            raise FileNotFoundError(f"{self.name} lacks {missing[0]}, which its index names: download it again.")
        return weight_map

    def _has(self, file: str) -> bool:
        return file in self.files if self.folder is None else (self.folder / file).exists()

    def tensors(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Describe some tensors.

        Raises:
            ValueError: The index names a tensor that its file lacks.
        """
        found = {}
        for name in names:
            tensor = self.header(self.weight_map[name]).tensors.get(name)
            if tensor is None:
                raise ValueError(f"{self.name} lacks the tensor {name}, which its index names: download it again.")
            found[name] = tensor
        return found

    def head(self) -> dict[str, TensorInfo]:
        """Describe the head's tensors; empty if there is none."""
        return self.tensors(split_head({name: name for name in self.weight_map})[1].values())

    def tower(self) -> dict[str, TensorInfo]:
        """Describe the vision encoder's tensors; empty if there is none."""
        return self.tensors(split_tower({name: name for name in self.weight_map})[1].values())

    def first_tensor(self, suffix: str) -> TensorInfo | None:
        """Describe the first tensor whose name has this suffix."""
        names = [name for name in self.weight_map if name.endswith(suffix)][:1]
        return next(iter(self.tensors(names).values()), None)

    def has_raw_backbone(self) -> bool:
        """Whether the backbone is in the Hugging Face layout."""
        convolution = self.first_tensor("conv1d.weight")
        return convolution is not None and convolution.shape[-1] != 1

    def has_raw_head(self, head: Iterable[str]) -> bool:
        """Whether the head with these tensors is in the Hugging Face layout.

        Raises:
            ValueError: The layout of a head in a separate file cannot be determined.
        """
        raw = self.has_raw_backbone()
        if self.head_file is None:
            return raw
        return is_raw_head_file(self.name, self.config or {}, raw, head, self.header(self.head_file).metadata)


def n_bytes(tensor: TensorInfo) -> int:
    start, stop = tensor.data_offsets
    return stop - start


def _download(repo: str, revision: str | None, file: str, start: int, stop: int | None) -> tuple[bytes, int]:
    """The bytes of a file on the hub from ``start`` to before ``stop`` or its end, and its size.

    Raises:
        FileNotFoundError: It could not be read, or the server sent other bytes.
    """
    url, headers = hf_hub_url(repo, file, revision=revision), build_hf_headers()
    if stop is not None:
        headers["Range"] = f"bytes={start}-{stop - 1}"
    with hub_errors(repo, revision):
        response = http_backoff("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        hf_raise_for_status(response)
        data = response.content
        if stop is None:
            return data, len(data)
        if response.status_code != 206:
            raise OSError("its server does not support range requests.")
        sent = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.headers.get("Content-Range", ""))
        size = int(sent[3]) if sent else 0
        if (
            sent is None
            or (int(sent[1]), int(sent[2]) + 1) != (start, min(stop, size))
            or len(data) != min(stop, size) - start
        ):
            raise OSError(f"its server sent other bytes of {file} than asked for.")
    return data, size
