"""A prefix of a text is prefilled once: prompt caches with snapshots to resume from."""

from .store import PromptStore

__all__ = ["PromptStore"]
