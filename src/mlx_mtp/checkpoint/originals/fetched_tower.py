"""The vision encoder of a model's original."""

from pathlib import Path

from ...images.vision import CONFIG_FILES, Vision, settings_of
from ..config import Config, read_json, text_config_of
from ..storage.reader import CheckpointReader
from .fetch import CONFIG, TOWERS, WEIGHTS, Tensors, copy_tensors, fetch_from_original
from .find import check_sizes


def fetch_tower(name: str, folder: Path, config: Config) -> Vision:
    """Fetch the vision encoder of a checkpoint's original, see ``fetch_from_original``."""
    advice = f"Add one with `mlx_mtp convert --graft-vision-from BASE_MODEL --model {name} --mlx-path NEW`."
    tower, _ = fetch_from_original(
        TOWERS, name, folder, config, lambda o: fitting_tower(o, config, name), _write, advice
    )
    return Vision(tower, config | settings_of(read_json(tower / CONFIG)), [WEIGHTS])


def fitting_tower(original: CheckpointReader, config: Config, name: str) -> Tensors:
    """Describe the tensors of a base model's tower.

    Raises:
        ValueError: There is no tower, or the base model's sizes differ from the model's.
    """
    own, tensors = check_sizes(original, config, name), original.tower()
    if not tensors or not isinstance(own.get("vision_config"), dict):
        raise ValueError(f"{original.name} has no vision encoder.")
    return tensors


def _write(original: CheckpointReader, tensors: Tensors, target: Path) -> Config:
    """Write the tower and its image settings. Return its config."""
    own = original.config or {}
    for file in CONFIG_FILES:
        if file in original.files:
            (target / file).write_bytes(original.read(file))
    copy_tensors(original, tensors, target / WEIGHTS)
    record = {"source": original.name, "revision": original.revision}
    return {"text_config": text_config_of(own), **settings_of(own), "mlx_mtp": record}
