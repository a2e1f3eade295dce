"""The sizes of the published checkpoints, and their models without weights."""

from importlib import import_module

import mlx.core as mx

# From the checkpoints' config.json
QWEN35 = {
    "vocab_size": 248320, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
NEXT = {
    **QWEN35, "vocab_size": 151936, "rope_theta": 1e7, "partial_rotary_factor": 0.25, "max_position_embeddings": 262144,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "intermediate_size": 5632,
}  # fmt: skip
FLASH = {
    **QWEN35, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12, "hc_count": 4, "hc_lowrank": 320,
    "indexer_n_heads": 4, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid", "ple_layer_ids": [2], "ple_embed_dim": 2560, "eos_token_id": 248044,
    "norm_topk_prob": True,
}  # fmt: skip
GLM = {
    "vocab_size": 151552, "head_dim": 128, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_scaling": None, "attention_bias": True,
    "partial_rotary_factor": 0.5, "tie_word_embeddings": False, "routed_scaling_factor": 1.0,
}  # fmt: skip
GLM_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "n_routed_experts",
    "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "use_qk_norm",
)  # fmt: skip
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "linear_num_value_heads")
DENSE, MOE = ("intermediate_size",), ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def dense(*sizes, tied=False):
    return "qwen3_5", {**QWEN35, **dict(zip(SIZES + DENSE, sizes)), "tie_word_embeddings": tied}


def moe(*sizes, family="qwen3_5_moe", base=QWEN35):
    return family, {**base, **dict(zip(SIZES + MOE, sizes)), "shared_expert_intermediate_size": sizes[-1]}


def glm(*sizes):
    return "glm4_moe", {**GLM, **dict(zip(GLM_SIZES, sizes))}


ARCHITECTURES = {
    "4.7-Flash": ("glm4_moe_lite", {"hidden_size": 2048, "num_hidden_layers": 47}),  # mlx-lm's defaults are its sizes
    "4.5-Air": glm(4096, 46, 96, 8, 10944, 128, 8, 1408, 1, False),
    "4.6": glm(5120, 92, 96, 8, 12288, 160, 8, 1536, 3, True),
    "4.7": glm(5120, 92, 96, 8, 12288, 160, 8, 1536, 3, True),
    "0.8B": dense(1024, 24, 8, 2, 16, 3584, tied=True),
    "2B": dense(2048, 24, 8, 2, 16, 6144, tied=True),
    "4B": dense(2560, 32, 16, 4, 32, 9216, tied=True),
    "9B": dense(4096, 32, 16, 4, 32, 12288),
    "27B": dense(5120, 64, 24, 4, 48, 17408),
    "35B-A3B": moe(2048, 40, 16, 2, 32, 256, 8, 512),
    "122B-A10B": moe(3072, 48, 32, 2, 64, 256, 8, 1024),
    "397B-A17B": moe(4096, 60, 32, 2, 64, 512, 10, 1024),
    "Flash-Next": moe(2560, 48, 24, 2, 48, 512, 10, 640, family="qwen4_exp", base=FLASH),
    "80B-A3B": moe(2048, 48, 16, 2, 32, 512, 10, 512, family="qwen3_next", base=NEXT),
}


def model_of(name):
    """A published model without its weights (none is ever evaluated), and its config."""
    family, text = ARCHITECTURES[name]
    text = {**text, "model_type": family, "mtp_num_hidden_layers": 1}
    config = (
        text if family in ("qwen3_next", "glm4_moe", "glm4_moe_lite") else {"model_type": family, "text_config": text}
    )
    module = import_module(f"mlx_mtp.core.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    return model, config
