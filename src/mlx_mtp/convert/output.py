"""What conversion and graft have in common: a folder that appears whole, and what is said in it of the head."""

import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HTTPError
from yaml import YAMLError

from ..checkpoint.hub import HEAD_FILE, first_line
from ..checkpoint.load import EXTRA_TENSORS

log = logging.getLogger(__name__)

USAGE = """
## Multi-token prediction

This checkpoint keeps the model's MTP head, for faster decoding of the same text with mlx_mtp:

```sh
pip install mlx-mtp
mlx_mtp.generate --mtp --model {name} --prompt 'Write a binary search in Python.'
```

Plain mlx-lm loads it, too, and leaves the head out.
"""


def refuse_existing(target: Path) -> None:
    if target.exists():
        raise ValueError(
            f"Cannot save to the path {target} as it already exists."
            " Please delete the file/directory or specify a new path to save to."
        )


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A folder beside ``target``, renamed to it at the end, and removed if there is none, with the parents it needed."""
    made = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp's own is for the user alone
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # somebody has put something there
                parent.rmdir()
        raise


def save(file: Path, weights: dict[str, mx.array]) -> None:
    try:
        mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    except RuntimeError as e:
        raise OSError(f"{file.name} could not be written: {e}") from e


def check_written(folder: Path, head: Mapping[str, mx.array], weight_map: Mapping[str, str]) -> None:
    """Read every tensor of a head back, and compare.

    Raises:
        OSError: One is not as it was.
    """
    written: dict[str, Any] = {file: mx.load(str(folder / file)) for file in {weight_map[name] for name in head}}
    for name, w in head.items():
        back = written[weight_map[name]][name]
        if back.dtype != w.dtype or not mx.array_equal(back, w, equal_nan=True):
            raise OSError(f"{name} was not read back as it was written to {folder / weight_map[name]}.")


def describe_head(
    config: dict[str, Any], origin: dict[str, Any], dtype: mx.Dtype, bits: int | None, apart: bool
) -> None:
    """Put into a config that there is a head, where it comes from and what was done to it.

    Args:
        origin (Dict[str, Any]): Its source and revision, or what an earlier conversion recorded of them.
        apart (bool): Whether it is in a file of its own.
    """
    config.pop("mtp_num_hidden_layers", None)
    config.get("text_config", config)["mtp_num_hidden_layers"] = 1
    config["mlx_mtp"] = {
        "source": origin.get("source"),
        "revision": origin.get("revision"),
        "dtype": str(dtype).removeprefix("mlx.core."),
        "bits": bits,
        "norms_shifted": True,
    }
    config.pop(EXTRA_TENSORS, None)
    if apart:
        config[EXTRA_TENSORS] = {"mtp_file": HEAD_FILE}


def describe_no_head(config: dict[str, Any]) -> None:
    """Take out of a config what it says of a head."""
    for key in ("mtp_num_hidden_layers", "mlx_mtp", EXTRA_TENSORS):
        config.pop(key, None)
    text_config = config.get("text_config", config)
    if "mtp_num_hidden_layers" in text_config:
        text_config["mtp_num_hidden_layers"] = 0


def write_card(folder: Path, original: Path, base_model: str | None, usage: str = "") -> None:
    """The model card: what the original's says of licence and language, and how to use this one.

    mlx-lm's own asks the hub for the original's card even where that is in the cache, and fails where it has none.
    """
    card = None
    if original.exists():
        try:
            card = ModelCard.load(original)
        except (ValueError, YAMLError) as e:  # no reason to throw a conversion away
            log.warning(f"[WARNING] {original} is left aside, because it cannot be read: {' '.join(str(e).split())}")
    card = card or ModelCard.from_template(ModelCardData(language="en"))
    card.data.library_name = "mlx"
    card.data.pipeline_tag = "text-generation"
    card.data.tags = [*(card.data.tags or []), *([] if "mlx" in (card.data.tags or []) else ["mlx"])]
    if base_model is not None:
        card.data.base_model = base_model
    card.text = usage
    card.save(folder / "README.md")


def upload(folder: Path, repo: str) -> None:
    """Put a folder on the hub. mlx-lm's own replaces the model card, and calls what huggingface_hub 2 no longer has."""
    api = HfApi()
    try:
        api.create_repo(repo_id=repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder)
    except (HTTPError, OSError, ValueError) as e:
        raise OSError(
            f"{folder} is complete, but could not be uploaded to {repo} ({first_line(e)}): `hf upload {repo} {folder}` does it."
        ) from e
    print(f"Upload successful, go to https://huggingface.co/{repo} for details.")
