"""``mlx_mtp.server``: mlx-lm's server with the MTP head. OpenAI's API, MTP for one request, mlx-lm's batches for several."""
