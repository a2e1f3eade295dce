"""The tensors of a checkpoint, from the headers of its files in a folder or on the hub, and reading single ones.

On the hub, parts are read by HTTP range requests, all from the commit of the revision at the first request.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatch
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from huggingface_hub import constants, hf_hub_url, is_offline_mode, parse_local_safetensors_file_metadata
from huggingface_hub.errors import SafetensorsParsingError
from huggingface_hub.utils import TensorInfo, build_hf_headers, hf_raise_for_status, http_backoff
from safetensors import SafetensorError, safe_open

from ..images.tower import split_tower
from ..models.head_weights import split_head
from .catalog import resolve
from .config import Config, head_file_of, parse_json, read_json
from .hub import WEIGHTS, check_path, commit_of, fetch, hub_errors, list_files

INDEX_FILE = "model.safetensors.index.json"
HEADER_BYTES = 100_000  # requested at first, enough for most headers


class Header(NamedTuple):
    """The checked header of a safetensors file; offsets count from ``start`` in the file."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    start: int


class CheckpointReader:
    """Reads only the requested parts of a checkpoint, a folder or a repository. A FileNotFoundError tells if it cannot be read,
    or with ``needs_head`` if the head's file that the config names is missing."""

    def __init__(self, path_or_hf_repo: str, revision: str | None = None, needs_head: bool = True):
        self.name, self._needs_head = resolve(path_or_hf_repo), needs_head
        self.revision: str | None
        self.folder: Path | None = None
        if Path(self.name).exists() or is_offline_mode():
            self.folder = fetch(self.name, revision)
            self.revision = commit_of(self.folder)
            self.files = [f.name for f in self.folder.iterdir() if f.is_file()]
        else:
            check_path(self.name)
            self.revision, self.files = list_files(self.name, revision)
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
        """The file of every tensor, as ``weight_map``; on the hub from the index or, without an index, from the headers."""
        head_file = self.head_file
        if head_file is not None and not self._needs_head and not self._has(head_file):
            head_file = None
        if self.folder is not None:
            return weight_map(self.folder, head_file)
        if INDEX_FILE in self.files:
            found = _parse_index(self.read_json(INDEX_FILE), f"{INDEX_FILE} of {self.name}")
            if missing := sorted(file for file in set(found.values()) if not self._has(file)):
                raise _missing(self.name, missing[0], "index")
            files = []
        else:
            found, files = {}, sorted(f for f in self.files if fnmatch(f, WEIGHTS) and "/" not in f)
        if head_file is not None and not self._has(head_file):
            raise _missing(self.name, head_file, "config")
        for file in [*files, *([] if head_file is None else [head_file])]:
            found.update(dict.fromkeys(self.header(file).tensors, file))
        if not found:
            raise FileNotFoundError(f"No safetensors found in {self.name}")
        return found

    def _has(self, file: str) -> bool:
        return file in self.files if self.folder is None else (self.folder / file).exists()

    def tensors(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Describe some tensors. Raises a ValueError if the index names one that its file lacks."""
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
        """Whether the head with these tensors is in the Hugging Face layout. Raises a ValueError if that is unknown."""
        raw = self.has_raw_backbone()
        if self.head_file is None:
            return raw
        return is_raw_head_file(self.name, self.config or {}, raw, head, self.header(self.head_file).metadata)


def read_header(file: Path, name: str | None = None) -> Header:
    """Read and check the header of a safetensors file. No tensor is read, so a file may have the right size and no data.

    The safetensors library checks that the tensors have known dtypes and the sizes of their shapes, and cover the file
    without a gap or an overlap; MLX and huggingface_hub do not. ``name`` is the file's in a ValueError about it.
    """
    check_is_file(file)
    try:
        with safe_open(file, framework="numpy"):
            pass
        header = parse_local_safetensors_file_metadata(file)
    except (SafetensorError, SafetensorsParsingError) as e:
        raise ValueError(f"{name or file} is truncated or damaged ({e}): download or convert it again.") from e
    with file.open("rb") as f:
        start = 8 + int.from_bytes(f.read(8), "little")
    return Header(header.tensors, header.metadata, start)


def weight_map(folder: Path, head_file: str | None = None, needed: Collection[str] | None = None) -> dict[str, str]:
    """The file of every tensor of a checkpoint in a folder.

    The index may lack ``head_file``; of its files only ``needed`` are required, or all.

    Raises:
        FileNotFoundError: There are no weights, or a file that the index or the config names is missing.
        ValueError: A file is damaged.
    """
    files = check_weight_files(folder)
    if head_file is not None:
        files.append(folder / head_file)
        if not files[-1].exists():
            raise _missing(folder, head_file, "config")
    found = {name: str(file.relative_to(folder)) for file in files for name in read_header(file).tensors}
    if not (index := folder / INDEX_FILE).exists():
        return found
    named = _parse_index(read_json(index), str(index))
    absent = set(named.values()).difference(str(file.relative_to(folder)) for file in files)
    if missing := sorted(absent if needed is None else absent.intersection(needed)):
        raise _missing(folder, missing[0], "index")
    if missing := sorted(name for name in named.keys() - found.keys() if named[name] not in absent):
        raise ValueError(f"{folder} lacks the tensor {missing[0]}, which its index names: download it again.")
    return named | found


def indexed_files(folder: Path) -> dict[str, str] | None:
    """The file of every tensor in the index of a folder; ``None`` without an index. The files may be missing."""
    index = folder / INDEX_FILE
    return _parse_index(read_json(index), str(index)) if index.exists() else None


def _parse_index(index: Config, name: str) -> dict[str, str]:
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise ValueError(f"{name} has no weight_map: download it again.")
    return weights


def _missing(checkpoint: str | Path, file: str, named_by: str) -> FileNotFoundError:
    return FileNotFoundError(f"{checkpoint} lacks {file}, which its {named_by} names: download it again.")


def check_weight_files(folder: Path) -> list[Path]:
    """List the model's files; raise a FileNotFoundError if there are none, a ValueError if one is a folder."""
    files = sorted(folder.glob(WEIGHTS))
    if not files:
        raise FileNotFoundError(f"No safetensors found in {folder}")
    for file in files:
        check_is_file(file)
    return files


def check_is_file(file: Path) -> None:
    if file.is_dir():
        raise ValueError(f"{file} is not a safetensors file but a folder: remove or rename it.")


def headers_of(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of a folder's files. Raises an error if there are none, or if one is damaged."""
    return {name: t for file in check_weight_files(folder) for name, t in read_header(file).tensors.items()}


def is_raw_head_file(
    name: str, config: Config, raw_backbone: bool, head: Iterable[str], metadata: Mapping[str, str]
) -> bool:
    """Whether a head in a separate file is in the Hugging Face layout, so that 1 must be added to its norms.

    Conversions by this package record it in config.json. Otherwise the file has the layout of the backbone, except that a file
    from PyTorch, or with experts named as in an original, may have either layout beside a converted backbone: a ValueError. The
    values of the norms do not help: they can be near 0 or near 1 in both layouts.
    """
    record = config.get("mlx_mtp")
    if isinstance(record, dict) and isinstance(record.get("norms_shifted"), bool):
        return not record["norms_shifted"]
    if raw_backbone:
        return True
    if metadata.get("format") == "pt" or any(".experts." in tensor for tensor in head):
        raise ValueError(
            f"The MTP head of {name} is in a separate file that looks like the base model's, but the weights are converted: "
            "whether its norms are shifted is unknown. Graft the base model's: `mlx_mtp convert --graft-mtp-from BASE_MODEL "
            f"--model {name} --mlx-path NEW`."
        )
    return False


def n_bytes(tensor: TensorInfo) -> int:
    start, stop = tensor.data_offsets
    return stop - start


def _download(repo: str, revision: str | None, file: str, start: int, stop: int | None) -> tuple[bytes, int]:
    """The bytes of a file on the hub from ``start`` to before ``stop`` or its end, and its size. Raises a FileNotFoundError."""
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
        first, last, size = (int(n) for n in sent.groups()) if sent else (-1, -1, 0)
        if (first, last + 1) != (start, min(stop, size)) or len(data) != min(stop, size) - start:
            raise OSError(f"its server sent other bytes of {file} than asked for.")
    return data, size
