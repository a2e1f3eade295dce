"""``mlx_mtp generate --mtp --check``: compare MTP's greedy tokens with plain mlx-lm's, and distinguish rounding from bugs.

MTP computes the same function as plain decoding, but feeds the model several tokens at a time, and MLX's kernels may round
differently for several rows. So the two may choose differently where two logits are nearly equal, and nowhere else.

How far rounding moves the logits is measured at the very position that differs, with no draft, no rejection and no rollback:
mlx-lm's own forward runs over the same tokens with mlx-lm's own caches, once one by one (plain decoding) and once in the
longest windows that MTP may verify; and they run one by one through compiled layers, whose fused operations round otherwise on
some devices. Let r be the largest difference from plain decoding in any logit. Two logits that each move by at most r can
change places only if they are at most 2 r apart. A difference is *within rounding* when plain decoding's logits of the two
tokens are at most 2 r apart. MTP's own logits have no part in this: a wrong state can move them by any amount, and would excuse
itself. In exact mode both sides run the same operations, and r is 0.
"""

import copy
from collections.abc import Collection, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, generate_step, generation_stream, maybe_quantize_kv_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding.loop import mtp_generate_step, plain_generate_step
from ..drafts.options import CopyDrafts, NumDraftTokens, resolve

T = TypeVar("T")


@dataclass
class Difference:
    """The first token that differs."""

    position: int  # among the generated tokens, from 0
    plain: int
    mtp: int
    top_gap: float  # between the two largest logits of plain decoding
    gap: float  # between its logits of the two tokens
    rounding: float  # r: the most that rounding moves a logit

    @property
    def within_rounding(self) -> bool:
        return self.gap <= 2 * self.rounding


@dataclass
class Check:
    """The outcome of ``check``."""

    n_tokens: int  # that both generated alike
    difference: Difference | None = None

    @property
    def passed(self) -> bool:
        return self.difference is None or self.difference.within_rounding

    def report(self, tokenizer: TokenizerWrapper) -> str:
        """A few lines for people."""
        d = self.difference
        if d is None:
            return f"Identical: plain decoding and MTP generated the same {self.n_tokens} tokens."
        plain, mtp = (f"{t} ({tokenizer.decode([t])!r})" for t in (d.plain, d.mtp))
        verdict = "within rounding" if d.within_rounding else "NOT within rounding: a bug in MTP or mlx-lm"
        return (
            f"Different at token {d.position}, after {d.position} equal tokens: plain {plain}, MTP {mtp}.\n"
            f"Plain decoding's logits of the two are {d.gap:.4g} apart, its top two logits {d.top_gap:.4g}.\n"
            f"Rounding moves a logit there by up to {d.rounding:.4g}, so two can change places when they are up to "
            f"{2 * d.rounding:.4g} apart.\n"
            f"The difference is {verdict}."
        )


def check(
    model: nn.Module,
    prompt: mx.array,
    *,
    max_tokens: int = 256,
    num_draft_tokens: NumDraftTokens | None = None,
    copy_drafts: CopyDrafts | None = None,
    draft_p_min: float | None = None,
    exact: bool = False,
    stop_tokens: Collection[int] = (),
    prompt_cache: list[Any] | None = None,
    **options: Any,
) -> Check:
    """Generate greedily with plain mlx-lm and with MTP, side by side, until a token differs.

    Args:
        prompt (mx.array): The input prompt, [T].
        stop_tokens (Collection[int]): Tokens that end the text.
        prompt_cache (List[Any], optional): A prompt cache for both; it is left unchanged.
        options: ``input_embeddings``, ``prefill_step_size``, ``kv_bits``, ``kv_group_size`` and ``quantized_kv_start``; all
          others are as in ``mtp_generate_step``.
    """
    if max_tokens == 0:
        raise ValueError("Maximum number of tokens must be non-zero (use -1 for no limit).")
    recent: dict[int, mx.array] = {}  # plain decoding's logits, [V], by the position of the generated token

    def keep(tokens: mx.array, logits: mx.array) -> mx.array:
        n = len(tokens) - len(prompt)
        recent[n] = logits[0]
        recent.pop(n - 2, None)  # mlx-lm runs one token ahead
        return logits

    plain = plain_generate_step(
        prompt,
        model,
        max_tokens=max_tokens,
        prompt_cache=_backbone_caches(model, prompt_cache),
        logits_processors=[keep],
        **options,
    )
    mtp = mtp_generate_step(
        prompt,
        model,
        max_tokens=max_tokens,
        num_draft_tokens=num_draft_tokens,
        copy_drafts=copy_drafts,
        draft_p_min=draft_p_min,
        exact=exact,
        prompt_cache=copy.deepcopy(prompt_cache),
        **options,
    )
    with closing(plain), closing(mtp):
        same, pair = _compare(plain, mtp, stop_tokens)
    mx.synchronize(generation_stream)  # plain decoding leaves a pass in flight
    if pair is None:
        return Check(len(same))
    row = recent[len(same)].astype(mx.float32)
    rounding = 0.0  # the token after the prompt comes from one pass in both
    if same and not exact:
        size = 1 + resolve(model, num_draft_tokens, copy_drafts).most
        sizes = {size, 1} if model.drafting.compiled else {size}  # one by one they are compiled
        for n in sizes:
            caches = _prefilled(model, prompt, prompt_cache, options)
            rounding = max(rounding, float(mx.abs(row - _run_in_windows(model, caches, same, n, **options)).max()))
    return Check(len(same), _difference(len(same), row, *pair, rounding))


def _difference(position: int, row: mx.array, plain: int, mtp: int, rounding: float) -> Difference:
    """The difference of two tokens by plain decoding's logits, [V]."""
    top = mx.sort(row)[-2:]
    return Difference(position, plain, mtp, float(top[1] - top[0]), float(row[plain] - row[mtp]), rounding)


def _compare(
    plain: Iterable[tuple[int, mx.array]], mtp: Iterable[tuple[int, mx.array, bool]], stop_tokens: Collection[int]
) -> tuple[list[int], tuple[int, int] | None]:
    """The tokens that are the same, and the first pair that differs."""
    same: list[int] = []
    for (a, *_), (b, *_) in zip(plain, mtp):
        if a != b:
            return same, (a, b)
        same.append(a)
        if a in stop_tokens:
            break
    return same, None


def _backbone_caches(model: nn.Module, prompt_cache: list[Any] | None) -> list[Any]:
    """Copies of the caches that plain mlx-lm uses. Where images are, it reads in the last entry."""
    return model.make_cache() if prompt_cache is None else copy.deepcopy(prompt_cache)


def _prefilled(
    model: nn.Module, prompt: mx.array, prompt_cache: list[Any] | None, options: dict[str, Any]
) -> list[Any]:
    """Plain mlx-lm's caches after the prompt."""
    caches = _backbone_caches(model, prompt_cache)
    for _ in generate_step(prompt, model, prompt_cache=caches, max_tokens=0, **options):
        pass
    return caches


def _run_in_windows(
    model: nn.Module,
    caches: list[Any],
    tokens: list[int],
    size: int,
    *,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    **_: Any,
) -> mx.array:
    """Plain mlx-lm's logits [V] after these tokens, behind those in the caches, fed ``size`` at a time."""
    # The last window is filled up with its last token, which the tokens before it do not see.
    n_filled = -len(tokens) % size
    filled = mx.array(tokens + tokens[-1:] * n_filled)
    with mx.stream(generation_stream):
        for window in mx.split(filled, filled.size // size):  # [size]
            maybe_quantize_kv_cache(caches, quantized_kv_start, kv_group_size, kv_bits)
            logits: mx.array = model(window[None], cache=caches)  # [1, size, V]
            mx.eval(logits, [c.state for c in caches])
    return logits[0, size - 1 - n_filled].astype(mx.float32)
