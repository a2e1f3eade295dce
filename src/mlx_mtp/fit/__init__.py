"""``mlx_mtp fit``: train only the MTP head, to predict the tokens of its backbone."""
