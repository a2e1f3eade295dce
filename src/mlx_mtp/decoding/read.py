"""Reads a part of a prompt into a prompt cache."""

from typing import Any

import mlx.core as mx

from ..models.mtp import run_head
from ..models.positions import Positions
from ..models.prompt_cache import PromptCache, has_head
from ..models.protocol import MTPModel


def read_chunk(model: MTPModel, cache: PromptCache, tokens: mx.array, embeddings: mx.array | None = None) -> None:
    """Read tokens [T], or embeddings [T, H] in their place, into all caches of one sequence."""
    options: dict[str, Any] = {} if embeddings is None else {"input_embeddings": embeddings[None]}
    positions = cache.head_positions  # before the pass, which moves them on
    _, hidden = model(tokens[None], cache=cache.entries, return_hidden=True, **options)  # [1, T, H]
    # The head pairs a token with the hidden state before it. That of the first is from an earlier call, if any.
    previous, last = hidden[:, :-1], cache.last_hidden
    hidden_before = previous if last is None else mx.concatenate([last, previous], axis=1)
    read_head(model, cache, hidden_before, tokens, embeddings, positions)
    cache.last_hidden = mx.contiguous(hidden[:, -1:])


def read_head(
    model: MTPModel,
    cache: PromptCache,
    hidden: mx.array,
    tokens: mx.array,
    embeddings: mx.array | None,
    positions: Positions | None,
) -> None:
    """Make the head's rows of the hidden states [1, t, H] before the last t tokens, [T], or embeddings, [T, H]."""
    if has_head(model) and (t := hidden.shape[1]) > 0:
        embedded = None if embeddings is None else embeddings[None, -t:]
        run_head(model, hidden, tokens[None, -t:], cache.head, embedded, positions)
