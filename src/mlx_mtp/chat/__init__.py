"""``mlx_mtp chat``: mlx-lm's chat in the terminal, with the MTP head."""
