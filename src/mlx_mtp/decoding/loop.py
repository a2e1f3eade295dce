"""Speculative decoding with the model's own MTP head: draft, verify, accept, roll back.

A step over the window of a confirmed token b and k drafts, with N tokens in the backbone's cache:

    position               N         N+1       ...   N+k
    verify: input          b         d_1             d_k        one backbone pass
            hidden         h_N       h_N+1           h_N+k
            choice         c_1       c_2             c_k+1      from all that stands before
    accept j drafts        d_1 = c_1, ..., d_j = c_j; the next confirmed token is c_j+1
    roll back              the caches keep b, d_1, ..., d_j
    draft:  hidden         h_N       ...   h_N+j                one pass of the head over the window: row N+i pairs
            token          d_1       ...   c_j+1                the verified hidden state with the token after it
            further drafts feed the head's own output, and their rows are taken back

So the head's cache has a row for each of the backbone's tokens, each made from a verified hidden state. A step without drafts
(k = 0) leaves its row for later and does not wait for the host: that is plain decoding. At rest (before the first token,
after the last) the token after the last one is not known: the head has one row less, and the hidden state that it waits
with is in the last entry of the prompt cache.

This module is the loop; the moves are those of ``decoder.Decoder``.
"""

from collections.abc import Callable, Generator
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, generation_stream
from mlx_lm.sample_utils import LogitsProcessor, Sampler
from mlx_lm.utils import does_model_support_input_embeddings

from ..models.cache import adopt_prompt_cache, make_prompt_cache
from ..models.drafting import Settings
from .acceptance import make_acceptance, n_leading, rewind
from .decoder import Decoder
from .depth import MAX_DRAFT_TOKENS, Depth
from .pace import DraftCounts, NumDraftTokens
from .processors import keeps_state


def mtp_generate_step(
    prompt: mx.array,
    model: nn.Module,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    *,
    max_tokens: int = 256,
    num_draft_tokens: NumDraftTokens | None = None,
    draft_p_min: float | None = None,
    exact: bool = False,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    max_kv_size: int | None = None,
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

    When it ends, is closed, interrupted or fails, the prompt cache holds the prompt and exactly the tokens that it has yielded.

    Args:
        prompt (mx.array): The input prompt, [T].
        model (nn.Module): A model of ``mlx_mtp.load``.
        max_tokens (int): The maximum number of tokens. Use ``-1`` for an infinite generator. Default: ``256``.
        num_draft_tokens (Union[int, str, Depth], optional): The number of tokens to draft in a step, 0 to 8. ``"auto"`` is
          chosen at every step for speed, see ``mlx_mtp.depth``; the model keeps the times of steps from one generation to
          the next, and a ``Depth`` of one's own keeps them apart. Default: ``None``, which is that of the settings that
          ``load`` has found, or ``"auto"``.
        draft_p_min (float, optional): Stop drafting where the head gives no token this probability, at the price of one more
          synchronization a step. Default: ``None``, which is that of the settings, or ``0.0``.
        exact (bool): Verify with the very operations of plain decoding, so that the tokens are its tokens also where two
          logits are nearly equal; ``models/exact.py`` says how, and at what price. Default: ``False``.
        sampler (Sampler, optional): A sampler for sampling a token from a vector of log probabilities. With one of
          ``mlx_mtp.make_sampler`` drafts go by rejection sampling, with any other they stand where they are its choice.
          Default: ``None``, the most likely token.
        logits_processors (List[LogitsProcessor], optional): A list of functions that take tokens and logits and return
          the processed logits. A function is called at every position of a window, with the drafts before it among the
          tokens, also at positions that are then rejected, and for the drafts. If one is an object, which may keep state
          (see ``mlx_mtp.processors``), all are called once a token, in order. Default: ``None``.
        max_kv_size (int, optional): Must be ``None``: mlx-lm, too, has no rotating cache for these models.
        prompt_cache (List[Any], optional): A pre-computed cache of ``mlx_mtp.make_prompt_cache`` or of mlx-lm, updated
          in place.
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
    tuned = model.drafting.tuned or Settings()
    if num_draft_tokens is None:
        num_draft_tokens = tuned.num_draft_tokens
    if num_draft_tokens == "auto":
        num_draft_tokens = auto_depth(model)
    is_number = isinstance(num_draft_tokens, int) and 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS
    if not is_number and not isinstance(num_draft_tokens, Depth):
        raise ValueError(f"num_draft_tokens must be auto or from 0 to {MAX_DRAFT_TOKENS}, not {num_draft_tokens}.")
    if draft_p_min is None:
        draft_p_min = tuned.draft_p_min
    if not 0 <= draft_p_min <= 1:
        raise ValueError(f"draft_p_min must be a probability, from 0 to 1, not {draft_p_min}.")
    if max_kv_size is not None:
        raise ValueError("max_kv_size has no effect on this model, whose caches do not rotate: leave it out.")
    n_prompt = _check_prompt(prompt, model, input_embeddings)
    if prompt_cache is None:
        prompt_cache = make_prompt_cache(model)
    else:
        adopt_prompt_cache(model, prompt_cache)
    acceptance = make_acceptance(sampler)
    logits_processors = logits_processors or []
    in_order = acceptance.keeps_state or any(keeps_state(p) for p in logits_processors)
    kv_options = (quantized_kv_start, kv_group_size, kv_bits)
    decoder = Decoder(model, prompt_cache, acceptance, logits_processors, kv_options, exact, draft_p_min)
    counts = counts or DraftCounts()
    progress = prompt_progress_callback or (lambda *_: None)

    depth = num_draft_tokens if isinstance(num_draft_tokens, Depth) else Depth(MAX_DRAFT_TOKENS)
    depth.begin()
    last_time: float | None = None

    def observe(asked, k, n, clear):
        """Of k drafts n stand, as is known now; ``clear``: and since the last time, the device did this step alone."""
        nonlocal last_time
        counts.add(k, n)
        now = perf_counter()
        if last_time is not None:
            # What the head was too unsure of has fallen, at the price of drafting it.
            depth.observe(asked, n, now - last_time if clear else None)
        last_time = now

    def embeddings(i, j=None):
        return None if input_embeddings is None else input_embeddings[i:j]

    with mx.stream(stream):
        n_yielded = n_drafted = n_asked = 0
        try:
            prompt = prompt.astype(mx.uint32)
            decoder.see(prompt.tolist())  # type: ignore[arg-type]
            progress(0, n_prompt)
            done = 0
            while (n := min(prefill_step_size, n_prompt - 1 - done)) > 0:
                decoder.prefill(prompt[done : done + n], embeddings(done, done + n))
                done += n
                progress(done, n_prompt)
            logits = decoder.verify_prompt(prompt[done:], embeddings(done))
            mx.eval(decoder.hidden)  # not the logits, which nobody wants of a prompt alone
            progress(n_prompt, n_prompt)
            while n_yielded != max_tokens:
                n, k, n_left = 0, len(decoder.drafts), max_tokens - n_yielded
                if in_order and k > 0:
                    choices, logprobs = [], []
                    for n in range(k + 1):
                        verdict, (row,) = decoder.judge(logits, n, n + 1)
                        choices.append(verdict.tokens)
                        logprobs.append(row)
                        if n == k or not verdict.stands.item():
                            break
                        token: Any = verdict.tokens.item()
                        n_yielded, decoder.n_given = n_yielded + 1, 2 + n
                        yield token, row, True
                    tokens = mx.concatenate(choices)
                else:
                    (tokens, stands, states), logprobs = decoder.judge(logits, 0, k + 1)
                    if k > 0:
                        mx.eval(tokens, stands, states)
                        n = n_leading(stands.tolist())  # type: ignore[arg-type]
                        rewind(states, n)
                    else:
                        mx.async_eval(tokens)  # apart from the next pass, which they would else be waited for with
                n_before, n_drafted = n_drafted, k
                asked_before, n_asked = n_asked, decoder.n_asked
                if n_drafted > 0:
                    observe(n_asked, n_drafted, n, n_before > 0)

                k = num_draft_tokens if isinstance(num_draft_tokens, int) else depth.next()
                if max_tokens > 0:
                    k = min(k, max(n_left - n - 2, 0))
                if kv_bits is not None and decoder.n_cached + n + 1 < quantized_kv_start:
                    # mlx-lm quantizes between two tokens: no window may cross the start.
                    k = min(k, quantized_kv_start - decoder.n_cached - n - 2)
                decoder.draft(tokens[: n + 1], k)
                if k > 0:
                    mx.async_eval(decoder.drafts)
                chosen: Any
                if n > 0 and not in_order:
                    chosen = tokens.tolist()
                    for i in range(n):
                        n_yielded, decoder.n_given = n_yielded + 1, 2 + i
                        yield chosen[i], logprobs[i], True

                decoder.settle()
                logits = decoder.verify(tokens[n : n + 1])
                mx.async_eval(logits, decoder.hidden)
                chosen = tokens.tolist()
                decoder.see(chosen[: n + 1])
                if n_drafted == 0:  # known only now, while the device is at the next token
                    # But where steps change from plain to drafting or back, more or less than this pass may be behind it.
                    observe(n_asked, 0, 0, asked_before == n_asked == decoder.n_asked == 0)
                # From here on the token counts as handed out. No call is in between, at which an interrupt could come.
                n_yielded, decoder.n_given, decoder.before = n_yielded + 1, 1, None
                yield chosen[n], logprobs[n], False
                if n_yielded % 256 == 0:
                    mx.clear_cache()
        finally:
            decoder.rest()


def auto_depth(model: nn.Module) -> Depth:
    """The one ``Depth`` of a model, which begins with the times of its settings, if it has some."""
    tuned = model.drafting.tuned or Settings()
    model.drafting.depth = model.drafting.depth or Depth(MAX_DRAFT_TOKENS, tuned.seconds)
    return model.drafting.depth


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
