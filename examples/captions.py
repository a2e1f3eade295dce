"""Put the trained vision encoder onto the demo: a checkpoint that names what small pictures show.

    python examples/captions.py captions
    mlx_mtp generate --mtp --model captions --image tests/data/captions/00-number.png --prompt '\"\"\"'

tests/data/captions has what differs from the demo's files; train_captions.py made it.
"""

import shutil
import sys
from pathlib import Path

import mlx.core as mx

from mlx_mtp import DEMO

TRAINED = Path(__file__).parents[1] / "tests/data/captions"
FILES = ("config.json", "preprocessor_config.json", "tokenizer.json")


def make_checkpoint(folder: Path) -> Path:
    """Write the whole checkpoint into a new folder."""
    shutil.copytree(DEMO, folder)
    for name in FILES:
        shutil.copy(TRAINED / name, folder / name)
    parts = [DEMO / "model.safetensors", TRAINED / "model.safetensors", TRAINED / "head.safetensors"]
    weights = {name: w for part in parts for name, w in mx.load(str(part)).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/captions.py FOLDER")
    make_checkpoint(Path(sys.argv[1]))
