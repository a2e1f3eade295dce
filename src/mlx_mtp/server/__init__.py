"""``mlx_mtp.server``: mlx-lm's server with the MTP head. OpenAI's API, with drafts for one request and for several."""
