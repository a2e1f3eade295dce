"""Small models, and the devices that they run on."""

import json
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import switch_layers
from mlx_lm.utils import load_model

from mlx_mtp.checkpoint.ngram_files import open_tables
from mlx_mtp.checkpoint.reader import CheckpointReader
from mlx_mtp.core import traces
from mlx_mtp.core.layers import compiled
from mlx_mtp.core.models.ngrams import NgramTable

from .packs import manifest, pack, pack_config

DATA = Path(__file__).parents[1] / "data"
TRAINED = str(DATA / "dense")

PACK, FLASH, GLM, LATENT = "prism_hadamard_qwen35", "qwen4_exp", "glm4_moe", "glm4_moe_lite"
QWEN = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]  # which mlx-lm runs as well
KV_FAMILIES = [*QWEN, PACK, FLASH]  # whose keys and values can be quantized
FAMILIES = [*KV_FAMILIES, LATENT]  # ``GLM`` is tested where it differs from these

DENSE = {
    "model_type": "qwen3_5_text", "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "full_attention_interval": 2,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "mtp_num_hidden_layers": 1,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
# Queries select two blocks of four tokens, and the tokens behind the last complete one. The first layer has n-gram embeddings.
SPARSE = {
    "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32,
    "indexer_budget": 8, "indexer_compress_ratio": 4, "output_gate_type": "sigmoid", "ple_layer_ids": [1], "ple_embed_dim": 32,
    "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 40, "split_ngram_parts": 3,
    "eos_token_id": 5,
}  # fmt: skip
# Widths of a pack are multiples of 128, and of 512 where they are rotated.
WIDE = {"hidden_size": 512, "intermediate_size": 128, "num_attention_heads": 4, "linear_num_value_heads": 4}
# The first layer is dense.
NEXTN = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "moe_intermediate_size": 32, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    "first_k_dense_replace": 1, "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
OWN = {
    GLM: {
        "num_key_value_heads": 1, "head_dim": 32, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5,
        "rope_scaling": None,
    },
    LATENT: {"kv_lora_rank": 32, "q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32},
}  # fmt: skip
ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GROUPED = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 96}  # Metal attends in groups of 4 queries


def tiny_config(family: str, **changes) -> dict:
    """The config.json of a tiny model of a family; ``changes`` are to the text config."""
    if family in OWN:
        return {"model_type": family, **NEXTN, **OWN[family], **changes}
    # 16 dimensions are turned in heads of any size: the CPU backend compiles kernels for each number.
    rope = ROPE | {"partial_rotary_factor": 16 / changes.get("head_dim", DENSE["head_dim"])}
    if family == "qwen3_next":
        config = {**DENSE, **EXPERTS, **rope, "max_position_embeddings": 4096, "mlp_only_layers": []}
        return {**config, "model_type": family, **changes}
    own = {"qwen3_5_moe": EXPERTS, PACK: WIDE, FLASH: EXPERTS | SPARSE}.get(family, {})
    text = {**DENSE, **own, "rope_parameters": {"type": "default", **rope}, **changes}
    if family == PACK:
        dense = import_module("mlx_mtp.core.models.qwen3_5")
        return pack_config(text, manifest(dense.TextModel(dense.TextModelArgs.from_dict(text))))
    if family == FLASH:
        text["model_type"] = "qwen4_exp_text"
    return {"model_type": family, "text_config": text}


def tiny_model(family: str, seed: int = 0, dtype: mx.Dtype = mx.float32, **changes):
    """A random model with a head, its weights spread so that greedy output varies.

    float32 for mixtures of experts: MLX's CPU backend multiplies gathered matrices in nothing else. In a pack, embeddings are
    in float16 all the same.
    """
    if family == PACK:
        return packed_model(seed, dtype, **changes)
    module = import_module(f"mlx_mtp.core.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(tiny_config(family, **changes)))
    model.eval()
    keys = iter(mx.random.split(mx.random.key(seed), len(tree_flatten(model.parameters()))))

    def weight(path, p):
        noise = mx.random.normal(p.shape, key=next(keys))
        if "norm" in path:
            is_centred = family == FLASH and "linear_attn" not in path
            return (0.2 * noise + (not is_centred)).astype(dtype)
        if p.ndim == 1:
            return noise.astype(p.dtype if path.endswith("A_log") else dtype)
        return (noise * (1.0 if "embed" in path else 2 * p.shape[-1] ** -0.5)).astype(dtype)

    model.update(tree_map_with_path(weight, model.parameters()))
    mx.eval(model.parameters())
    if family == FLASH:
        add_tables(model, seed)
    return model


def add_tables(model, seed: int = 0) -> None:
    """Random tables of n-gram embeddings."""
    ngrams = model.ngrams
    for i, own in ngrams.hashes.items():
        rows = np.random.default_rng(seed + i).standard_normal((own.n_rows, ngrams.width)).astype(np.float32)
        ngrams.tables[i] = NgramTable(ArrayRows(rows), ngrams.width, own.n_rows)


class ArrayRows:
    """The rows of a table, in an array [n, width]."""

    def __init__(self, array: np.ndarray):
        self.array, self.layout = array, {"weight": (array.shape[1], array.dtype)}

    def __len__(self) -> int:
        return len(self.array)

    def read(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {"weight": self.array[ids]}

    def read_range(self, begin: int, end: int) -> dict[str, np.ndarray]:
        return {"weight": self.array[begin:end]}


def packed_model(seed: int, dtype: mx.Dtype, **changes):
    """A random dense model that is packed."""
    dense, config = tiny_model("qwen3_5", seed, dtype, **WIDE | changes), tiny_config(PACK, **changes)
    weights = pack(dict(tree_flatten(dense.language_model.parameters())), config["modules"], seed)
    module = import_module(f"mlx_mtp.core.models.{PACK}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.language_model.load_weights([*weights.items()])
    for _, packed in model.named_modules():
        if "scales" in packed:
            packed.update({name: packed[name].astype(dtype) for name in ("scales", "biases")})
    mx.eval(model.parameters())
    return model.eval()


model_of = cache(tiny_model)  # one for all tests that leave it as it was


def deep_model(family: str, seed: int = 0, **changes):
    """A ``tiny_model`` with two layers of each kind."""
    return tiny_model(family, seed, num_hidden_layers=4, **changes)


def load_reference(folder: Path):
    """A checkpoint of tests/data in float32, cast before the norms are shifted, as its reference values were computed."""
    module = import_module(f"mlx_mtp.core.models.{json.loads((folder / 'config.json').read_text())['model_type']}")

    class Model(module.Model):
        def sanitize(self, weights):
            return super().sanitize({name: w.astype(mx.float32) for name, w in weights.items()})

    classes = (Model, module.ModelArgs)
    model, _ = load_model(folder, model_config={"mtp_num_hidden_layers": 1}, get_model_classes=lambda config: classes)
    open_tables(model, CheckpointReader(str(folder)), in_memory=False)
    return model


def arrays_equal(a, b) -> bool:
    """Whether two trees of arrays and Nones are the same, bit for bit."""

    def same(x, y):
        return x is y if x is None or y is None else x.dtype == y.dtype and mx.array_equal(x, y).item()

    a, b = tree_flatten(a), tree_flatten(b)
    return [name for name, _ in a] == [name for name, _ in b] and all(same(x, y) for (_, x), (_, y) in zip(a, b))


def round_otherwise(monkeypatch, amount: float) -> None:
    """A device whose products, attention and convolutions of several rows differ from those of one by up to ``amount``.

    Passes are not compiled: the CPU backend would compile kernels for each amount.
    """
    monkeypatch.setattr(compiled.Compiler, "run", _run)

    def patch(owner, name, rows):
        original = getattr(owner, name)

        def rounded(*args, **kwargs):
            out, n = original(*args, **kwargs), rows(*args)
            return out if n == 1 else out * (1 + amount * mx.sin(1e4 * out))

        monkeypatch.setattr(owner, name, rounded)

    for owner in (nn.Linear, switch_layers.SwitchLinear):
        patch(owner, "__call__", lambda module, x, *_: x.shape[1])
    patch(mx, "quantized_matmul", lambda x, *_: x.shape[-2])
    patch(nn.Embedding, "as_linear", lambda module, x: x.shape[1])
    patch(nn.Conv1d, "__call__", lambda module, x: x.shape[1] - module.weight.shape[1] + 1)
    patch(mx.fast, "scaled_dot_product_attention", lambda q, *_: q.shape[2])


@contextmanager
def uncompiled():
    """No function is compiled: for each number and type, the CPU backend would compile kernels."""
    mx.disable_compile()
    try:
        with mock.patch.object(compiled.Compiler, "run", _run):  # which would copy the module at each call
            yield
    finally:
        mx.enable_compile()


def _run(self, function, module, *inputs, **numbers):
    return function(module, *inputs, **numbers)


def trace_anew(monkeypatch) -> None:
    """Trace all compiled functions again, now and when the patches are undone: for what a patch changes within them."""
    monkeypatch.setattr(compiled, "_traces", compiled._Traces())
    monkeypatch.setattr(traces, "_made", traces._Made())
