"""Faster decoding of Qwen3.5-family models on MLX with the multi-token-prediction head that they ship."""

from importlib import import_module
from typing import TYPE_CHECKING

from .cache import make_prompt_cache
from .load import load
from .models.mtp import MTPModule
from .sampling import make_sampler
from .speculative import mtp_generate_step

if TYPE_CHECKING:
    from .convert import convert
    from .generate import GenerationResponse, generate, stream_generate

__all__ = [
    "GenerationResponse",
    "MTPModule",
    "convert",
    "generate",
    "load",
    "make_prompt_cache",
    "make_sampler",
    "mtp_generate_step",
    "stream_generate",
]


def __getattr__(name: str):
    # Imported when asked for: `python -m mlx_mtp.generate` warns of a submodule that its package has imported.
    if name in ("convert", "generate"):
        return import_module(f".{name}", __name__)  # modules that can be called
    if name in ("GenerationResponse", "stream_generate"):
        return getattr(import_module(".generate", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
