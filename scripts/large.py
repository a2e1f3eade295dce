"""Write a synthetic checkpoint of 6 GB in 6 shards, in the raw layout, to see what memory its conversion takes:

python scripts/large.py FOLDER
/usr/bin/time -v mlx_mtp.convert --hf-path FOLDER --mlx-path OUT -q
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
from helpers import DATA, tiny_config
from mlx.utils import tree_flatten

from mlx_mtp.models import qwen3_5

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


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    config = tiny_config("qwen3_5", dtype="bfloat16", **SIZES)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "dense" / name, folder)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    shapes = {name: p.shape for name, p in tree_flatten(model.parameters())}
    shards = [{} for _ in range(N_SHARDS)]
    for name, shape in shapes.items():
        parts = name.split(".")
        i = (
            int(parts[3]) * N_SHARDS // SIZES["num_hidden_layers"]
            if parts[2] == "layers" and "mtp" not in parts
            else -1
        )
        shards[i][name] = shape
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{N_SHARDS:05d}.safetensors"
        weights = {}
        for name, (*rows, n) in shard.items():
            raw = name.removeprefix("language_model.").replace("model.", "model.language_model.", 1)
            if name.endswith("conv1d.weight"):
                rows, n = [rows[0], 1], rows[1]
            weights[raw] = (0.02 * mx.random.normal([*rows, n])).astype(mx.bfloat16)
            mx.eval(weights[raw])
        mx.save_safetensors(str(folder / file), weights, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(weights, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
