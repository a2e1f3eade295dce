"""The vision tower of a model's original."""

from pathlib import Path

from huggingface_hub.utils import TensorInfo

from ...images.vision import CONFIG_FILES, Vision, settings_of
from ..config import Config, read_json, text_config_of
from ..storage.copy import copy_tensors
from ..storage.reader import CheckpointReader
from .fetch import CONFIG, WEIGHTS, fetch_part, fetched_before
from .find import check_sizes, find_original

TOWERS = "towers"


def fetch_tower(name: str, folder: Path, config: Config) -> Vision:
    """The vision tower for a checkpoint without one: its original's, fetched the first time. A download resumes.

    Raises:
        FileNotFoundError: The original was not found, or the tower could not be downloaded.
        ValueError: The original is damaged.
    """
    known = fetched_before(TOWERS, folder, config)
    if known is None:
        try:
            original = find_original(name, folder, config, "vision tower", lambda o: fitting_tower(o, config, name))
        except FileNotFoundError as e:
            raise FileNotFoundError(
                f"{e} Add one with `mlx_mtp convert --graft-vision-from ORIGINAL --model {name} --mlx-path NEW`."
            ) from e
        known, _ = fetch_part(TOWERS, original, folder, lambda target: _write(original, config, name, target))
    return Vision(known, config | settings_of(read_json(known / CONFIG)), [WEIGHTS])


def fitting_tower(original: CheckpointReader, config: Config, name: str) -> dict[str, TensorInfo]:
    """Describe the tensors of an original's tower.

    Raises:
        ValueError: There is none, or its model's sizes are not those of the model that is to see with it.
    """
    own, tensors = check_sizes(original, config, name), original.tower()
    if not tensors or not isinstance(own.get("vision_config"), dict):
        raise ValueError(f"{original.name} has no vision tower.")
    return tensors


def _write(original: CheckpointReader, config: Config, name: str, target: Path) -> Config:
    """Write the tower and the settings of its images -> its config."""
    tensors, own = fitting_tower(original, config, name), check_sizes(original, config, name)
    for file in CONFIG_FILES:
        if file in original.files:
            (target / file).write_bytes(original.read(file))
    copy_tensors(original, tensors, target / WEIGHTS)
    record = {"source": original.name, "revision": original.revision}
    return {"text_config": text_config_of(own), **settings_of(own), "mlx_mtp": record}
