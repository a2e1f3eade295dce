"""``mlx_mtp benchmark``: MTP against mlx-lm's own generation."""
