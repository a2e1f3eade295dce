"""Writing of a model's tensors in files of limited size, one by one, to limit the memory of a conversion."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import get_total_parameters, save_config
from tqdm import tqdm

from ..checkpoint.config import Config
from ..checkpoint.head_formats import EXTRA_TENSORS, is_head
from ..checkpoint.storage.hub import HEAD_FILE
from ..checkpoint.storage.output import check_written, save, write_index
from ..checkpoint.storage.tensors import WEIGHTS


def max_shard_bytes(source: Path) -> int:
    """The size of a checkpoint's largest file, which limits the files of the output: a few of them fit in memory."""
    return max(f.stat().st_size for f in source.glob(WEIGHTS))


def write_model(folder: Path, model: nn.Module, config: Config, shard_bytes: int, tower: dict[str, mx.array]) -> None:
    """Write a model's tensors, the index and config.json, and read the head and the vision encoder back.

    The model has no weights afterwards.

    Args:
        tower (Dict[str, mx.array]): The vision encoder's tensors; empty for none.

    Raises:
        OSError: A file could not be written, or the head or the tower differs when read back.
    """
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters())) | tower
    n_parameters = get_total_parameters(model) + sum(w.size for w in tower.values())
    metadata = {"total_size": sum(w.nbytes for w in weights.values()), "total_parameters": n_parameters}
    head = {name: w for name, w in weights.items() if is_head(name)}
    # mlx-lm's Qwen3-Next keeps tensors that it does not know when it loads a converted checkpoint, and then fails: its head
    # goes into a separate file.
    separate = config.get(EXTRA_TENSORS) is not None
    shards = split_into_shards({n: w for n, w in weights.items() if not (separate and is_head(n))}, shard_bytes)
    # Now only the shards hold the tensors, so each tensor is freed once written.
    weights.clear()
    model.update(tree_map_with_path(lambda *_: mx.array([]), model.parameters()))

    weight_map = _write_shards(folder, shards)
    if separate:
        save(folder / HEAD_FILE, head)
        weight_map.update(dict.fromkeys(head, HEAD_FILE))
    write_index(folder, weight_map, metadata)
    save_config(config, folder / "config.json", keep_vision_config=bool(tower))
    check_written(folder, head | tower, weight_map)


def _write_shards(folder: Path, shards: list[dict[str, mx.array]]) -> dict[str, str]:
    """Write and release each shard. Return the file of every tensor."""
    weight_map: dict[str, str] = {}
    for i in tqdm(range(len(shards)), desc="Writing", unit="shard", disable=None):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        shard, shards[i] = shards[i], {}
        save(folder / name, shard)
        weight_map.update(dict.fromkeys(shard, name))
        del shard
        mx.clear_cache()
    return weight_map


def split_into_shards(weights: dict[str, mx.array], shard_bytes: int) -> list[dict[str, mx.array]]:
    """Split into shards as mlx-lm's ``make_shards``, whose size is in whole GiB."""
    shards: list[dict[str, mx.array]] = [{}]
    size = 0
    for name, w in weights.items():
        if shards[-1] and size + w.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = w
        size += w.nbytes
    return shards
