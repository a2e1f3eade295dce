"""``mlx_mtp server``: OpenAI's and Anthropic's APIs, with drafts for one request and for several."""
