"""``generate`` and ``stream_generate``: mlx-lm's text generation, with the MTP head."""

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse as StockResponse
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.generate import stream_generate as plain_stream_generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.loop import mtp_generate_step
from ..decoding.pace import DraftCounts, NumDraftTokens


@dataclass
class GenerationResponse(StockResponse):
    """
    mlx-lm's response, and what became of the drafts so far.

    Args:
        drafted (Tuple[int, ...]): The number of drafts made, by position in the window.
        accepted (Tuple[int, ...]): The number of them that stood.
    """

    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens that a verify pass with drafts has yielded."""
        return 1 + sum(self.accepted) / self.drafted[0] if self.drafted else 1.0


def stream_generate(
    model: nn.Module,
    tokenizer,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    *,
    mtp: bool = True,
    num_draft_tokens: NumDraftTokens | None = None,
    draft_p_min: float | None = None,
    exact: bool = False,
    **kwargs,
) -> Generator[GenerationResponse, None, None]:
    """
    A generator producing text based on the given prompt from the model, as mlx-lm's ``stream_generate``.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``.
        tokenizer (PreTrainedTokenizer): The tokenizer.
        prompt (Union[str, mx.array, List[int]]): The input prompt string or integer tokens.
        max_tokens (int): The maximum number of tokens to generate. Default: ``256``.
        draft_model (Optional[nn.Module]): A draft model for mlx-lm's speculative decoding; not together with ``mtp``.
        mtp (bool): Draft with the model's own MTP head; ``False`` is plain mlx-lm. Default: ``True``.
        num_draft_tokens (Union[int, str], optional): The number of tokens to draft in a step, 0 to 8, or ``"auto"``, chosen
          at every step for speed. Default: ``None``, which is that of the settings, or ``"auto"``.
        draft_p_min (float, optional): Stop drafting where the head gives no token this probability. Default: ``None``, which
          is that of the settings, or ``0.0``.
        exact (bool): Verify with the very operations of plain decoding, at its price: see ``models/exact.py``.
          Default: ``False``.
        kwargs: The remaining options get passed to :func:`mtp_generate_step`, those of mlx-lm's ``generate_step``.

    Yields:
        GenerationResponse: mlx-lm's, with the drafts made and accepted.
    """
    if not mtp:
        if exact or draft_p_min:
            raise ValueError("exact and draft_p_min are of MTP: leave them out, or draft with the MTP head.")
        if draft_model is not None and num_draft_tokens is not None:
            kwargs["num_draft_tokens"] = num_draft_tokens
        for r in plain_stream_generate(model, tokenizer, prompt, max_tokens, draft_model, stream, **kwargs):
            yield GenerationResponse(**vars(r))
        return
    if draft_model is not None:
        raise ValueError("A draft model and the MTP head cannot draft together: leave out one of draft_model and mtp.")
    if max_tokens == 0:
        raise ValueError("Maximum number of tokens must be non-zero (use -1 for no limit).")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    if not isinstance(prompt, mx.array):
        if isinstance(prompt, str):
            add_special_tokens = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
            prompt = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        prompt = mx.array(prompt)  # type: ignore[arg-type]

    detokenizer = tokenizer.detokenizer
    counts = DraftCounts()
    steps = mtp_generate_step(
        prompt,
        model,
        stream,
        max_tokens=max_tokens,
        num_draft_tokens=num_draft_tokens,
        draft_p_min=draft_p_min,
        exact=exact,
        counts=counts,
        **kwargs,
    )

    def response(finish_reason: str | None = None) -> GenerationResponse:
        return GenerationResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=logprobs,
            from_draft=from_draft,
            prompt_tokens=prompt.size,
            prompt_tps=prompt.size / prompt_time,
            generation_tokens=n,
            generation_tps=n / (time.perf_counter() - tic),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish_reason,
            drafted=tuple(counts.drafted),
            accepted=tuple(counts.accepted),
        )

    with wired_limit(model, [stream]):
        tic = time.perf_counter()
        # Closed before the last response, so that the prompt cache is then that of the tokens yielded.
        with closing(steps):
            for n, (token, logprobs, from_draft) in enumerate(steps, start=1):  # noqa: B007 (response reads them)
                if n == 1:
                    prompt_time = time.perf_counter() - tic
                    tic = time.perf_counter()
                if token in tokenizer.eos_token_ids:
                    break
                detokenizer.add_token(token)
                if n == max_tokens:
                    break
                yield response()

        detokenizer.finalize()
        yield response("stop" if token in tokenizer.eos_token_ids else "length")


def generate(
    model: nn.Module,
    tokenizer,
    prompt: str | list[int],
    verbose: bool = False,
    **kwargs,
) -> str:
    """
    Generate a complete response from the model, as mlx-lm's ``generate``.

    Args:
       model (nn.Module): A model of ``mlx_mtp.load``.
       tokenizer (PreTrainedTokenizer): The tokenizer.
       prompt (Union[str, List[int]]): The input prompt string or integer tokens.
       verbose (bool): If ``True``, print tokens and timing information. Default: ``False``.
       kwargs: The remaining options get passed to :func:`stream_generate`.
    """
    if verbose:
        print("=" * 10)
    text = ""
    for r in stream_generate(model, tokenizer, prompt, **kwargs):
        if verbose:
            print(r.text, end="", flush=True)
        text += r.text
    if verbose:
        print()
        print("=" * 10)
        if len(text) == 0:
            print("No text generated for this prompt")
            return text
        print(f"Prompt: {r.prompt_tokens} tokens, {r.prompt_tps:.3f} tokens-per-sec")
        print(f"Generation: {r.generation_tokens} tokens, {r.generation_tps:.3f} tokens-per-sec")
        print(f"Peak memory: {r.peak_memory:.3f} GB")
        if kwargs.get("mtp", True):
            rates = ", ".join(f"{a / d:.3f}" for a, d in zip(r.accepted, r.drafted))
            drafts = f"{rates} accepted by position" if rates else "none"
            print(f"Drafts: {drafts}, {r.tokens_per_step:.3f} tokens-per-step")
    return text
