"""Write a synthetic checkpoint of 6 GB in 6 shards, in the raw layout, to measure the memory that its conversion takes:

python -m scripts.large FOLDER
/usr/bin/time -v mlx_mtp convert --hf-path FOLDER --mlx-path OUT -q
"""

import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mtp.models import qwen3_5

DATA = Path(__file__).parents[1] / "tests" / "data"
N_SHARDS = 6
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def config() -> dict:
    """The dense test checkpoint's, with these sizes."""
    source = json.loads((DATA / "dense" / "config.json").read_text())
    source["text_config"].update(SIZES, dtype="bfloat16", tie_word_embeddings=False)
    source["text_config"].pop("layer_types", None)
    return source


def shard_of(name: str) -> int:
    """The backbone's layers in order; the rest, with the head, in the last shard."""
    _, _, after = name.partition("model.layers.")
    return int(after.split(".")[0]) * N_SHARDS // SIZES["num_hidden_layers"] if after else N_SHARDS - 1


def raw(name: str, shape: tuple[int, ...]) -> tuple[str, mx.array]:
    """A tensor under its name and in its shape of the Hugging Face layout."""
    name = name.removeprefix("language_model.").replace("model.", "model.language_model.", 1)
    if name.endswith("conv1d.weight"):
        shape = (shape[0], 1, shape[1])
    return name, (0.02 * mx.random.normal(shape)).astype(mx.bfloat16)


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config()))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "dense" / name, folder)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config()))
    shards = [{} for _ in range(N_SHARDS)]
    for name, p in tree_flatten(model.parameters()):
        shards[shard_of(name)][name] = p.shape
    weight_map = {}
    for i, shapes in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{N_SHARDS:05d}.safetensors"
        weights = dict(raw(name, shape) for name, shape in shapes.items())
        mx.save_safetensors(str(folder / file), weights, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(weights, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
