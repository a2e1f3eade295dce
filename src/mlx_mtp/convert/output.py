"""The files of a conversion: its tensors, in files of limited size to limit the memory, and its model card."""

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HTTPError
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import get_total_parameters, make_shards, save_config
from tqdm import tqdm
from yaml import YAMLError

from ..checkpoint.config import EXTRA_TENSORS, Config
from ..checkpoint.head_formats import is_head
from ..checkpoint.hub import HEAD_FILE, WEIGHTS, first_line
from ..checkpoint.output import check_written, save, write_index


def shard_gb(source: Path) -> int:
    """The size of the files to write, in GiB: about that of a checkpoint's largest file, since a few of them fit in memory."""
    return max(1, round(max(f.stat().st_size for f in source.glob(WEIGHTS)) / (1 << 30)))


def write_model(
    folder: Path, model: nn.Module, config: Config, max_file_size_gb: int, tower: dict[str, mx.array]
) -> None:
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
    shards = make_shards({n: w for n, w in weights.items() if not (separate and is_head(n))}, max_file_size_gb)
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
    """Write and release each shard, as mlx-lm's ``save_model``, with a progress bar. Return the file of every tensor."""
    weight_map: dict[str, str] = {}
    for i in tqdm(range(len(shards)), desc="Writing", unit="shard", disable=None):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        shard, shards[i] = shards[i], {}
        save(folder / name, shard)
        weight_map.update(dict.fromkeys(shard, name))
        del shard
        mx.clear_cache()
    return weight_map


# The model card

log = logging.getLogger(__name__)

USAGE = """
## Multi-token prediction

This checkpoint keeps the model's MTP head. mlx_mtp uses it to generate the same text faster. Install mlx_mtp
(see its README), then:

```sh
mlx_mtp generate --mtp --model {name} --prompt 'Write a binary search in Python.'
```

mlx-lm 0.32.0 and later loads the checkpoint and ignores the head.
"""
IMAGES = """
## Images

This checkpoint keeps the model's vision encoder:

```sh
mlx_mtp generate --mtp --model {name} --image picture.png --prompt 'What is this?'
```
"""


def write_card(
    folder: Path, original: Path, base_model: str | None, usage: str = "", takes_images: bool = False
) -> None:
    """Write the model card: the base model's metadata, such as licence and language, and how to use this checkpoint.

    mlx-lm's own function requests the base model's card from the hub even if it is in the cache, and fails if there is none.
    """
    card = _read_card(original) or ModelCard.from_template(ModelCardData(language="en"))
    data: Any = card.data
    data.library_name = "mlx"
    data.pipeline_tag = "image-text-to-text" if takes_images else "text-generation"
    tags = data.tags or []
    data.tags = tags if "mlx" in tags else [*tags, "mlx"]
    if base_model is not None:
        data.base_model = base_model
    card.text = usage
    card.save(folder / "README.md")


def _read_card(file: Path) -> ModelCard | None:
    if not file.exists():
        return None
    try:
        card: ModelCard = ModelCard.load(file)
    except (ValueError, YAMLError) as e:  # a conversion does not fail because of its card
        log.warning(f"[WARNING] {file} is ignored, because it cannot be read: {' '.join(str(e).split())}")
        return None
    return card


def upload(folder: Path, repo: str) -> None:
    """Upload a folder. mlx-lm's own function replaces the model card, and uses an API that huggingface_hub 2 lacks."""
    api = HfApi()
    try:
        api.create_repo(repo_id=repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder)
    except (HTTPError, OSError, ValueError) as e:
        raise OSError(
            f"{folder} is complete, but could not be uploaded to {repo} ({first_line(e)}): `hf upload {repo} {folder}` does it."
        ) from e
    print(f"Upload successful, go to https://huggingface.co/{repo} for details.")
