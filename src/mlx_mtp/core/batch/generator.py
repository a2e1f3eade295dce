"""Continuous batching as in mlx-lm's ``BatchGenerator``, with drafts: sequences join and leave between two steps."""

import copy
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, GenerationBatch, StopSequences, generation_stream
from mlx_lm.generate import BatchGenerator as StockGenerator
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.sample_utils import LogitsProcessor, Sampler
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ...errors import MTPError, NotANumberError, advice
from ..caches.positions import ImageSpan
from ..caches.prompt_cache import PromptCache, make_head_cache, open_prompt_cache, place_images
from ..caches.rows import KVOptions
from ..decoding.counts import DraftCounts
from ..decoding.decoder import Decoder
from ..decoding.prefill import check_embeddings
from ..decoding.sequence import PendingEmbeddings, Task, TextSequence
from ..decoding.window import Stepped
from ..drafts.options import TextOptions
from ..layers.mtp import has_head
from ..models.mixin import check_model
from . import MAX_TOKEN_GAP, MIN_DECODE_SHARE
from .ids import TokenIds, check_count, each_prompt, token_ids
from .scheduler import PrefillBudget, PromptResponse, Scheduler

__all__ = ["BatchGenerator", "PromptResponse", "Response"]


@dataclass
class Response(GenerationBatch.Response):
    """mlx-lm's ``GenerationBatch.Response``: a token of a sequence. A step may have several tokens of a sequence.

    The last one has a ``finish_reason``, ``"stop"`` or ``"length"``, the prompt and generated tokens, and their prompt cache.
    After an exception of the sequence's sampler, of a logits processor or of a pass, ``"error"``, it has no log probabilities,
    and ``token`` is the last token before the exception.
    """

    from_draft: bool
    counts: DraftCounts  # drafts made and accepted for the sequence so far
    error: Exception | None = None


class BatchGenerator(Scheduler):
    """
    A batch generator implements continuous batching, as mlx-lm's ``BatchGenerator``, with drafts by the model's MTP head.

    Each sequence has its own prompt, cache, sampler, logits processors and stop tokens, and accepts or rejects its own drafts.
    Prompts are prefilled one after the other, in chunks between two steps, once there is room for another sequence.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``.
        options (TextOptions, optional): The options of sequences without their own, in one object. A number of drafts is the
          limit of all. Processors with state must not be shared. Default: ``None``, 128 tokens.
        stop_tokens (Sequence[Sequence[int]], optional): Stop sequences of sequences without their own.
        completion_batch_size (int): The maximum number of sequences that generate at once. Default: ``32``.
        prefill_step_size (int): The maximum number of prompt tokens to prefill between two steps. Default: ``2048``.
        max_token_gap (float): The maximum time between two tokens of a sequence while prompts are prefilled, in seconds. It
          reduces the number of tokens that are prefilled between two steps. Default: ``0.5``.
        min_decode_share (float): The share of the time that steps get while prompts are prefilled, from 0 to below 1.
          Default: ``0.33``.
        max_kv_size (int, optional): Must be ``None``: the caches of these models do not rotate.
        return_prompt_caches (bool): Return a prompt cache with the last token of a sequence. Default: ``True``.
        kv_bits, kv_group_size, quantized_kv_start (optional): The quantization of the keys and values of each text, as in
          ``mtp_generate_step``. Default: none.
        stream (mx.Stream, optional): The stream to run on. Default: ``None``, mlx-lm's generation stream.
        keywords: Options by the names of ``mlx_mtp.TextOptions``, such as ``max_tokens``, which replace those of ``options``.

    Raises:
        MTPError: The model has no MTP head, or an argument is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        options: TextOptions | None = None,
        stop_tokens: Sequence[Sequence[int]] | None = None,
        completion_batch_size: int = 32,
        prefill_step_size: int = 2048,
        max_token_gap: float = MAX_TOKEN_GAP,
        min_decode_share: float = MIN_DECODE_SHARE,
        max_kv_size: int | None = None,
        return_prompt_caches: bool = True,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
        stream: mx.Stream | mx.ThreadLocalStream | None = None,
        **keywords: Any,
    ):
        if max_kv_size is not None:
            raise MTPError("max_kv_size is not supported: the caches of this model do not rotate.")
        if stop_tokens is not None:
            stops = [token_ids(tokens, model, "stop_tokens") for tokens in stop_tokens]
            keywords["stop_sequences"] = StopSequences(stops or None)
        defaults = TextOptions(max_tokens=128, stop_sequences=StopSequences(None))
        self.options = TextOptions.given((options or TextOptions()).completed_by(defaults), keywords)
        check_count("max_tokens", self.options.max_tokens)
        mtp_model = check_model(model, self.options)
        check_count("completion_batch_size", completion_batch_size)
        budget = PrefillBudget(
            check_count("prefill_step_size", prefill_step_size), max_token_gap, min_decode_share, mtp_model.ranks
        )
        kv = KVOptions(kv_bits=kv_bits, kv_group_size=kv_group_size, quantized_kv_start=quantized_kv_start)
        stream = stream or generation_stream
        super().__init__(mtp_model, kv, budget, stream, completion_batch_size, return_prompt_caches)
        TextOptions().resolve(mtp_model.draft_settings.tuned, has_head(model), self.options)  # or an error
        if self.planner.exchange is not None:
            with mx.stream(stream):
                self.planner.exchange.agree([], 0, None)  # no sequences yet
        self._uid_count = 0
        self._restore = weakref.finalize(self, _set_wired_limit, maybe_set_recommended_wired_limit(), stream)

    def close(self) -> None:
        """Remove all sequences, and restore the wired limit."""
        super().close()
        self._restore()

    def __len__(self) -> int:
        return len(self.prompts) + sum(s.end is None for s in self.decoder.sequences)

    stats = StockGenerator.stats

    @property
    def prompt_cache_nbytes(self) -> int:
        """The size of the caches in use."""
        prompts = sum(int(c.nbytes) for s in self.prompts for c in s.cache.entries)
        return prompts + self.decoder.cache.nbytes + self.decoder.drafter.cache.nbytes

    # Sequences join and leave

    def insert(self, prompts: Iterable[TokenIds] | TokenIds, **kwargs: Any) -> list[int]:
        """Add sequences as ``insert_segments`` does, with each prompt as one segment."""
        return self.insert_segments([[prompt] for prompt in each_prompt(prompts)], **kwargs)

    def insert_segments(
        self,
        segments: Iterable[Iterable[TokenIds]],
        max_tokens: list[int] | None = None,
        caches: Sequence[list[Any] | PromptCache | None] | None = None,
        all_tokens: list[list[int]] | None = None,
        samplers: Sequence[Sampler | None] | None = None,
        logits_processors: Sequence[Sequence[LogitsProcessor] | None] | None = None,
        stop_sequences: list[StopSequences] | None = None,
        options: Sequence[TextOptions] | None = None,
        counts: list[DraftCounts] | None = None,
        input_embeddings: Sequence[mx.array | PendingEmbeddings | None] | None = None,
        images: Sequence[Sequence[ImageSpan]] | None = None,
        **keywords: Sequence[Any] | None,
    ) -> list[int]:
        """
        Add sequences, which start with the next step. Each option has one entry per sequence, as in mlx-lm.

        Args:
            segments (List[List[List[int]]]): The token ids of the prompts, in segments, each as for ``mtp_generate_step``:
              ``next`` stops at the end of each.
            max_tokens (List[int], optional): The maximum number of tokens of each.
            caches (List[List[Any]], optional): Prompt caches of ``mlx_mtp.make_prompt_cache`` or of mlx-lm, which are copied; a
              ``PromptCache`` is not.
            all_tokens (List[List[int]], optional): The tokens in the caches, for logits processors.
            samplers, logits_processors, stop_sequences (optional): As in mlx-lm; ``None`` in place of processors is for none.
            options (List[TextOptions], optional): The options of each, in one object. The number of drafts is at most the
              generator's.
            counts (List[DraftCounts], optional): Count the drafts of each as the steps go.
            input_embeddings (List[Union[mx.array, PendingEmbeddings]], optional): The embeddings of each, [T, H], or embeddings
              to compute between steps; ``None`` for those of the tokens.
            images (List[List[ImageSpan]], optional): The images of each text, as for ``mtp_generate_step``.
            keywords: Other options of each by the names of ``mlx_mtp.TextOptions``. They and those above replace options of
              ``options``.

        Returns:
            List[int]: Their uids.

        Raises:
            MTPError: A prompt is empty or no token ids of the model, a cache does not fit, or an option is out of range or has
              another number of entries. No sequence is then added.
        """
        lists = keywords | {
            "max_tokens": max_tokens, "samplers": samplers, "logits_processors": logits_processors,
            "stop_sequences": stop_sequences, "options": options, "caches": caches, "all_tokens": all_tokens,
            "counts": counts, "input_embeddings": input_embeddings, "images": images,
        }  # fmt: skip
        each = each_prompt(segments)
        new = [
            self._make_sequence(i, prompt, **entries)
            for i, (prompt, entries) in enumerate(zip(each, entries_of(lists, len(each))))
        ]
        self._uid_count += len(new)
        self.prompts.extend(new)
        return [s.task.uid for s in new]

    def _make_sequence(
        self,
        i: int,
        segments: Iterable[TokenIds],
        *,
        caches: list[Any] | PromptCache | None = None,
        all_tokens: Sequence[int] = (),
        counts: DraftCounts | None = None,
        input_embeddings: mx.array | PendingEmbeddings | None = None,
        images: Sequence[ImageSpan] = (),
        options: TextOptions | None = None,
        **keywords: Any,
    ) -> TextSequence:
        """Make the sequence of a call's prompt i, with its entries of the arguments of ``insert_segments``."""
        if "samplers" in keywords:
            keywords["sampler"] = keywords.pop("samplers")
        if "logits_processors" in keywords:
            keywords["logits_processors"] = keywords["logits_processors"] or ()  # None is for none, as in mlx-lm.
        options = TextOptions.given(options, keywords)
        limit = options.max_tokens
        if "max_tokens" in keywords or (limit is not None and not (isinstance(limit, Integral) and limit < 0)):
            check_count(f"max_tokens of prompt {i}", limit)
        model: Any = self.model
        options = options.resolve(model.draft_settings.tuned, has_head(model), self.options)
        kv = self.decoder.kv
        parts = [token_ids(segment, model, f"Prompt {i}") for segment in each_prompt(segments)]
        known = token_ids([*all_tokens], model, f"all_tokens of prompt {i}")
        n_prompt = sum(map(len, parts))
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
        task = Task(options, kv, self._uid_count + i)
        return TextSequence(task, cache, parts, counts or DraftCounts(), known, input_embeddings)

    def extract_cache(self, uids: list[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """The prompt cache of each sequence at this moment, and the tokens in it."""
        with mx.stream(self.stream):
            # Copies: the sequences go on, and one that waits or runs alone shares its arrays with its cache.
            return copy.deepcopy(self._caches(uids))

    def _caches(self, uids: list[int]) -> dict[int, tuple[list[Any], list[int]]]:
        caches = {s.task.uid: (s.cache.entries, s.tokens) for s in self.prompts if s.task.uid in uids}
        running = [s for s in self._running() if s.task.uid in uids]
        return caches | {s.task.uid: (cache_at_end(self.decoder, s), s.tokens) for s in running}

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> dict[int, tuple[list[Any], list[int]]]:
        """Remove sequences. With ``return_prompt_caches``, return the prompt cache of each and the tokens in it."""
        with mx.stream(self.stream):
            caches = self._caches(uids) if return_prompt_caches else {}
        for s in self._running():
            if s.task.uid in uids:
                s.end = "removed"
        self.prompts = deque(s for s in self.prompts if s.task.uid not in uids)
        self.drop_ended()
        return caches

    # Steps

    def next(self) -> tuple[list[PromptResponse], list[Response]]:
        """Make a step of the sequences that generate, and prefill a part of the waiting prompts -> (prompts, tokens)."""
        known = {s: s.n_observed for s in (*self.decoder.sequences, *self.prompts) if s.end is None}
        try:
            joined, stepped = self.step()
        except RuntimeError as e:
            return [], responses_of(self._end_failed(e, known), None)
        with mx.stream(self.stream):
            responses = responses_of(stepped, self.decoder if self.keeps_ended else None)
        if any(advice(r.error) is not None for r in responses):
            self._begin_again(self._running())
        self.drop_ended()
        prompts = [PromptResponse(s.task.uid, (s.n_prompt,) * 2, True, True) for s in joined]
        try:
            prompts += self.prefill()
        except RuntimeError as e:
            responses += responses_of(self._end_failed(e, self._running(), self.at_work), None)
        return prompts, responses

    def _running(self) -> dict[TextSequence, int]:
        """The sequences that generate, and the number of tokens of each that were returned."""
        return {s: s.n_observed for s in self.decoder.sequences if s.end is None}

    def _end_failed(
        self, error: RuntimeError, known: Mapping[TextSequence, int], failed: TextSequence | None = None
    ) -> list[Stepped]:
        """After an error of the device, end a sequence: that whose chunk has failed, or of a step the newest.

        The others begin again, if all of their text is known as tokens: a failed pass may have left any values in their caches.
        """
        if advice(error) is None or self.model.ranks is not None:
            raise error
        running = {s: known[s] for s in self.decoder.sequences if s in known}
        failed = failed or next(reversed(running), None) or self.prompts[0]
        ended = [failed, *(s for s in running if s is not failed and not s.can_begin_again)]
        for s in ended:
            s.end = error
        self.prompts = deque(s for s in self.prompts if s not in ended)
        self._begin_again({s: n for s, n in running.items() if s not in ended})
        return [(s, []) for s in ended]

    def _begin_again(self, running: dict[TextSequence, int]) -> None:
        """Empty all rows, and let these sequences wait again, in front, each with its prompt and its first n tokens."""
        with mx.stream(self.stream):
            self.decoder.clear()
        self.planner.clear()
        model: Any = self.model
        for s, n in running.items():
            s.begin_again(open_prompt_cache(model, None), n)
        self.prompts.extendleft(reversed(running))

    def next_generated(self) -> list[Response]:
        """Return the next generated tokens, prefilling prompts until there are any. Empty if no sequence is left."""
        while len(self) > 0:
            if generated := self.next()[1]:
                return generated
        return []


def _set_wired_limit(limit: int | None, stream: mx.Stream | mx.ThreadLocalStream) -> None:
    if limit is not None:
        mx.synchronize(stream)
        mx.set_wired_limit(limit)


# The arguments of prompts


def entries_of(lists: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """The entries of each of n prompts, by name, without lists that are ``None``."""
    given = {name: values for name, values in lists.items() if values is not None}
    for name, values in given.items():
        is_list = isinstance(values, Sequence) and not isinstance(values, str)
        if not is_list or len(values) != n:
            got = len(values) if is_list else values
            raise MTPError(f"{name} must have an entry for each prompt: {n}, not {got}.")
    return [{name: values[i] for name, values in given.items()} for i in range(n)]


# Its responses


def responses_of(stepped: list[Stepped], decoder: Decoder | None) -> list[Response]:
    """A response for each token of a step, sequence by sequence. Of the last, the prompt cache is the decoder's, if given."""
    responses = []
    for s, tokens in stepped:
        for token, logprobs, from_draft in tokens:
            responses.append(Response(s.task.uid, token, logprobs, None, None, None, from_draft, s.drafting.counts))
        if s.end is None:
            continue
        if not tokens:  # its sampler, a processor or a pass has failed
            last_token = s.tokens[-1] if s.tokens else 0
            responses.append(Response(s.task.uid, last_token, None, None, None, None, False, s.drafting.counts, s.end))
        last = responses[-1]
        last.finish_reason = "error" if isinstance(s.end, Exception) else s.end
        last.all_tokens = s.tokens
        # Nothing of a failed pass is kept.
        has_failed = advice(last.error) is not None or isinstance(last.error, NotANumberError)
        last.prompt_cache = None if decoder is None or has_failed else cache_at_end(decoder, s)
    return responses


def cache_at_end(decoder: Decoder, s: TextSequence) -> list[Any]:
    """The prompt cache of a sequence that generates, with all of its tokens."""
    entries: list[Any] = [None] * len(decoder.model.layers) + make_head_cache(decoder.model)
    cache = PromptCache(entries, len(decoder.model.layers))
    n = decoder.extract(s, cache, s.prompt_end + s.n_observed)
    cache.record(n, s.text_of(n))
    return entries
