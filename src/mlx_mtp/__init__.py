"""Faster decoding of Qwen3.5-family models on MLX with the multi-token-prediction head that they ship."""

from ._version import __version__
from .checkpoint.load import DEMO, load
from .convert import convert
from .core.batch.generate import BatchResponse, batch_generate
from .core.batch.generate_step import mtp_generate_step
from .core.batch.generator import BatchGenerator
from .core.caches.prompt_cache import make_prompt_cache
from .core.caches.rows import KVOptions
from .core.decoding.counts import DraftCounts
from .core.drafts.options import TextOptions
from .core.layers.mtp import MTPModule
from .core.pacing.depth import MAX_DRAFT_TOKENS, Depth
from .core.sampling.sampler import make_sampler
from .errors import MTPError
from .generate import GenerationResponse, generate, stream_generate
from .prompt_store import PromptStore
from .text.grammar import make_grammar

__all__ = [
    "DEMO",
    "MAX_DRAFT_TOKENS",
    "BatchGenerator",
    "BatchResponse",
    "Depth",
    "DraftCounts",
    "GenerationResponse",
    "KVOptions",
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
