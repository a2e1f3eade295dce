"""Reading parts of a checkpoint, in a folder or on the hub: config, headers and single tensors.

On the hub, parts are read by HTTP range requests, all from the commit that the revision named at first.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    constants,
    hf_hub_url,
    is_offline_mode,
    parse_local_safetensors_file_metadata,
)
from huggingface_hub.errors import SafetensorsParsingError
from huggingface_hub.utils import (
    SafetensorsFileMetadata,
    TensorInfo,
    build_hf_headers,
    hf_raise_for_status,
    http_backoff,
)
from tqdm import tqdm

from ...images.tower import split_tower
from ...layers.mtp import split_head
from ..catalog import resolve
from ..config import Config, parse_json
from ..head_formats import head_file_of, is_raw_head_file
from .hub import check_path, commit_of, fetch, hub_errors
from .tensors import INDEX_FILE, WEIGHTS, tensor_names, weight_map_of

CHUNK_BYTES = 16 << 20  # per range request, which is repeated if it fails


class CheckpointReader:
    """A checkpoint of which only the requested parts are read.

    Args:
        path_or_hf_repo (str): A folder or a repository.
        revision (str, optional): Branch, tag or commit of the repository.
        needs_head (bool): Whether a head file that the config names must exist. Default: ``True``.

    Raises:
        FileNotFoundError: It is not there or cannot be read.
    """

    def __init__(self, path_or_hf_repo: str, revision: str | None = None, needs_head: bool = True):
        self.name = path_or_hf_repo = resolve(path_or_hf_repo)
        self.folder: Path | None = None
        self._needs_head = needs_head
        if Path(path_or_hf_repo).exists() or is_offline_mode():
            self.folder = fetch(path_or_hf_repo, revision)
            self.revision = commit_of(self.folder)
            self.files = [f.name for f in self.folder.iterdir() if f.is_file()]
        else:
            check_path(path_or_hf_repo)
            with hub_errors(path_or_hf_repo, revision):
                info = HfApi().model_info(path_or_hf_repo, revision=revision)
            self.revision = info.sha
            self.files = [f.rfilename for f in info.siblings or []]
        self.config: Config | None = self.read_json("config.json") if "config.json" in self.files else None

    def read(self, file: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read the bytes of a file from ``start`` to before ``stop``."""
        if self.folder is None:
            data = self._download(file, start, stop)
        else:
            with (self.folder / file).open("rb") as f:
                f.seek(start)
                data = f.read(-1 if stop is None else stop - start)
        if stop is not None and len(data) != stop - start:
            raise ValueError(self._damaged(file))
        return data

    def read_json(self, file: str) -> Config:
        return parse_json(self.read(file), f"{file} of {self.name}")

    # huggingface_hub parses headers, but reads neither single tensors nor, of a sharded checkpoint, the headers of some
    # files alone; so ranges of files and the index are read here.
    def _download(self, file: str, start: int, stop: int | None) -> bytes:
        url = hf_hub_url(self.name, file, revision=self.revision)
        headers = build_hf_headers()
        if stop is not None:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        with hub_errors(self.name, self.revision):
            response = http_backoff("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
            hf_raise_for_status(response)
            if stop is not None and response.status_code != 206:
                raise OSError("its server does not support range requests.")
        return response.content

    @cache  # noqa: B019 (a command makes one or two readers)
    def header(self, file: str) -> SafetensorsFileMetadata:
        """Parse the header of a safetensors file."""
        try:
            if self.folder is not None:
                return parse_local_safetensors_file_metadata(self.folder / file)
            with hub_errors(self.name, self.revision):
                return HfApi().parse_safetensors_file_metadata(self.name, file, revision=self.revision)
        except (SafetensorsParsingError, AttributeError, TypeError) as e:
            raise ValueError(self._damaged(file)) from e

    def _damaged(self, file: str) -> str:
        return f"{file} of {self.name} is truncated or damaged: download or convert it again."

    @cached_property
    def head_file(self) -> str | None:
        """The file that the config names for the head."""
        return head_file_of(self.name, self.config or {})

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """The file of every tensor, from the index, or from the headers where there is none.

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
        """Describe the vision tower's tensors; empty if there is none."""
        return self.tensors(split_tower({name: name for name in self.weight_map})[1].values())

    def first(self, suffix: str) -> TensorInfo | None:
        """Describe the first tensor whose name ends so."""
        names = [name for name in self.weight_map if name.endswith(suffix)][:1]
        return next(iter(self.tensors(names).values()), None)

    def has_raw_backbone(self) -> bool:
        """Whether the backbone is in the Hugging Face layout."""
        convolution = self.first("conv1d.weight")
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

    def save(self, tensors: Mapping[str, TensorInfo], file: Path, names: Mapping[str, str] | None = None) -> None:
        """Write some tensors to a new safetensors file, reading no other bytes.

        The file appears when it is complete. Until then its bytes are in ``file`` with ``.part`` behind its name, and another
        call resumes there.

        Args:
            names (Dict[str, str], optional): What to call each in the file. Default: ``None``, as they are called.
        """
        order = sorted(tensors, key=lambda name: (self.weight_map[name], tensors[name].data_offsets))
        header, n = {}, 0
        for name in order:
            t = tensors[name]
            stop = n + n_bytes(t)
            header[names[name] if names else name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [n, stop]}
            n = stop
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        head, part = struct.pack("<Q", len(text)) + text, file.with_name(file.name + ".part")
        done = _resume(part, head, n)
        with part.open("ab") as f, _bar(n, done) as bar:
            for source, start, stop in self._runs(order, tensors):
                for begin in range(start + (skipped := min(done, stop - start)), stop, CHUNK_BYTES):
                    f.write(data := self.read(source, begin, min(begin + CHUNK_BYTES, stop)))
                    bar.update(len(data))
                done -= skipped
        part.replace(file)

    def _runs(self, order: list[str], tensors: Mapping[str, TensorInfo]) -> list[tuple[str, int, int]]:
        """The ranges to read, (file, start, stop), tensors that lie side by side joined into one."""
        runs: list[tuple[str, int, int]] = []
        data_start: dict[str, int] = {}  # of each file: offsets in a header count from its end
        for name in order:
            file = self.weight_map[name]
            if file not in data_start:
                data_start[file] = 8 + struct.unpack("<Q", self.read(file, 0, 8))[0]
            start, stop = (data_start[file] + offset for offset in tensors[name].data_offsets)
            if runs and (runs[-1][0], runs[-1][2]) == (file, start):
                runs[-1] = (file, runs[-1][1], stop)
            else:
                runs.append((file, start, stop))
        return runs


def n_bytes(tensor: TensorInfo) -> int:
    start, stop = tensor.data_offsets
    return stop - start


def _resume(part: Path, head: bytes, n: int) -> int:
    """Begin a file with these bytes, or keep up to n that another call has written behind them -> the bytes that are there."""
    if part.exists() and (done := part.stat().st_size - len(head)) <= n:
        with part.open("rb") as f:
            if f.read(len(head)) == head:
                return done
    part.write_bytes(head)
    return 0


def _bar(n: int, done: int) -> Any:
    return tqdm(total=n, initial=done, desc="Reading", unit="B", unit_scale=True, disable=None)
