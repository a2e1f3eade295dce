"""The shapes of published Qwen3.5 checkpoints, for synthetic models."""

from typing import Any

COMMON = {
    "vocab_size": 248320,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1,
}
FOUR_BITS = {"quantization": {"group_size": 64, "bits": 4}}
# By name, the parts of the text_config that the time depends on.
SHAPES: dict[str, dict[str, Any]] = {
    "0.8b-bf16": {
        **COMMON,
        "model_type": "qwen3_5",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "4b-4bit": {
        **COMMON,
        **FOUR_BITS,
        "model_type": "qwen3_5",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": True,
    },
    "27b-4bit": {
        **COMMON,
        **FOUR_BITS,
        "model_type": "qwen3_5",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "tie_word_embeddings": False,
    },
    "35b-a3b-4bit": {
        **COMMON,
        **FOUR_BITS,
        "model_type": "qwen3_5_moe",
        "hidden_size": 2048,
        "intermediate_size": 0,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
