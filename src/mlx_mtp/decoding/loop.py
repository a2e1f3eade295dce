"""Speculative decoding with the model's own MTP head: draft, verify, accept, roll back.

A step over a window of the decided token b and k drafts, with N tokens in the backbone's cache:

    position               N         N+1       ...   N+k
    verify: input          b         d_1             d_k        one backbone pass
            hidden         h_N       h_N+1           h_N+k
            choice         c_1       c_2             c_k+1      given all tokens before it
    accept j drafts        d_1 = c_1, ..., d_j = c_j; the next decided token is c_j+1
    roll back              the caches keep b, d_1, ..., d_j
    draft:  hidden         h_N       ...   h_N+j                one pass of the head over the window: pair N+i:
            token          d_1       ...   c_j+1                the verified hidden state and the token after it
            further drafts feed the head's own output, and their keys and values are trimmed

So the head's cache has keys and values for each of the backbone's tokens, each made from a verified hidden state. A step
without drafts (k = 0) leaves its pair pending and does not wait for the host: that is plain decoding. Between generations the
token after the last one is not known yet, so the head's cache is one token shorter, and the last hidden state is kept in the
last entry of the prompt cache.

Drafts may also be copied from the text (``drafts/sources.py``); the head then gets their pairs when they are accepted.

This module is the loop. ``decoder.Decoder`` has its moves. ``planner.Planner`` chooses the number of drafts and their source.
"""

import weakref
from collections.abc import Callable, Generator, Iterable, Sized
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, generation_stream
from mlx_lm.sample_utils import LogitsProcessor, Sampler
from mlx_lm.utils import does_model_support_input_embeddings

from ..caches.positions import ImageSpan, Positions
from ..caches.prompt_cache import PromptCache, has_head, open_prompt_cache, place_images
from ..caches.single import KVOptions, SingleCache
from ..drafts.options import CopyDrafts, NumDraftTokens, TextOptions, check_model
from ..layers.mtp import run_head
from ..models.protocol import MTPModel
from ..pacing.step_times import PLAIN_PLAN
from .counts import DraftCounts
from .decoder import Decoder
from .planner import Planner, depth_of
from .sequence import Sequence
from .window import Drafts, Step, Token, Window


def mtp_generate_step(
    prompt: mx.array,
    model: nn.Module,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    *,
    max_tokens: int = 256,
    num_draft_tokens: NumDraftTokens | None = None,
    copy_drafts: CopyDrafts | None = None,
    draft_p_min: float | None = None,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    all_tokens: Iterable[int] = (),
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    input_embeddings: mx.array | None = None,
    images: Iterable[ImageSpan] = (),
    counts: DraftCounts | None = None,
) -> Generator[Token, None, None]:
    """
    A generator producing the tokens of mlx-lm's ``generate_step``, with the model's MTP head as the draft model.

    When it ends, is closed, interrupted or fails, the prompt cache holds the prompt and exactly the tokens it has yielded.

    Args:
        prompt (mx.array): The input prompt, [T].
        model (nn.Module): A model of ``mlx_mtp.load``.
        max_tokens (int): The maximum number of tokens. Use ``-1`` for an infinite generator. Default: ``256``.
        num_draft_tokens, copy_drafts, draft_p_min, sampler, logits_processors (optional): See ``mlx_mtp.TextOptions``.
        max_kv_size (int, optional): Must be ``None``: the caches of these models do not rotate.
        prompt_cache (List[Any], optional): A pre-computed cache of ``mlx_mtp.make_prompt_cache`` or of mlx-lm, updated
          in place.
        all_tokens (Iterable[int]): The tokens in the prompt cache, for logits processors, as in batches. Default: none; they
          see the prompt, as in mlx-lm.
        prefill_step_size (int): Step size for processing the prompt.
        kv_bits (int, optional): Number of bits to use for KV cache quantization. None implies no cache quantization.
          Default: ``None``.
        kv_group_size (int): Group size for KV cache quantization. Default: ``64``.
        quantized_kv_start (int): Step to begin using a quantized KV cache when ``kv_bits`` is non-None. Default: ``5000``.
        prompt_progress_callback (Callable[[int, int], None]): A call-back which takes the prompt tokens processed so far
          and the total number of prompt tokens.
        input_embeddings (mx.array, optional): Input embeddings to use instead of or in conjunction with prompt tokens,
          [T, H]. Default: ``None``.
        images (Iterable[ImageSpan]): The spans of the text's images, counted from the first token in the prompt cache; their
          embeddings are among ``input_embeddings``. Images that are in the prompt cache may be left out.
        counts (DraftCounts, optional): Counts drafts as the steps go.

    Yields:
        Tuple[int, mx.array, bool]: One token, a vector of log probabilities [V], and whether it was drafted.

    Raises:
        ValueError: The model has no MTP head and ``copy_drafts`` is not given, the prompt cache does not fit it, or an
          argument is out of range.
    """
    options = TextOptions(max_tokens, sampler, logits_processors, None, num_draft_tokens, copy_drafts, draft_p_min)
    mtp_model = check_model(model, options)
    check_arguments(prompt, model, prefill_step_size, max_kv_size, input_embeddings)
    options = options.resolve(mtp_model)
    cache = open_prompt_cache(model, prompt_cache)
    place_images(mtp_model, cache, images, input_embeddings is not None)
    sequence = Sequence(cache, options, counts or DraftCounts(), tokens=[*all_tokens])
    depth = depth_of(mtp_model, sequence)
    planner = Planner(mtp_model, None if depth is None else depth.times)
    if planner.exchange is not None:
        with mx.stream(stream):
            sequence.sample_with(planner.exchange.agree(prompt, cache.n_tokens, sampler))
    kv = KVOptions(kv_bits=kv_bits, kv_group_size=kv_group_size, quantized_kv_start=quantized_kv_start)
    decoder = Decoder(mtp_model, kv=kv, exchange=planner.exchange, stream=stream)
    decoder.open(sequence)
    steps = _steps(
        decoder,
        planner,
        prompt=prompt.astype(mx.uint32),
        embeddings=input_embeddings,
        chunk=prefill_step_size,
        progress=prompt_progress_callback or (lambda *_: None),
    )
    decoder.generation = weakref.ref(steps)
    yield from steps


def _steps(
    decoder: Decoder,
    planner: Planner,
    *,
    prompt: mx.array,
    embeddings: mx.array | None,
    chunk: int,
    progress: Callable[[int, int], Any],
) -> Generator[Token, None, None]:
    """The loop of one sequence."""
    (sequence,) = decoder.sequences
    try:
        with mx.stream(decoder.stream):
            prefill_prompt(decoder, prompt, embeddings, chunk, progress)
            planner.start_window(decoder)
        while sequence.end is None and sequence.max_tokens != 0:
            step = accept(decoder, planner)
            sequence.check()
            draft(decoder, planner)
            n_drafted = step.n_decided(0) - 1
            for i in range(n_drafted):  # while the device drafts
                token, logprobs = step.token(i, decoder.stream)
                step.window.kept = [2 + i]
                yield token, logprobs, True
            window = verify(decoder, planner, step)
            token, logprobs = step.token(n_drafted, decoder.stream)
            # From here on the token counts as handed over. There is no call before the yield at which an interrupt could come.
            window.kept, decoder.cache.before_pass = [1], None
            yield token, logprobs, False  # while the device verifies
    finally:
        decoder.finalize()


def accept(decoder: Decoder, planner: Planner) -> Step:
    """Accept or reject the drafts of the window in flight."""
    with mx.stream(decoder.stream):
        step = decoder.accept()
    planner.record_drafting(step)
    return step


def draft(decoder: Decoder, planner: Planner) -> None:
    """Make the drafts of the next window."""
    with mx.stream(decoder.stream):
        decoder.draft(planner.next(decoder))


def verify(decoder: Decoder, planner: Planner, step: Step | None) -> Window:
    """Roll back what was rejected, and start a pass over the next window.

    Args:
        step (Step, optional): The step before. If it had no drafts, its tokens are read while the pass runs.
    """
    with mx.stream(decoder.stream):
        decoder.roll_back()
        window = decoder.verify()
        planner.start_window(decoder)
        if step is not None:
            decoder.wait()
            planner.record_plain(step)
    return window


def prefill(prompt: mx.array, model: nn.Module, **kwargs: Any) -> None:
    """Prefill a prompt [T] into a prompt cache, as a generation of no tokens.

    Args:
        kwargs: ``prompt_cache`` and the other options of ``mtp_generate_step``.
    """
    for _ in mtp_generate_step(prompt, model, max_tokens=0, **kwargs):
        pass


def check_arguments(
    prompt: mx.array,
    model: nn.Module,
    prefill_step_size: int,
    max_kv_size: int | None,
    input_embeddings: mx.array | None,
) -> None:
    """
    Raises:
        ValueError: An argument is out of range.
    """
    if prefill_step_size < 1:
        raise ValueError(f"prefill_step_size must be 1 or more, not {prefill_step_size}.")
    if max_kv_size is not None:
        raise ValueError("max_kv_size is not supported: the caches of this model do not rotate.")
    if input_embeddings is not None:
        check_embeddings(model, len(prompt), input_embeddings)
    elif len(prompt) == 0:
        raise ValueError("Either input_embeddings or prompt (or both) must be provided.")


def check_embeddings(model: nn.Module, n_prompt: int, input_embeddings: Sized) -> None:
    """
    Raises:
        ValueError: The model does not take embeddings, or their number is not that of the prompt's tokens.
    """
    if not does_model_support_input_embeddings(model):
        raise ValueError("Model does not support input embeddings.")
    if n_prompt not in (0, len(input_embeddings)):
        raise ValueError(
            f"When providing input_embeddings, their sequence length ({len(input_embeddings)}) must match the sequence "
            f"length of the prompt ({n_prompt}), or the prompt must be empty."
        )


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
