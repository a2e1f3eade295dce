"""Logits processors on a window, some positions of which will be rejected.

A plain function of (tokens, logits) can be called for any position. An object may keep state between calls, such as a grammar:
it is called once for every token, in order, and never for a position that is then rejected. If it has a method ``copy()``, or
``rollback(n)`` that undoes its last n calls, it also processes the logits of drafts, so that more drafts are accepted. An
object with ``keeps_state = False`` is treated as a function.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def keeps_state(processor: Callable[..., Any]) -> bool:
    """Whether a processor or sampler may keep state: an object other than a function or a ``partial``."""
    while isinstance(processor, functools.partial):
        processor = processor.func
    if isinstance(said := getattr(processor, "keeps_state", None), bool):
        return said
    return not (inspect.isfunction(processor) or inspect.isbuiltin(processor))


def for_drafts(processors: list[Any]) -> tuple[list[Any], list[Any]]:
    """The processors for the logits of drafts: (all of them, the ones to roll back afterwards)."""
    asked, rolled_back = [], []
    for processor in processors:
        if not keeps_state(processor):
            asked.append(processor)
        elif hasattr(processor, "copy"):
            asked.append(processor.copy())
        elif hasattr(processor, "rollback"):
            asked.append(processor)
            rolled_back.append(processor)
    return asked, rolled_back
