"""Faster decoding of Qwen3.5-family models on MLX with the multi-token-prediction head that they ship."""

from ._version import __version__
from .batch.generate import BatchResponse, batch_generate
from .batch.generator import BatchGenerator
from .checkpoint.load import DEMO, load
from .convert import convert
from .decoding.counts import DraftCounts
from .decoding.depth import MAX_DRAFT_TOKENS, Depth
from .decoding.grammar import make_grammar
from .decoding.loop import mtp_generate_step
from .decoding.sampling import make_sampler
from .generate import GenerationResponse, generate, stream_generate
from .models.mtp import MTPModule
from .models.prompt_cache import make_prompt_cache
from .prompt_store import PromptStore

__all__ = [
    "DEMO",
    "MAX_DRAFT_TOKENS",
    "BatchGenerator",
    "BatchResponse",
    "Depth",
    "DraftCounts",
    "GenerationResponse",
    "MTPModule",
    "PromptStore",
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
