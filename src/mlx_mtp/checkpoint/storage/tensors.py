"""The tensors of a checkpoint in a folder, from the headers of its files."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import parse_local_safetensors_file_metadata
from huggingface_hub.errors import SafetensorsParsingError
from huggingface_hub.utils import TensorInfo
from safetensors import SafetensorError, safe_open

from ..config import Config, read_json

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"


class Header(NamedTuple):
    """The header of a safetensors file, which is checked.

    Args:
        tensors (Mapping[str, TensorInfo]): The dtype, the shape and the offsets of each tensor.
        metadata (Mapping[str, str]): The file's metadata.
        start (int): The position in the file that the offsets count from.
    """

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    start: int


def read_header(file: Path, name: str | None = None) -> Header:
    """Read and check the header of a safetensors file. No tensor is read, so a file may have the right size and no data.

    The safetensors library checks that the tensors have known dtypes and the sizes of their shapes, and cover the file
    without a gap or an overlap; MLX and huggingface_hub do not.

    Args:
        name (str, optional): The file's name for errors. Default: ``None``, its path.

    Raises:
        ValueError: The header or the size of the file is wrong.
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


def tensor_names(folder: Path, head_file: str | None = None, needed: Collection[str] | None = None) -> list[str]:
    """List the names of a checkpoint's tensors.

    Args:
        head_file (str, optional): A file with the head, which may be missing in the index.
        needed (Collection[str], optional): The required files of the index. Default: ``None``, all.

    Raises:
        FileNotFoundError: There are no weights, or a file that the index or the config names is missing.
        ValueError: A file is damaged.
    """
    files = {file.name: file for file in check_weight_files(folder)}
    if head_file is not None:
        files[head_file] = folder / head_file
        if not files[head_file].exists():
            raise FileNotFoundError(f"{folder} lacks {head_file}, which its config names: download it again.")
    names = {name for file in files.values() for name in names_in(file)}
    return sorted(names | _check_index(folder, set(files), names, needed))


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


def names_in(file: Path) -> list[str]:
    """The names of the tensors in a file. Raises a ValueError if it is damaged."""
    return list(read_header(file).tensors)


def headers_of(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of a folder's files, each with its dtype, shape and size. No tensor is read.

    Raises:
        FileNotFoundError: There are no weights.
        ValueError: A file is damaged.
    """
    return {name: t for file in check_weight_files(folder) for name, t in read_header(file).tensors.items()}


def _check_index(folder: Path, files: set[str], names: set[str], needed: Collection[str] | None) -> set[str]:
    """The names in the index, if any, after checking that it fits the files."""
    if not (index := folder / INDEX_FILE).exists():
        return set()
    weight_map = weight_map_of(read_json(index), str(index))
    missing_files = set(weight_map.values()) - files
    if missing := sorted(missing_files if needed is None else missing_files.intersection(needed)):
        raise FileNotFoundError(f"{folder} lacks {missing[0]}, which its index names: download it again.")
    if missing := sorted(name for name in weight_map.keys() - names if weight_map[name] not in missing_files):
        raise ValueError(f"{folder} lacks the tensor {missing[0]}, which its index names: download it again.")
    return set(weight_map)


def weight_map_of(index: Config, name: str) -> dict[str, str]:
    """The file of every tensor in an index; ``name`` is the index file's, for the error."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{name} has no weight_map: download it again.")
    return weight_map
