"""`mlx_mtp.benchmark --tune`: the settings to measure and to recommend."""
