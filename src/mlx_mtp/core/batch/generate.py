"""``batch_generate``: mlx-lm's, with drafts."""

import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import BatchResponse as StockResponse
from mlx_lm.sample_utils import LogitsProcessor, Sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.counts import DraftCounts
from ..drafts.options import TextOptions
from ..models.mixin import n_ids
from .generator import BatchGenerator, Response
from .ids import TokenIds, each_prompt


@dataclass
class BatchResponse(StockResponse):
    """
    mlx-lm's response, with the drafts of each prompt.

    Args:
        counts (List[DraftCounts]): Drafts made and accepted for each prompt, by position in the window.
        errors (List[Optional[Exception]]): The exception of a prompt's sampler or logits processor, which stops only this
          prompt's text.
    """

    counts: list[DraftCounts] = field(default_factory=list)
    errors: list[Exception | None] = field(default_factory=list)


def batch_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompts: Iterable[TokenIds] | TokenIds,
    prompt_caches: list[list[Any]] | None = None,
    max_tokens: int | list[int] | None = None,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    samplers: Sequence[Sampler | None] | None = None,
    logits_processors: Sequence[LogitsProcessor] | Sequence[Sequence[LogitsProcessor]] | None = None,
    **kwargs: Any,
) -> BatchResponse:
    """
    Generate responses for the given batch of prompts, as mlx-lm's ``batch_generate``, with drafts by the model's MTP head.

    Each prompt accepts or rejects its own drafts, so its text is that of a single run.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``.
        tokenizer (PreTrainedTokenizer): The tokenizer.
        prompts (List[List[int]]): The token ids of the input prompts, each as for ``mtp_generate_step``, or a ``BatchEncoding``
          of transformers without padding.
        prompt_caches (List[List[Any]], optional): Pre-computed prompt caches for each input prompt, of
          ``mlx_mtp.make_prompt_cache`` or of mlx-lm. As in mlx-lm, they are not updated in place.
        max_tokens (Union[int, List[int]], optional): Maximum number of output tokens, of all or of each prompt. Default:
          ``None``, that of ``options``, or ``128``.
        verbose (bool): If ``True``, print timing information. Default: ``False``.
        return_prompt_caches (bool): Return the prompt caches in the response. Default: ``False``.
        return_token_ids (bool): Return the generated token IDs in the response. Default: ``False``.
        return_logprobs (bool): Return the log-probability of each generated token. Default: ``False``.
        samplers (List[Sampler], optional): A sampler for each prompt. Default: ``None``, ``sampler`` for all.
        logits_processors (List, optional): Logits processors for all prompts, or a list of them for each. Objects with state
          must not be shared. Default: ``None``.
        kwargs: The remaining options get passed to :obj:`BatchGenerator`, such as ``sampler`` and ``num_draft_tokens``. Stop
          tokens or sequences among them replace the tokenizer's ends of text.

    Returns:
        BatchResponse: mlx-lm's response, with the drafts made and accepted for each prompt.

    Raises:
        MTPError: The model has no MTP head, a prompt is empty or no token ids of the model, a cache does not fit, or an option
          is out of range.
    """
    prompts = each_prompt(prompts)
    n = len(prompts)
    n_model = n_ids(model)
    kwargs = {"max_token_gap": math.inf, "min_decode_share": 0.0, **kwargs}  # no client waits for single tokens
    options = kwargs.get("options") or TextOptions()
    if kwargs.get("stop_sequences", options.stop_sequences) is None:
        kwargs.setdefault("stop_tokens", [[t] for t in tokenizer.eos_token_ids if 0 <= t < n_model])
    with closing(BatchGenerator(model, return_prompt_caches=return_prompt_caches, **kwargs)) as generator:
        uids = generator.insert(
            prompts,
            max_tokens=max_tokens if isinstance(max_tokens, Sequence | None) else [max_tokens] * n,
            caches=prompt_caches,
            samplers=samplers,
            logits_processors=_of_each(logits_processors, n),
        )
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        logprobs: dict[int, list[float]] = {uid: [] for uid in uids}
        last: dict[int, Response] = {}
        with generator.stats() as stats:
            _report(verbose, 0, n)
            while responses := generator.next_generated():
                for r in responses:
                    if r.finish_reason is not None:
                        last[r.uid] = r
                        _report(verbose, len(last), n)
                    if r.logprobs is not None and r.finish_reason != "stop":
                        tokens[r.uid].append(r.token)
                        if return_logprobs:
                            logprobs[r.uid].append(r.logprobs[r.token].item())
    counts = [last[uid].counts for uid in uids]
    if verbose:
        print(f"[batch_generate] Finished processing {n}/{n}")
        _print_stats(stats, counts)
    return BatchResponse(
        [tokenizer.decode(tokens[uid]) for uid in uids],
        stats,
        [last[uid].prompt_cache for uid in uids] if return_prompt_caches else None,
        [tokens[uid] for uid in uids] if return_token_ids else None,
        [logprobs[uid] for uid in uids] if return_logprobs else None,
        counts,
        [last[uid].error for uid in uids],
    )


def _of_each(processors: Sequence[Any] | None, n: int) -> list[list[LogitsProcessor]] | None:
    """The logits processors of each of n prompts."""
    if not processors:
        return None
    if any(callable(p) for p in processors):
        return [list(processors)] * n
    return [list(p or ()) for p in processors]


def _report(verbose: bool, n_finished: int, n: int) -> None:
    if verbose:
        print(f"[batch_generate] Finished processing {n_finished}/{n} ...", end="\r")


def _print_stats(stats: Any, counts: list[DraftCounts]) -> None:
    drafted, accepted = sum(c.n_drafted for c in counts), sum(c.n_accepted for c in counts)
    print(f"[batch_generate] Prompt: {stats.prompt_tokens} tokens, {stats.prompt_tps:.3f} tokens-per-sec")
    print(f"[batch_generate] Generation: {stats.generation_tokens} tokens, {stats.generation_tps:.3f} tokens-per-sec")
    print(f"[batch_generate] Drafts: {drafted} tokens, {accepted} accepted")
    print(f"[batch_generate] Peak memory: {stats.peak_memory:.3f} GB")
