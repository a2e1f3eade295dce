"""A prefix of a text is read once: prompt caches of what was read, with snapshots to resume from."""

from .store import PromptStore

__all__ = ["PromptStore"]
