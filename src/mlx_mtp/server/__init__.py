"""``mlx_mtp server``: OpenAI's and Anthropic's APIs, with drafts for one request and for several."""

DEFAULT = "default_model"  # mlx-lm's name for the model of --model
