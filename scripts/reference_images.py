"""Reference values of the vision tower, from transformers: `tests/data/vision_tiny`.

    pip install '.[dev]'
    python -m scripts.reference_images tests/data/vision_tiny

Each tower is random and tiny. Its tensors, in bfloat16, have the names and layouts of published checkpoints. Its values for
several grids are computed in float32, and in bfloat16 for its roundings.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

SHARED = {
    "depth": 2, "intermediate_size": 48, "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 24, "num_position_embeddings": 36,
}  # fmt: skip
TOWERS = {
    "small": SHARED | {"hidden_size": 32, "num_heads": 2},  # heads of 16
    "wide": SHARED | {"hidden_size": 72, "num_heads": 1, "num_position_embeddings": 25},  # of 72, as published
}
GRIDS = [(1, 1), (1, 3), (2, 2), (3, 2), (5, 7)]  # tokens: smaller than the position table, of its size, larger


def make_tower(config: dict, seed: int) -> Qwen3_5VisionModel:
    torch.manual_seed(seed)
    tower = Qwen3_5VisionModel(Qwen3_5VisionConfig(**config)).eval()
    with torch.no_grad():
        for name, p in tower.named_parameters():  # large enough that every part shows in the output
            p.copy_(
                torch.randn_like(p)
                * (0.5 if name.startswith("pos_embed") else p[0].numel() ** -0.5 if p.ndim > 1 else 0.3)
            )
            if "norm" in name and name.endswith("weight"):
                p.add_(1)
            p.copy_(p.bfloat16())
    return tower


def run(tower: Qwen3_5VisionModel, rows: int, columns: int, patches: torch.Tensor) -> torch.Tensor:
    merge = tower.spatial_merge_size
    grid = torch.tensor([[1, rows * merge, columns * merge]])
    with torch.no_grad():
        return tower(patches, grid).pooler_output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for seed, (name, config) in enumerate(TOWERS.items()):
        tower = make_tower(config, seed)
        (folder / name).mkdir(parents=True, exist_ok=True)
        vision_config = {"model_type": "qwen3_5", "hidden_act": "gelu_pytorch_tanh", **config}
        (folder / name / "config.json").write_text(json.dumps({"vision_config": vision_config}, indent=4) + "\n")
        tensors = {"model.visual." + key: p.bfloat16().contiguous() for key, p in tower.state_dict().items()}
        save_file(tensors, folder / name / "model.safetensors")
        cast = make_tower(config, seed)
        for p in cast.parameters():  # not the frequencies of RoPE, which stay in float32
            p.data = p.data.bfloat16()
        values: dict[str, np.ndarray] = {}
        for j, (rows, columns) in enumerate(GRIDS):
            n = rows * columns * config["spatial_merge_size"] ** 2
            patches = (
                torch.rand(n, config["in_channels"] * config["temporal_patch_size"] * config["patch_size"] ** 2) * 2 - 1
            )
            values[f"grid_{j}"] = np.array([rows, columns])
            values[f"pixels_{j}"] = patches.numpy()
            values[f"rows_{j}"] = run(tower, rows, columns, patches).numpy()
            values[f"rows_bfloat16_{j}"] = run(cast, rows, columns, patches).float().numpy()
        np.savez_compressed(folder / name / "reference.npz", **values)


if __name__ == "__main__":
    main()
