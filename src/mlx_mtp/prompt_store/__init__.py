"""Prompt caches of texts, of which each prefix is prefilled once."""

from .store import PromptStore

__all__ = ["PromptStore"]
