"""Prefill: passes of the model and its head over a prompt, which fill the caches of one sequence."""

from typing import Any

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.utils import does_model_support_input_embeddings

from ...errors import MTPError
from ..caches.prompt_cache import PromptCache
from ..caches.recurrent import restore, snapshot
from ..caches.rows import KVOptions
from ..caches.validation import FLOATS
from ..layers.mtp import has_head, run_head
from ..models.mixin import MTPModel
from .sequence import TextSequence


def prefill_part(model: MTPModel, s: TextSequence, max_tokens: int) -> tuple[mx.array, mx.array]:
    """Prefill up to ``max_tokens`` tokens of a sequence's prompt, at most to the end of a segment -> as ``prefill_chunk``."""
    cache = s.cache
    n_cached = cache.n_tokens
    tokens = s.segments[0][: s.kv.end_of_chunk(n_cached, max_tokens) - n_cached]
    embeddings = None if s.embeddings is None else s.embeddings[: len(tokens)]
    cache.images = s.images
    out = prefill_chunk(model, cache, mx.array(tokens, mx.uint32), embeddings, s.kv)
    s.take_prompt(len(tokens))
    cache.record(cache.n_tokens, s.text_of(cache.n_tokens))
    return out


def prefill_chunk(
    model: MTPModel, cache: PromptCache, tokens: mx.array, embeddings: mx.array | None, kv: KVOptions
) -> tuple[mx.array, mx.array]:
    """Run the model and its head over tokens [T] or embeddings [T, H] -> the last logits [1, 1, V], lazy, and hidden state
    [1, 1, H]. After an error or an interrupt, the caches have none of these tokens.
    """
    options: dict[str, Any] = {} if embeddings is None else {"input_embeddings": embeddings[None]}
    # All three are of the cache before the pass, which changes it.
    positions = cache.positions(cache.first_position)
    before = snapshot(cache.entries)
    n = cache.n_tokens
    try:
        logits, hidden = model(tokens[None], cache=cache.entries, return_hidden=True, **options)  # [1, T, H]
        # The head's inputs are a token and the hidden state before it. The first token's is from an earlier call, if any.
        hidden_before = hidden[:, :-1]
        if cache.last_hidden is not None:
            hidden_before = mx.concatenate([cache.last_hidden, hidden_before], axis=1)
        if has_head(model) and (t := hidden_before.shape[1]) > 0:
            of_tokens = None if embeddings is None else embeddings[None, -t:]
            run_head(model, hidden_before, tokens[None, -t:], cache.head, of_tokens, positions)
        cache.last_hidden = mx.contiguous(hidden[:, -1:])
        quantized = cache.backbone
        maybe_quantize_kv_cache(quantized, **vars(kv))
        mx.eval([c.state for c in quantized], [c.state for c in cache.entries[-2:]])
        cache.entries[: len(quantized)] = quantized
        cache.begin(n + hidden.shape[1])
    except BaseException:
        restore(cache.entries, before)
        raise
    mx.clear_cache()
    return logits[:, -1:], cache.last_hidden


def ends_with_token(model: MTPModel, s: TextSequence) -> bool:
    """Whether the last position of a prompt is a token with its own embedding, as those of rows are, and not an image's."""
    if s.embeddings is None or not s.task.has_tokens:
        return s.task.has_tokens
    return bool(mx.array_equal(s.embeddings, model.model.embed_tokens(mx.array(s.segments[-1]))))


def check_embeddings(model: MTPModel, n_prompt: int, input_embeddings: Any) -> None:
    if not does_model_support_input_embeddings(model):
        raise MTPError("Model does not support input embeddings.")
    shape, dtype = getattr(input_embeddings, "shape", ()), getattr(input_embeddings, "dtype", mx.bool_)
    is_pending = hasattr(input_embeddings, "advance")
    width = model.text_args.hidden_size
    if not is_pending and (shape[1:] != (width,) or dtype not in FLOATS):
        raise MTPError(f"input_embeddings must be an array of floating-point numbers [T, {width}].")
    if n_prompt not in (0, len(input_embeddings)):
        raise MTPError(
            f"When providing input_embeddings, their sequence length ({len(input_embeddings)}) must match the sequence "
            f"length of the prompt ({n_prompt}), or the prompt must be empty."
        )
