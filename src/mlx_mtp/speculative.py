"""Speculative decoding with the model's own MTP head: draft, verify, accept, roll back.

A step over the window of a confirmed token b and k drafts, with N tokens in the backbone's cache:

    position               N         N+1       ...   N+k
    verify: input          b         d_1             d_k        one backbone pass
            hidden         h_N       h_N+1           h_N+k
            choice         c_1       c_2             c_k+1      by the sampler, from all that stands before
    accept j drafts        d_1 = c_1, ..., d_j = c_j; the next confirmed token is c_j+1
    roll back              the caches keep b, d_1, ..., d_j
    draft:  hidden         h_N       ...   h_N+j                one pass of the head over the window: row N+i pairs
            token          d_1       ...   c_j+1                the verified hidden state with the token after it
            further drafts feed the head's own output, and their rows are taken back

So between steps the head's cache has a row for each of the backbone's tokens, each made from a verified hidden state. At
rest (before the first token, after the last) the token after the last one is not known: the head has one row less, and the
hidden state that it waits with is the last entry of the prompt cache.

This module knows nothing of temperatures, vocabularies or layers.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, generation_stream, maybe_quantize_kv_cache
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler
from mlx_lm.utils import does_model_support_input_embeddings

from .acceptance import n_matching
from .cache import adopt_prompt_cache, make_prompt_cache, rollback, undone_on_failure

MAX_DRAFT_TOKENS = 8
DEFAULT_NUM_DRAFT_TOKENS = 2


@dataclass
class DraftCounts:
    """Drafts made and accepted, by position in the window."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, n_drafted: int, n_accepted: int) -> None:
        new = n_drafted - len(self.drafted)
        self.drafted += [0] * new
        self.accepted += [0] * new
        for i in range(n_drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < n_accepted


def mtp_generate_step(
    prompt: mx.array,
    model: nn.Module,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    *,
    max_tokens: int = 256,
    num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    input_embeddings: mx.array | None = None,
    counts: DraftCounts | None = None,
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """
    A generator producing the tokens of mlx-lm's ``generate_step``, with the model's MTP head as the draft model.

    When it ends, is closed or fails, the prompt cache holds the prompt and exactly the tokens that it has yielded.

    Args:
        prompt (mx.array): The input prompt, [T].
        model (nn.Module): A model of ``mlx_mtp.load``.
        max_tokens (int): The maximum number of tokens. Use ``-1`` for an infinite generator. Default: ``256``.
        num_draft_tokens (int): The number of tokens to draft in a step, 1 to 8. Default: ``2``.
        sampler (Sampler, optional): A sampler for sampling a token from a vector of log probabilities, called for one
          position at a time. Default: ``None``, the most likely token.
        logits_processors (List[LogitsProcessor], optional): A list of functions that take tokens and logits and return
          the processed logits. They are called at every position of a window, with the drafts before it among the tokens,
          also at positions that are then rejected. Default: ``None``.
        prompt_cache (List[Any], optional): A pre-computed cache of ``mlx_mtp.make_prompt_cache``, updated in place.
        prefill_step_size (int): Step size for processing the prompt.
        kv_bits (int, optional): Number of bits to use for KV cache quantization. None implies no cache quantization.
          Default: ``None``.
        kv_group_size (int): Group size for KV cache quantization. Default: ``64``.
        quantized_kv_start (int): Step to begin using a quantized KV cache when ``kv_bits`` is non-None. Default: ``5000``.
        prompt_progress_callback (Callable[[int, int], None]): A call-back which takes the prompt tokens processed so far
          and the total number of prompt tokens.
        input_embeddings (mx.array, optional): Input embeddings to use instead of or in conjunction with prompt tokens,
          [T, H]. Default: ``None``.
        counts (DraftCounts, optional): Counts drafts as the steps go.

    Yields:
        Tuple[int, mx.array, bool]: One token, a vector of log probabilities [V], and whether it was drafted by the head.

    Raises:
        ValueError: The model has no MTP head, the prompt cache does not fit it, or an argument is out of range.
    """
    if getattr(model, "mtp", None) is None:
        raise ValueError("The model has no MTP head: load it with mlx_mtp.load, or generate without MTP.")
    if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"num_draft_tokens must be from 1 to {MAX_DRAFT_TOKENS}, not {num_draft_tokens}.")
    n_prompt = _check_prompt(prompt, model, input_embeddings)
    if prompt_cache is None:
        prompt_cache = make_prompt_cache(model)
    else:
        adopt_prompt_cache(model, prompt_cache)
    n_layers = len(model.layers)
    head_cache, last_hidden = prompt_cache[n_layers:]

    sampler = sampler or greedy_sampler
    logits_processors = logits_processors or []
    counts = counts or DraftCounts()
    progress = prompt_progress_callback or (lambda *_: None)

    n_cached = max(getattr(c, "offset", 0) for c in prompt_cache[:n_layers])  # tokens that are final
    seen = mx.array([], mx.uint32)  # those of them that the logits processors have been shown
    # The tokens [T] and hidden states [1, T, H] of the window that is not settled.
    window: Any = None
    hidden: Any = None

    def backbone(tokens, embeddings=None, n_confirmed=0):
        """tokens [T] -> logits [1, T, V], hidden [1, T, H]"""
        kwargs = {} if embeddings is None else {"input_embeddings": embeddings[None]}
        return model(tokens[None], cache=prompt_cache, return_hidden=True, n_confirmed=n_confirmed, **kwargs)

    def head(tokens, hidden, embeddings=None):
        """tokens [T], hidden [1, T, H], each of the position before -> the head's hidden [1, T, H]"""
        embeddings = model.model.embed_tokens(tokens[None]) if embeddings is None else embeddings[None]
        return model.mtp(embeddings, hidden, head_cache)

    def quantize():
        caches = prompt_cache[:n_layers]
        maybe_quantize_kv_cache(caches, quantized_kv_start, kv_group_size, kv_bits)
        prompt_cache[:n_layers] = caches

    def prefill(tokens, embeddings):
        nonlocal n_cached, seen
        with undone_on_failure(prompt_cache):
            _, hidden = backbone(tokens, embeddings)
            # A token's row is fed the hidden state before it: that of the first waits from an earlier call, if there was one.
            previous = hidden[:, :-1]
            if not last_hidden.empty():
                previous = mx.concatenate([last_hidden[0], previous], axis=1)
            if (n := previous.shape[1]) > 0:
                head(tokens[-n:], previous, None if embeddings is None else embeddings[-n:])
            last_hidden[0] = mx.contiguous(hidden[:, -1:])
        n_cached += hidden.shape[1]
        if logits_processors:
            seen = mx.concatenate([seen, tokens])
        quantize()
        mx.eval([c.state for c in prompt_cache])
        mx.clear_cache()

    def verify(tokens, embeddings=None):
        """Open a window: tokens [T], the first of them final -> logits [1, T, V]"""
        nonlocal window, hidden
        quantize()
        with undone_on_failure(prompt_cache):
            logits, hidden = backbone(tokens, embeddings, n_confirmed=1)
        window = tokens
        return logits

    def choose(logits):
        """logits [1, T, V] -> choices [T], logprobs [T] of [V]"""
        choices, rows = [], []
        for i in range(logits.shape[1]):
            # [1, V], as mlx-lm hands it to samplers and processors, and an array of its own, since penalties write into it.
            row = logits[:, i]
            if len(window) > 0:
                for processor in logits_processors:
                    row = processor(mx.concatenate([seen, window[: i + 1]]), row)
            logprobs = row - mx.logsumexp(row, keepdims=True)
            choices.append(sampler(logprobs))
            rows.append(logprobs.squeeze(0))
        return mx.concatenate(choices), rows

    def draft(tokens, hidden, k):
        """tokens [T], hidden [1, T, H] of the positions before -> drafts [k]; T rows stay in the head's cache"""
        drafts = []
        for _ in range(max(k, 1)):
            hidden = head(tokens, hidden)[:, -1:]  # [1, 1, H]
            if k > 0:
                tokens = mx.argmax(model.logits(hidden)[:, -1], axis=-1)  # [1]
                drafts.append(tokens)
        head_cache.trim(max(k - 1, 0))
        return mx.concatenate(drafts) if drafts else seen[:0]

    def settle(n):
        """Close the window: its first n tokens are final, the others never were."""
        nonlocal window, n_cached, seen
        rollback(prompt_cache[:n_layers], n_cached, n)
        n_cached += n
        last_hidden[0] = hidden[:, n - 1 : n]
        if logits_processors:
            seen = mx.concatenate([seen, window[:n]])
        window = None

    with mx.stream(stream):
        prompt = prompt.astype(mx.uint32)
        progress(0, n_prompt)
        done = 0
        while (n := min(prefill_step_size, n_prompt - 1 - done)) > 0:
            prefill(prompt[done : done + n], None if input_embeddings is None else input_embeddings[done : done + n])
            done += n
            progress(done, n_prompt)

        n_yielded = 0
        standing = 1  # tokens of the open window that stand if generation stops now
        drafts = seen[:0]
        try:
            last, embeddings = prompt[done:], None if input_embeddings is None else input_embeddings[done:]
            if not last_hidden.empty():
                head(last, last_hidden[0], embeddings)
            logits = verify(last, embeddings)
            while n_yielded != max_tokens:
                choices, logprobs = choose(logits)
                mx.eval(choices, drafts)
                chosen: Any = choices.tolist()
                n = n_matching(drafts.tolist(), chosen)  # type: ignore[arg-type]
                counts.add(len(drafts), n)
                if n_yielded == 0:
                    progress(n_prompt, n_prompt)

                k = num_draft_tokens
                if max_tokens > 0:
                    k = min(k, max(max_tokens - n_yielded - n - 2, 0))
                if kv_bits is not None and n_cached + n + 1 < quantized_kv_start:
                    # mlx-lm quantizes between two tokens: no window may cross the start.
                    k = min(k, quantized_kv_start - n_cached - n - 2)
                drafts = draft(choices[: n + 1], hidden[:, : n + 1], k)
                mx.async_eval(drafts)

                for i in range(n):
                    n_yielded, standing = n_yielded + 1, 2 + i
                    yield chosen[i], logprobs[i], True
                    if n_yielded == max_tokens:
                        return
                settle(n + 1)
                logits = verify(mx.concatenate([choices[n : n + 1], drafts]))
                mx.async_eval(logits, hidden)

                n_yielded, standing = n_yielded + 1, 1
                yield chosen[n], logprobs[n], False
                if n_yielded % 256 == 0:
                    mx.clear_cache()
        finally:
            if window is not None:
                settle(standing)
            head_cache.trim(head_cache.offset - max(n_cached - 1, 0))


def _check_prompt(prompt: mx.array, model: nn.Module, input_embeddings: mx.array | None) -> int:
    """The prompt's number of positions, or mlx-lm's errors."""
    if input_embeddings is None:
        if len(prompt) == 0:
            raise ValueError("Either input_embeddings or prompt (or both) must be provided.")
        return len(prompt)
    if not does_model_support_input_embeddings(model):
        raise ValueError("Model does not support input embeddings.")
    if len(prompt) > 0 and len(prompt) != len(input_embeddings):
        raise ValueError(
            f"When providing input_embeddings, their sequence length ({len(input_embeddings)}) must match the sequence "
            f"length of the prompt ({len(prompt)}), or the prompt must be empty."
        )
    return len(input_embeddings)
