"""The tensors of a checkpoint, from the headers of its files in a folder or on the hub, and reading single ones.

On the hub, parts are read by HTTP range requests, all from the commit of the revision at the first request. An MTP head may be
among the model's tensors, in a file that the config or an index names, or in others.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

from huggingface_hub import parse_local_safetensors_file_metadata, try_to_load_from_cache
from huggingface_hub.errors import SafetensorsParsingError
from safetensors import SafetensorError, safe_open

from ..core.models.family import COPIES, HeadNames
from ..errors import MTPError, MTPFileNotFoundError
from ..images.tower import split_tower
from .catalog import resolve
from .config import EXTRA_TENSORS, Config, canonical, head_names_in, parse_json
from .hub import (
    WEIGHTS,
    cached_folder,
    check_format,
    check_path,
    commit_of,
    download,
    fetch,
    is_inside,
    list_files,
    warn_once,
)

T = TypeVar("T")
FLOATS = "F32", "F16", "BF16", "F8_E4M3"  # dtypes of tensors that are not quantized
INDEX_FILE = "model.safetensors.index.json"
HEADER_BYTES = 100_000  # requested at first, enough for most headers
CHUNK_BYTES = 16 << 20  # that are read at once, as in a range request
PLACE_BYTES, N_PLACES = 1 << 18, 16  # of two tensors that are compared
DEPTH = 3  # of the folders in which a head may be
AGAIN = "download it again, or delete the index"
PREFIX = re.compile(r"(?:model\.|language_model\.)*")  # which differs between layouts


class Tensor(NamedTuple):
    """A tensor in a safetensors file, the bytes from ``start`` to before ``stop``."""

    file: str
    dtype: str
    shape: list[int]
    start: int
    stop: int


Tensors = dict[str, Tensor]


class Header(NamedTuple):
    tensors: Tensors
    metadata: Mapping[str, str]


class CheckpointReader:
    """Reads only the requested parts of a checkpoint, a folder or a repository. Raises a FileNotFoundError without one.

    ``folder`` is its folder, if it was downloaded, and ``needed`` the files of the index that must exist, by default all.
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
        self.name = resolve(path_or_hf_repo)
        self.folder = folder
        self._needed = needed
        self._headers: dict[str, Header] = {}
        self.revision: str | None
        self.files: list[str] = []
        if folder is None:
            try:
                if Path(self.name).exists():
                    self.folder = fetch(self.name, revision)
                else:
                    self.revision, self.files = list_files(self.name, revision)
                    check_format(self.name, self.files)
            except FileNotFoundError as e:
                self.folder = cached_folder(self.name, revision, e)
        if self.folder is not None:
            levels = ["/".join(["*"] * n) for n in range(1, DEPTH + 1)]
            found = [file.relative_to(self.folder) for level in levels for file in self.folder.glob(level)]
            self.files = [file.as_posix() for file in found if not file.parts[0].startswith(".")]
            self.revision = commit_of(self.folder)
        has_config = "config.json" in self.files
        self.config: Config | None = canonical(self.read_json("config.json")) if has_config else None
        self.names = head_names_in(self.config)  # of its head's tensors

    @property
    def path(self) -> Path:
        """The folder of a checkpoint that is not read on the hub."""
        assert self.folder is not None
        return self.folder

    def read(self, file: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read the bytes of a file from ``start`` to before ``stop``."""
        if (here := _here(self, file)) is None:
            data, _ = download(self.name, self.revision, file, start, stop)
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
        """Read and check the header of a safetensors file once."""
        if file not in self._headers:
            here = _here(self, file)
            self._headers[file] = _download_header(self, file) if here is None else _read_header(here, file, self.name)
        return self._headers[file]

    def has(self, file: str) -> bool:
        return file in self.files if self.folder is None else (self.folder / file).exists()

    @cached_property
    def index(self) -> dict[str, str]:
        """The file of every tensor that the index names; empty without an index."""
        return _read_index(self, INDEX_FILE) if INDEX_FILE in self.files else {}

    @cached_property
    def model_files(self) -> list[str]:
        """The files of the model: those that the index names or, without one, ``model*.safetensors``, as mlx-lm."""
        named = {*self.index.values()}
        absent = {file for file in named if not self.has(file)}
        if missing := absent if self._needed is None else absent.intersection(self._needed):
            raise _missing_files(self, missing, "index")
        files = sorted(named - absent) or sorted(filter(_is_models, self.files))
        if not files:
            raise MTPFileNotFoundError(f"No safetensors found in {self.name}")
        return files

    @cached_property
    def model_map(self) -> dict[str, str]:
        """The file of every tensor, from the index, and in a folder or without an index from the headers, which are checked."""
        found = dict(self.index)
        places = _places(self.names, self.index)
        files = self.model_files
        read = [] if self.folder is None and self.index else files
        indexed = {*places}
        self.tensors({name: file for name, file in sorted(found.items()) if file in read})  # or raises
        for file in read:
            own = {name: name for name in self.header(file).tensors}
            for place, name in _places(self.names, own, is_bare=self.names.marker in self.index).items():
                if (other := places.setdefault(place, file)) == file:
                    found[name] = file
                elif place not in indexed or not place.startswith("mtp."):  # mlx-lm takes any
                    both = f"{other} and {file} of {self.name} both have {name}"
                    raise MTPError(f"{both}: remove the file of the other model.")
        if strays := _strays(self):
            warn_once(f"Not read, since the index of {self.name} does not name them: {', '.join(strays)}.")
        return found

    @cached_property
    def _whole_head(self) -> dict[str, tuple[str, str]]:
        """The name and the file of every tensor of the head, by its parameter, of several heads the first."""
        for place in _places_of_heads(self):
            if head := self.names.split({name: (name, file) for name, file in place.items()})[1]:
                return head
        return {}

    @property
    def head_map(self) -> dict[str, str]:
        """The file of every tensor of the head but for copies, see ``_places_of_heads``. Raises if one is damaged."""
        return dict(tensor for parameter, tensor in self._whole_head.items() if parameter not in COPIES)

    @property
    def head_copies(self) -> dict[str, str]:
        """The names of the copies of the model's embedding and output layer that its head has, by those among ``COPIES``."""
        return {parameter: self._whole_head[parameter][0] for parameter in COPIES if parameter in self._whole_head}

    @property
    def head_files(self) -> list[str]:
        """The files of the head besides ``model*.safetensors`` of the model."""
        models = {*filter(_is_models, self.model_files)}
        if models.issuperset(file for file in self.files if file.endswith(".safetensors")):
            return []  # no header is read on the hub
        return sorted({*self.head_map.values()} - models)

    def tensors(self, files: Mapping[str, str]) -> Tensors:
        """Describe tensors in these files. Raises an MTPError if a file lacks one that the index names."""
        found = {}
        for name, file in files.items():
            if name not in (tensors := self.header(file).tensors):
                raise MTPError(f"{self.name} lacks the tensor {name}, which its index names: {AGAIN}.")
            found[name] = tensors[name]
        return found

    def head(self) -> Tensors:
        return self.tensors(self.head_map)


def _places_of_heads(checkpoint: CheckpointReader) -> Iterator[Mapping[str, str]]:
    """The files of tensors among which a head may be, in this order."""
    model_map = checkpoint.model_map
    extra = (checkpoint.config or {}).get(EXTRA_TENSORS)
    if isinstance(extra, dict) and (named := extra.get("mtp_file")) is not None:
        _check_inside(named, "config.json", checkpoint.name)
        if not checkpoint.has(named):
            raise _missing_files(checkpoint, [named], "config")
        yield dict.fromkeys(checkpoint.header(named).tensors, str(named))
    yield model_map
    for file in checkpoint.files:
        if file.endswith(".safetensors.index.json") and file != INDEX_FILE:
            place = _read_index(checkpoint, file)
            if checkpoint.names.parameter(checkpoint.names.marker) in checkpoint.names.split(place)[1]:
                if missing := {own for own in place.values() if not checkpoint.has(own)}:
                    raise _missing_files(checkpoint, missing, file)
                yield place
    yield _in_unnamed_files(checkpoint)


def _in_unnamed_files(checkpoint: CheckpointReader) -> dict[str, str]:
    """The files of a head's tensors that nothing names. Files whose names differ only in numbers belong together."""
    others = {*checkpoint.model_files, *_strays(checkpoint)}
    files = [file for file in checkpoint.files if file.endswith(".safetensors") and file not in others]
    groups: dict[str, list[str]] = {}
    for file in sorted(files, key=lambda file: ("mtp" not in file, file.count("/"), file)):
        groups.setdefault(re.sub(r"\d+", "", file), []).append(file)
    for group in groups.values():
        found: dict[str, str] = {}
        for file in group:
            try:
                found |= dict.fromkeys(checkpoint.header(file).tensors, file)
            except MTPError as e:
                if "mtp" in file or isinstance(e, OSError):
                    raise
        head = checkpoint.names.split({name: name for name in found})[1]
        if checkpoint.names.parameter(checkpoint.names.marker) in head:
            return {name: found[name] for name in head.values()}
    return {}


def _read_index(checkpoint: CheckpointReader, file: str) -> dict[str, str]:
    """The file of every tensor in an index. Raises MTPError if it is damaged, or names a file outside the checkpoint."""
    weights = checkpoint.read_json(file).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(own, str) for own in weights.values()):
        raise MTPError(f"{file} of {checkpoint.name} has no weight_map: download it again.")
    weights = {name: str(PurePosixPath(file).parent / own) for name, own in weights.items()}
    for own in set(weights.values()):
        _check_inside(own, file, checkpoint.name)
    return weights


def _strays(checkpoint: CheckpointReader) -> list[str]:
    """Files that mlx-lm would load as well, although the index does not name them. A head that it lacks is none."""
    places = _places(checkpoint.names, checkpoint.index)
    strays = []
    for file in {*filter(_is_models, checkpoint.files if places else ())}.difference(checkpoint.model_files):
        own = {"": file}  # a damaged one
        with suppress(MTPError):
            own = _places(checkpoint.names, dict.fromkeys(checkpoint.header(file).tensors, file))
        if any(name in places or not name.startswith("mtp.") for name in own):
            strays.append(file)
    return sorted(strays)


def _places(names: HeadNames, tensors: Mapping[str, T], is_bare: bool = False) -> dict[str, T]:
    """Tensors by names that are the same in all layouts, except experts: a head's begin with ``mtp.``."""
    backbone, head = names.split(tensors, is_bare)
    return {PREFIX.sub("", name, 1): x for name, x in backbone.items()} | {f"mtp.{n}": x for n, x in head.items()}


def _is_models(file: str) -> bool:
    """Whether mlx-lm loads this file."""
    return fnmatch(file, WEIGHTS) and "/" not in file


def _check_inside(file: object, named_by: str, name: str) -> None:
    if not is_inside(file):
        raise MTPError(f"The {named_by} of {name} names the file {file!r}, which is not in its folder.")


def _missing_files(checkpoint: CheckpointReader, files: Iterable[str], named_by: str) -> MTPFileNotFoundError:
    lacks = ", ".join(sorted(files))
    again = AGAIN if "index" in named_by else "download it again"
    return MTPFileNotFoundError(f"{checkpoint.name} lacks {lacks}, which its {named_by} names: {again}.")


def is_copy(checkpoint: CheckpointReader, parameter: str) -> bool:
    """Whether one of its ``head_copies`` is equal to the model's tensor, in some places all over them."""
    own = {PREFIX.sub("", name, 1): name for name in checkpoint.names.split(checkpoint.model_map)[0]}
    _, _, part = parameter.rpartition(".")
    if (same := own.get(parameter, own.get(f"embed_tokens.{part}"))) is None:  # the latter where they are tied
        return False
    name, file = checkpoint._whole_head[parameter]
    a = checkpoint.tensors({name: file})[name]
    b = checkpoint.tensors({same: checkpoint.model_map[same]})[same]
    n = a.stop - a.start
    places = [(i, min(i + PLACE_BYTES, n)) for i in range(0, n, max(n // N_PLACES, PLACE_BYTES))]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and all(
        checkpoint.read(a.file, a.start + i, a.start + j) == checkpoint.read(b.file, b.start + i, b.start + j)
        for i, j in places
    )


def model_tensors(checkpoint: CheckpointReader) -> Tensors:
    """Describe the tensors of the model, in the files that exist."""
    return checkpoint.tensors({name: file for name, file in checkpoint.model_map.items() if checkpoint.has(file)})


def tower_tensors(checkpoint: CheckpointReader) -> Tensors:
    """Describe the tensors of the vision encoder; empty without one."""
    names = split_tower({name: name for name in checkpoint.model_map})[1].values()
    return checkpoint.tensors({name: checkpoint.model_map[name] for name in names})


def files_to_fetch(checkpoint: CheckpointReader) -> list[str]:
    """The files of a model, to download. What a cache lacks is no error here: ``fetch`` tells why."""
    if checkpoint.folder is None:
        return checkpoint.model_files
    return sorted({*checkpoint.index.values()}) or [WEIGHTS]


def fetch_checkpoint(path_or_hf_repo: str, revision: str | None = None) -> CheckpointReader:
    """Fetch a checkpoint with all files of its head."""
    checkpoint = CheckpointReader(path_or_hf_repo, revision)
    folder = fetch(path_or_hf_repo, revision, *checkpoint.head_files, weights=files_to_fetch(checkpoint))
    return CheckpointReader(path_or_hf_repo, folder=folder)


def _here(checkpoint: CheckpointReader, file: str) -> Path | None:
    """A file in the checkpoint's folder or in the hub's cache."""
    if checkpoint.folder is not None:
        return checkpoint.folder / file
    cached = try_to_load_from_cache(checkpoint.name, file, revision=checkpoint.revision)
    return Path(cached) if isinstance(cached, str) else None


def _read_header(path: Path, file: str, name: str) -> Header:
    """Read and check the header of a file of the checkpoint ``name``. No tensor is read."""
    if path.is_dir():
        raise MTPError(f"{file} of {name} is not a safetensors file but a folder: remove or rename it.")
    try:
        # Unlike MLX and huggingface_hub, this checks that the tensors have known dtypes and the sizes of their shapes, and
        # cover the file without a gap or an overlap.
        with safe_open(path, framework="numpy"):
            header = parse_local_safetensors_file_metadata(path)
    except (SafetensorError, SafetensorsParsingError) as e:
        raise MTPError(f"{file} of {name} is truncated or damaged ({e}): download or convert it again.") from e
    with path.open("rb") as f:
        begin = 8 + int.from_bytes(f.read(8), "little")
    found = {n: Tensor(file, t.dtype, t.shape, *(begin + i for i in t.data_offsets)) for n, t in header.tensors.items()}
    return Header(found, header.metadata or {})


def _download_header(checkpoint: CheckpointReader, file: str) -> Header:
    data, size = download(checkpoint.name, checkpoint.revision, file, 0, HEADER_BYTES)
    length = min(8 + int.from_bytes(data[:8], "little"), size)
    if length > len(data):
        data += download(checkpoint.name, checkpoint.revision, file, len(data), length)[0]
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "header"
        copy.write_bytes(data[:length])
        os.truncate(copy, size)  # a sparse file of the same size takes no space
        return _read_header(copy, file, checkpoint.name)


def n_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.stop - t.start for t in tensors.values())
