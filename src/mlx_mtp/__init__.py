"""Faster decoding of Qwen3.5-family models on MLX with the multi-token-prediction head that they ship."""

from ._version import __version__
from .batch.generate import BatchResponse, batch_generate
from .batch.generate_step import mtp_generate_step
from .batch.generator import BatchGenerator
from .caches.prompt_cache import make_prompt_cache
from .checkpoint.load import DEMO, load
from .convert import convert
from .decoding.counts import DraftCounts
from .drafts.options import TextOptions
from .errors import MTPError
from .generate import GenerationResponse, generate, stream_generate
from .layers.mtp import MTPModule
from .pacing.depth import MAX_DRAFT_TOKENS, Depth
from .prompt_store import PromptStore
from .sampling.sampler import make_sampler
from .text.grammar import make_grammar

__all__ = [
    "DEMO",
    "MAX_DRAFT_TOKENS",
    "BatchGenerator",
    "BatchResponse",
    "Depth",
    "DraftCounts",
    "GenerationResponse",
    "MTPError",
    "MTPModule",
    "PromptStore",
    "TextOptions",
    "__version__",
    "batch_generate",
    "convert",
    "generate",
    "load",
    "make_grammar",
    "make_prompt_cache",
    "make_sampler",
    "mtp_generate_step",
    "stream_generate",
]
