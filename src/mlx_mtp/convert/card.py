"""The model card of a converted checkpoint, and its upload."""

import logging
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HTTPError
from yaml import YAMLError

from ..checkpoint.storage.hub import first_line

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
