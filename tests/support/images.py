"""Pictures, and checkpoints with a random vision encoder."""

import io
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from PIL import Image

from mlx_mtp.images.tower import PATCH_KERNEL, PREFIX, RAW_PREFIX, VisionArgs, VisionTower

VISION_CONFIG = {
    "model_type": "qwen3_5", "depth": 2, "hidden_size": 32, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 48,
    "num_heads": 2, "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "num_position_embeddings": 36,
}  # fmt: skip
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 256, "longest_edge": 4096},
    "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def tower_tensors(args: VisionArgs, raw: bool, dtype: mx.Dtype = mx.bfloat16) -> dict[str, mx.array]:
    """A random tower, named and laid out as in Hugging Face checkpoints (``raw``) or as in MLX conversions."""
    mx.random.seed(0)
    tensors = {name: w.astype(dtype) for name, w in tree_flatten(VisionTower(args).parameters())}
    if raw:
        tensors[PATCH_KERNEL] = mx.contiguous(tensors[PATCH_KERNEL].transpose(0, 4, 1, 2, 3))
    return {(RAW_PREFIX if raw else PREFIX) + name: w for name, w in tensors.items()}


def add_tower(folder: Path, raw: bool = True) -> Path:
    """Give a checkpoint a random tower, in a file of its own, and the settings of its images."""
    config = json.loads((folder / "config.json").read_text())
    vision = VISION_CONFIG | {"out_hidden_size": config["text_config"]["hidden_size"]}
    config |= {"vision_config": vision, "image_token_id": 4090, "vision_start_token_id": 4091}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    mx.save_safetensors(str(folder / "model-tower.safetensors"), tower_tensors(VisionArgs.from_dict(vision), raw))
    return folder


def picture(width: int = 24, height: int = 16, seed: int = 0) -> Image.Image:
    """A random picture, in RGB."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()
