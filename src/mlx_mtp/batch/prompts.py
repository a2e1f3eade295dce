"""The waiting sequences of a batch: made of the arguments of ``insert_segments``, then prefilled."""

import copy
import math
import time
from collections import abc, deque
from collections.abc import Collection, Iterator
from itertools import islice
from numbers import Integral
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from ..caches.positions import ImageSpan
from ..caches.prompt_cache import PromptCache, open_prompt_cache, place_images
from ..caches.rows import KVOptions
from ..decoding.counts import DraftCounts
from ..decoding.prefill import check_embeddings, prefill_part, split_prompt
from ..decoding.sequence import PendingEmbeddings, Sequence
from ..drafts.options import TextOptions
from ..errors import MTPError
from ..models.mixin import MTPModel
from .prefill_budget import PrefillBudget
from .responses import PromptResponse


def check_count(name: str, value: Any) -> int:
    """Return the value, or raise an MTPError if it is not an integer of 1 or more."""
    if not isinstance(value, Integral) or value < 1:
        raise MTPError(f"{name} must be an integer of 1 or more, not {value}.")
    return int(value)


def entries_of(options: abc.Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """The options of each of n prompts, by name, without those that are ``None`` for all. Raises an MTPError if an option does
    not have one entry for each prompt."""
    given = {name: values for name, values in options.items() if values is not None}
    for name, values in given.items():
        is_list = isinstance(values, abc.Sequence) and not isinstance(values, str)
        if not is_list or len(values) != n:
            got = len(values) if is_list else values
            raise MTPError(f"{name} must have an entry for each prompt: {n}, not {got}.")
    return [{name: values[i] for name, values in given.items()} for i in range(n)]


def options_of_each(
    n: int, options: abc.Sequence[TextOptions] | None, lists: abc.Mapping[str, Any]
) -> abc.Sequence[TextOptions]:
    """The options of each of n prompts: those that are given, or made of lists with an entry for each prompt.

    Raises:
        MTPError: Both are given, a list has another number of entries, or a maximum number of tokens is out of range; only
          ``options`` may have one below 0, for no limit.
    """
    if options is None:
        own = entries_of(lists, n)
        for i, entry in enumerate(own):
            if "max_tokens" in entry:
                check_count(f"max_tokens of prompt {i}", entry["max_tokens"])
            if "logits_processors" in entry:
                entry["logits_processors"] = list(entry["logits_processors"] or ())  # as in mlx-lm, None is for none
            entry["sampler"] = entry.pop("samplers", None)
        return [TextOptions(**entry) for entry in own]
    if name := next((name for name, values in lists.items() if values is not None), None):
        raise MTPError(f"options and {name} cannot be combined.")
    entries_of({"options": options}, n)
    for i, text in enumerate(options):
        if (limit := text.max_tokens) is not None and not (isinstance(limit, Integral) and limit < 0):
            check_count(f"max_tokens of prompt {i}", limit)
    return options


def make_sequence(
    model: Any,
    i: int,
    uid: int,
    options: TextOptions,
    segments: list[list[int]],
    *,
    kv: KVOptions,
    caches: list[Any] | PromptCache | None = None,
    all_tokens: abc.Sequence[int] = (),
    counts: DraftCounts | None = None,
    input_embeddings: mx.array | PendingEmbeddings | None = None,
    images: abc.Sequence[ImageSpan] = (),
) -> Sequence:
    """Make the sequence of a call's prompt i. Each option is its entry of an argument of ``insert_segments``. Raises an
    MTPError if the prompt is empty, or the cache or the embeddings do not fit."""
    segments = [list(segment) for segment in segments if segment]
    if not segments:
        raise MTPError(f"Prompt {i} is empty.")
    n_prompt = sum(map(len, segments))
    if input_embeddings is not None:
        check_embeddings(model, n_prompt, input_embeddings)
    cache = open_prompt_cache(model, caches if isinstance(caches, PromptCache) else copy.deepcopy(caches))
    for c in cache.backbone:
        if isinstance(c, QuantizedKVCache) and (c.bits, c.group_size) != (kv.kv_bits, kv.kv_group_size):
            raise MTPError(
                f"The prompt cache of prompt {i} is quantized to {c.bits} bits in groups of {c.group_size}: give "
                f"kv_bits={c.bits} and kv_group_size={c.group_size} to the batch."
            )
    place_images(model, cache, images, input_embeddings is not None)
    if cache.images and (end_of_images := cache.images[-1].end) >= (n := cache.n_tokens + n_prompt):
        raise MTPError(f"Prompt {i} ends with token {n}, and its last image with {end_of_images}: text must follow.")
    return Sequence(
        cache,
        options,
        counts or DraftCounts(),
        kv.of_text(cache.n_tokens, n_prompt),
        segments=split_prompt(segments),
        tokens=list(all_tokens),
        embeddings=input_embeddings if isinstance(input_embeddings, mx.array) else None,
        pending=None if isinstance(input_embeddings, mx.array) else input_embeddings,
        uid=uid,
    )


class Prompts:
    """Prefills prompts one after the other, without their last tokens: no more of them than sequences that can join the batch.

    Args:
        model: The model to prefill with.

    Attributes:
        n_prefilled: The number of tokens prefilled so far, of all prompts.
        seconds: The time of this prefill.
    """

    def __init__(self, model: MTPModel):
        self.model = model
        self.sequences: deque[Sequence] = deque()
        self.n_prefilled, self.seconds = 0, 0.0

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def remove(self, uids: Collection[int]) -> None:
        self.sequences = deque(s for s in self.sequences if s.uid not in uids)

    def caches(self, uids: Collection[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """The prompt caches of waiting sequences, and the tokens in each."""
        return {s.uid: (s.cache.entries, s.tokens) for s in self.sequences if s.uid in uids}

    def ready(self, max_sequences: int) -> list[Sequence]:
        """Those of the first ``max_sequences`` sequences whose prompts are prefilled except for the last token."""
        return [s for s in islice(self.sequences, max_sequences) if s.is_prefilled]

    def _unread(self, max_sequences: int) -> list[Sequence]:
        """The others of them."""
        return [s for s in islice(self.sequences, max_sequences) if not s.is_prefilled]

    def take(self, ready: list[Sequence]) -> None:
        """Remove sequences, which begin to generate from the last token of their prompts."""
        for s in ready:
            self.sequences.remove(s)

    def prefill(self, budget: PrefillBudget, is_running: bool, max_sequences: int) -> list[PromptResponse]:
        """Prefill as many tokens between two steps as the budget allows, of the first ``max_sequences`` sequences.

        Args:
            budget: Gives the number of tokens to prefill, and observes their time.
            is_running: Whether other sequences generate.
        """
        waiting = self._unread(max_sequences)
        if not waiting:
            return []
        if waiting[0].pending is not None:
            return self._embed(waiting[0], budget, is_running)
        n_cached = waiting[0].cache.n_tokens
        n_left = n = budget.next(n_cached, is_running)
        start = time.perf_counter()
        responses: list[PromptResponse] = []
        for s in waiting:
            if n_left > 0 and s.pending is None:
                n_before = s.n_prefilled
                responses.append(self._prefill(s, n_left))
                n_left -= s.n_prefilled - n_before
        if responses:
            seconds = time.perf_counter() - start
            budget.record_chunk(n - n_left, n_cached, seconds)
            self.n_prefilled, self.seconds = self.n_prefilled + n - n_left, self.seconds + seconds
        return responses

    def next_chunk(self, size: int, max_sequences: int) -> tuple[int, int]:
        """The largest of the next chunks of up to ``size`` tokens: its length, and the length of its text up to its end."""
        chunks = [(min(len(s.segments[0]), size), s.cache.n_tokens) for s in self._unread(max_sequences)]
        return max(((n, n_cached + n) for n, n_cached in chunks), key=math.prod, default=(0, 0))

    def _embed(self, s: Sequence, budget: PrefillBudget, is_running: bool) -> list[PromptResponse]:
        """Compute the pending embeddings of a prompt for as long as the budget allows before the next step."""
        assert s.pending is not None
        if (seconds := budget.seconds(is_running)) <= 0:
            return []
        start = time.perf_counter()
        if s.pending.advance(seconds):
            s.embeddings, s.pending = s.pending.array, None
        budget.record(time.perf_counter() - start)
        return [PromptResponse(s.uid, (s.n_prefilled, s.n_prompt), False, False)]

    def _prefill(self, s: Sequence, max_tokens: int) -> PromptResponse:
        n_segments = len(s.segments)
        prefill_part(self.model, s, max_tokens)
        s.cache.record(s.cache.n_tokens, s.text_of(s.cache.n_tokens))
        return PromptResponse(s.uid, (s.n_prefilled, s.n_prompt), len(s.segments) < n_segments, False)
