"""`mlx_mtp.benchmark --tune`: what to measure, and what to recommend."""
