"""The options of a batch's sequences: their own, or the generator's defaults."""

import copy
from collections import abc
from dataclasses import replace
from numbers import Integral
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from ..caches.positions import ImageSpan
from ..caches.prompt_cache import open_prompt_cache, place_images
from ..caches.single import KVOptions
from ..decoding.counts import DraftCounts
from ..decoding.loop import check_embeddings
from ..decoding.sequence import PendingEmbeddings, Sequence
from ..drafts.draft_options import TextOptions
from ..pacing.depth import MAX_DRAFT_TOKENS, Depth


def check_count(name: str, value: Any) -> int:
    """
    Raises:
        ValueError: The value is not an integer of 1 or more.
    """
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be an integer of 1 or more, not {value}.")
    return int(value)


def entries_of(options: abc.Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """The options of each of n prompts, by name, without those that are ``None`` for all.

    Raises:
        ValueError: An option does not have one entry for each prompt.
    """
    given = {name: values for name, values in options.items() if values is not None}
    for name, values in given.items():
        is_list = isinstance(values, abc.Sequence) and not isinstance(values, str)
        if not is_list or len(values) != n:
            got = len(values) if is_list else values
            raise ValueError(f"{name} must have an entry for each prompt: {n}, not {got}.")
    return [{name: values[i] for name, values in given.items()} for i in range(n)]


def options_of(i: int, options: TextOptions | None = None, **own: Any) -> TextOptions:
    """The options of a call's prompt i: its own, each an entry of an argument of ``insert_segments``, over others.

    Raises:
        ValueError: The maximum number of tokens is out of range.
    """
    if "max_tokens" in own:
        check_count(f"max_tokens of prompt {i}", own["max_tokens"])
    if "logits_processors" in own:
        own["logits_processors"] = list(own["logits_processors"] or ())  # as in mlx-lm, ``None`` is for none
    own["sampler"] = own.pop("samplers", None)
    return TextOptions(**own).over(options or TextOptions())


def resolve_in_batch(model: Any, own: TextOptions, defaults: TextOptions) -> TextOptions:
    """Resolve a sequence's options: its own or the generator's, whose number of drafts is the upper limit.

    Raises:
        ValueError: An option is out of range.
    """
    options = own.over(defaults).resolve(model)
    numbers = [options.num_draft_tokens, defaults.num_draft_tokens]
    for number in numbers:
        if isinstance(number, Depth):  # a Depth has the times of one sequence
            raise ValueError(f"num_draft_tokens must be auto or from 0 to {MAX_DRAFT_TOKENS}, not {number}.")
    most = min((n for n in numbers if isinstance(n, int)), default=None)
    return options if most is None else replace(options, num_draft_tokens=most)


def make_sequence(
    model: Any,
    i: int,
    uid: int,
    options: TextOptions,
    segments: list[list[int]],
    *,
    kv: KVOptions,
    caches: list[Any] | None = None,
    all_tokens: abc.Sequence[int] = (),
    counts: DraftCounts | None = None,
    input_embeddings: mx.array | PendingEmbeddings | None = None,
    images: abc.Sequence[ImageSpan] = (),
) -> Sequence:
    """Make the sequence of a call's prompt i. Each option is its entry of an argument of ``insert_segments``.

    Raises:
        ValueError: The prompt is empty, or the cache or the embeddings do not fit.
    """
    segments = [list(segment) for segment in segments if segment]
    if not segments:
        raise ValueError(f"Prompt {i} is empty.")
    if kv.kv_bits is None and any(isinstance(c, QuantizedKVCache) for c in caches or []):
        raise ValueError(f"The prompt cache of prompt {i} is quantized: generate its text without a batch.")
    n_prompt = sum(map(len, segments))
    if input_embeddings is not None:
        check_embeddings(model, n_prompt, input_embeddings)
    cache = open_prompt_cache(model, copy.deepcopy(caches))
    place_images(model, cache, images, input_embeddings is not None)
    if cache.images and (end_of_images := cache.images[-1].end) >= (n := cache.n_tokens + n_prompt):
        raise ValueError(f"Prompt {i} ends with token {n}, and its last image with {end_of_images}: text must follow.")
    *before, end = segments
    return Sequence(
        cache,
        options,
        counts or DraftCounts(),
        segments=[s for s in (*before, end[:-1]) if s] + [end[-1:]],
        tokens=list(all_tokens),
        embeddings=input_embeddings if isinstance(input_embeddings, mx.array) else None,
        pending=None if isinstance(input_embeddings, mx.array) else input_embeddings,
        uid=uid,
    )
