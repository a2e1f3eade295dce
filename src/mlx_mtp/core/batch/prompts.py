"""The waiting sequences of a batch, made of the arguments of ``insert_segments``."""

import copy
from collections import abc
from numbers import Integral
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from ...errors import MTPError
from ..caches.positions import ImageSpan
from ..caches.prompt_cache import PromptCache, open_prompt_cache, place_images
from ..caches.rows import KVOptions
from ..decoding.counts import DraftCounts
from ..decoding.prefill import check_embeddings
from ..decoding.sequence import PendingEmbeddings, Sequence
from ..drafts.options import TextOptions


def check_count(name: str, value: Any) -> int:
    """Return the value, or raise an MTPError if it is not an integer of 1 or more."""
    if not isinstance(value, Integral) or value < 1:
        raise MTPError(f"{name} must be an integer of 1 or more, not {value}.")
    return int(value)


def entries_of(lists: abc.Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """The entries of each of n prompts, by name, without lists that are ``None``."""
    given = {name: values for name, values in lists.items() if values is not None}
    for name, values in given.items():
        is_list = isinstance(values, abc.Sequence) and not isinstance(values, str)
        if not is_list or len(values) != n:
            got = len(values) if is_list else values
            raise MTPError(f"{name} must have an entry for each prompt: {n}, not {got}.")
    return [{name: values[i] for name, values in given.items()} for i in range(n)]


def options_of(i: int, options: TextOptions | None, own: dict[str, Any]) -> TextOptions:
    """The options of prompt i: those that are given, which may have a limit below 0, or made of its entries."""
    if options is None:
        if "logits_processors" in own:
            own["logits_processors"] = own["logits_processors"] or ()  # as in mlx-lm, None is for none
        options = TextOptions(sampler=own.pop("samplers", None), **own)
    elif own:
        raise MTPError(f"options and {next(iter(own))} cannot be combined.")
    limit = options.max_tokens
    if "max_tokens" in own or (limit is not None and not (isinstance(limit, Integral) and limit < 0)):
        check_count(f"max_tokens of prompt {i}", limit)
    return options


def make_sequence(
    model: Any,
    i: int,
    uid: int,
    segments: list[list[int]],
    batch: TextOptions,
    kv: KVOptions,
    *,
    caches: list[Any] | PromptCache | None = None,
    all_tokens: abc.Sequence[int] = (),
    counts: DraftCounts | None = None,
    input_embeddings: mx.array | PendingEmbeddings | None = None,
    images: abc.Sequence[ImageSpan] = (),
    options: TextOptions | None = None,
    **own: Any,
) -> Sequence:
    """Make the sequence of a call's prompt i, with its entries of the arguments of ``insert_segments``."""
    options = options_of(i, options, own).resolve(model, batch)
    n_prompt = sum(map(len, segments))
    if n_prompt == 0:
        raise MTPError(f"Prompt {i} is empty.")
    if input_embeddings is not None:
        check_embeddings(model, n_prompt, input_embeddings)
    cache = open_prompt_cache(model, caches if isinstance(caches, PromptCache) else copy.deepcopy(caches))
    for c in cache.backbone if caches is not None else ():
        if isinstance(c, QuantizedKVCache) and (c.bits, c.group_size) != (kv.kv_bits, kv.kv_group_size):
            raise MTPError(
                f"The prompt cache of prompt {i} is quantized to {c.bits} bits in groups of {c.group_size}: give "
                f"kv_bits={c.bits} and kv_group_size={c.group_size} to the batch."
            )
    place_images(model, cache, images, input_embeddings is not None)
    embeddings = input_embeddings if isinstance(input_embeddings, mx.array) else None
    pending = None if isinstance(input_embeddings, mx.array) else input_embeddings
    return Sequence(cache, options, kv, segments, counts or DraftCounts(), [*all_tokens], embeddings, pending, uid)


def can_begin_again(s: Sequence) -> bool:
    """Whether all of a text is known as tokens."""
    return s.has_tokens and not s.images and not s.cached_text and s.text_start == 0


def begin_again(model: Any, s: Sequence, n: int) -> None:
    """Let a sequence wait with its prompt and the first n tokens that it has generated, and an empty cache."""
    tokens = s.tokens[: len(s.tokens) - s.n_observed + n]
    s.cache, s.tokens, s.segments, s.end = open_prompt_cache(model, None), [], [tokens[:-1], tokens[-1:]], None
    s.n_prefilled, s.n_prompt, s.n_generated, s.n_observed = 0, len(tokens), n, n
    if s.options.stop_sequences is not None:
        s.stop = s.options.stop_sequences.matcher()
        for token in tokens[len(tokens) - n :]:
            s.stop.advance(token)
