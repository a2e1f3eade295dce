"""Faster decoding of Qwen3.5-family models on MLX with the multi-token-prediction head that they ship."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import MTPError

if TYPE_CHECKING:
    from .checkpoint import DEMO
    from .checkpoint.load import load
    from .convert import convert
    from .core.batch.generate import BatchResponse, batch_generate
    from .core.batch.generate_step import mtp_generate_step
    from .core.batch.generator import BatchGenerator
    from .core.caches.prompt_cache import make_prompt_cache
    from .core.caches.rows import KVOptions
    from .core.decoding.counts import DraftCounts
    from .core.drafts.options import TextOptions
    from .core.layers.mtp import MTPModule
    from .core.pacing import MAX_DRAFT_TOKENS
    from .core.pacing.depth import Depth
    from .core.sampling.sampler import make_sampler
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
# The module of each public name that is loaded when it is used: mlx-lm and transformers take a second.
_MODULES = {
    "DEMO": ".checkpoint",
    "MAX_DRAFT_TOKENS": ".core.pacing",
    "BatchGenerator": ".core.batch.generator",
    "BatchResponse": ".core.batch.generate",
    "Depth": ".core.pacing.depth",
    "DraftCounts": ".core.decoding.counts",
    "GenerationResponse": ".generate",
    "KVOptions": ".core.caches.rows",
    "MTPModule": ".core.layers.mtp",
    "PromptStore": ".prompt_store",
    "TextOptions": ".core.drafts.options",
    "batch_generate": ".core.batch.generate",
    "convert": ".convert",
    "generate": ".generate",
    "load": ".checkpoint.load",
    "make_grammar": ".text.grammar",
    "make_prompt_cache": ".core.caches.prompt_cache",
    "make_sampler": ".core.sampling.sampler",
    "mtp_generate_step": ".core.batch.generate_step",
    "stream_generate": ".generate",
}


class _Package(ModuleType):
    """This package. ``generate`` and ``convert`` are its functions, also where the packages of these names were imported."""

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_MODULES]

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULES:
            return super().__getattribute__(name)  # which raises the usual error
        return getattr(import_module(_MODULES[name], __name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _MODULES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
