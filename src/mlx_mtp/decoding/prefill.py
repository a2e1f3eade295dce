"""Prefill: run the model over a prompt in chunks, to fill its prompt cache."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..caches.positions import Positions
from ..caches.prompt_cache import PromptCache, has_head
from ..caches.single import SingleCache
from ..layers.mtp import run_head
from ..models.protocol import MTPModel
from ..pacing.step_times import PLAIN_PLAN
from .decoder import Decoder
from .window import Drafts


def prefill_prompt(
    decoder: Decoder,
    prompt: mx.array,
    embeddings: mx.array | None,
    chunk: int,
    progress: Callable[[int, int], Any],
) -> None:
    """Prefill the prompt of a decoder's only sequence, and verify its last token as a window of its own.

    Args:
        prompt (mx.array): [T]
        embeddings (mx.array, optional): The embeddings to use in place of the tokens', [T, H].
        chunk (int): The most tokens of a pass.
        progress (Callable[[int, int], Any]): Called with the number of tokens processed, and of all.
    """
    (s,), own = decoder.sequences, decoder.cache
    assert isinstance(own, SingleCache)
    n, done = len(prompt if embeddings is None else embeddings), 0
    tokens: Any = prompt.tolist()
    s.cache.claim(decoder.generation)
    progress(0, n)
    if len(prompt) == 0:
        s.skip(n)
    while (size := min(chunk, n - 1 - done)) > 0:
        part = slice(done, done + size)
        s.tokens += tokens[part]
        prefill_chunk(decoder.model, own, prompt[part], None if embeddings is None else embeddings[part])
        done += size
        progress(done, n)
    s.tokens += tokens[done:]
    _verify_last(decoder, own, prompt[done:], None if embeddings is None else embeddings[done:])
    progress(n, n)


def prefill_chunk(model: MTPModel, own: SingleCache, tokens: mx.array, embeddings: mx.array | None = None) -> None:
    """Run the model and its head over tokens [T], or embeddings [T, H] in their place, to fill the caches of one sequence."""
    cache = own.cache
    options: dict[str, Any] = {} if embeddings is None else {"input_embeddings": embeddings[None]}
    positions = cache.head_positions  # before the pass, which changes them
    own.start_pass(len(tokens if embeddings is None else embeddings))
    _, hidden = model(tokens[None], cache=cache.entries, return_hidden=True, **options)  # [1, T, H]
    # The head pairs a token with the hidden state before it. The first token's is from an earlier call, if any.
    previous, last = hidden[:, :-1], cache.last_hidden
    hidden_before = previous if last is None else mx.concatenate([last, previous], axis=1)
    _prefill_head(model, cache, hidden_before, tokens, embeddings, positions)
    cache.last_hidden = mx.contiguous(hidden[:, -1:])
    own.quantize()
    mx.eval([c.state for c in own.entries])
    own.keep_pass()
    mx.clear_cache()


def _prefill_head(
    model: MTPModel,
    cache: PromptCache,
    hidden: mx.array,
    tokens: mx.array,
    embeddings: mx.array | None,
    positions: Positions | None,
) -> None:
    """Fill the head's cache from the hidden states [1, t, H] and the last t tokens, of [T], or embeddings, of [T, H]."""
    if has_head(model) and (t := hidden.shape[1]) > 0:
        embedded = None if embeddings is None else embeddings[None, -t:]
        run_head(model, hidden, tokens[None, -t:], cache.head, embedded, positions)


def _verify_last(decoder: Decoder, own: SingleCache, token: mx.array, embeddings: mx.array | None) -> None:
    """Verify the prompt's last token [1], or its embedding [1, H], as a window of its own."""
    (s,), cache = decoder.sequences, own.cache
    if (hidden := cache.last_hidden) is not None:
        _prefill_head(decoder.model, cache, hidden, token, embeddings, cache.head_positions)
    decoder.head.n_verified = cache.head.offset
    s.start()
    decoder.drafter.observe(s.tokens)
    decoder.decided = token[None]
    decoder.draft(Drafts([s], [PLAIN_PLAN], PLAIN_PLAN, s.depth))
    window = decoder.verify(None if embeddings is None else embeddings[None])
    # Not the logits, which a prompt without generated tokens does not need.
    mx.eval(window.hidden, own.states, cache.head.state)
    window.kept, own.before_pass = [1], None
