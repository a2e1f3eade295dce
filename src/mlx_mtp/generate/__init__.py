"""``mlx_mtp generate``: mlx-lm's text generation, with the MTP head."""

from .stream import GenerationResponse, generate, stream_generate

__all__ = ["GenerationResponse", "generate", "stream_generate"]
