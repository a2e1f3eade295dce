"""Packs as Bonsai 2 is published: ternary weights in 2 bits, with a manifest, whose inputs are rotated behind random signs."""

import math

import mlx.core as mx
import mlx.nn as nn

GROUP = 128
BLOCKS = (8192, 4096, 2048, 1024, 512)  # that mlx-lm takes
GATES = ("in_proj_a", "in_proj_b")  # which are not packed


def manifest(text_model: nn.Module) -> list[dict]:
    """The packed modules of a text model; inputs are rotated in the widest blocks that divide them."""
    packed = []
    for path, module in text_model.named_modules():
        is_embedding = isinstance(module, nn.Embedding)
        if (is_embedding or isinstance(module, nn.Linear)) and not path.endswith(GATES) and not path.startswith("mtp."):
            block = next((block for block in BLOCKS if module.weight.shape[1] % block == 0), 0)
            packed.append({"path": path, "block": block, "embedding": is_embedding, "dtype": "float16"})
    return packed


def pack_config(text_config: dict, modules: list[dict]) -> dict:
    config = {"model_type": "prism_hadamard_qwen35", "base_model_type": "qwen3_5", "schema_version": 2}
    config |= {"tensor_namespace": "mlx-vlm-qwen3_5", "gdn_activation_layout": "grouped", "modules": modules}
    return config | {"quantization": {"bits": 2, "group_size": GROUP, "mode": "affine"}, "text_config": text_config}


def pack(weights: dict[str, mx.array], modules: list[dict], seed: int = 0) -> dict[str, mx.array]:
    """Pack a text model's tensors, of which those that are not in the manifest stay as they are."""
    weights, key = dict(weights), mx.random.key(seed)
    for module in modules:
        path, key = module["path"], mx.random.split(key)[0]
        w = weights.pop(f"{path}.weight").astype(mx.float32)
        if block := module["block"]:
            signs = weights[f"{path}.signs"] = 1.0 - 2.0 * mx.random.bernoulli(shape=w.shape[1:], key=key)
            w = rotated(w * signs, block)
        codes, scales = ternary(w.reshape(len(w), -1, GROUP))  # [n, H / 128, 128], [n, H / 128, 1]
        words = (codes + 1).astype(mx.uint32).reshape(len(w), -1, 16) << mx.arange(0, 32, 2, dtype=mx.uint32)
        scales = scales[..., 0].astype(mx.float16)
        weights |= {f"{path}.weight": words.sum(-1), f"{path}.scales": scales, f"{path}.biases": -scales}
    return weights


def rotated(w: mx.array, block: int) -> mx.array:
    """Rotate the inputs of weights [n, H] in blocks; twice is not at all."""
    return mx.hadamard_transform(w.reshape(-1, block), scale=1 / math.sqrt(block)).reshape(w.shape)


def ternary(w: mx.array) -> tuple[mx.array, mx.array]:
    """Groups of weights [..., G] -> codes of -1, 0 and 1 [..., G] and scales [..., 1], near those of the least square error."""
    scales = 1.53 * mx.abs(w).mean(-1, keepdims=True)  # the best for a normal distribution
    for _ in range(4):
        codes = mx.clip(mx.round(w / mx.maximum(scales, 1e-12)), -1, 1)
        scales = (w * codes).sum(-1, keepdims=True) / mx.maximum((codes * codes).sum(-1, keepdims=True), 1)
    return codes, scales
