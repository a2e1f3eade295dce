"""mlx-lm's models of the Qwen3.5 family, each with its MTP head."""
