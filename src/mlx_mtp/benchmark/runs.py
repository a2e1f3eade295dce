"""Runs that are timed: plain ``mlx_lm`` generation and MTP, on the same prompts, greedy, so many tokens, whatever they are."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from ..decoding.depth import Depth
from ..decoding.loop import mtp_generate_step
from ..decoding.pace import DraftCounts

PLAIN, AUTO = "plain", "auto"
Arm = int | str  # a fixed depth, AUTO or PLAIN


@dataclass
class Generation:
    tokens: list[int]
    first_token: float  # seconds, from the start
    seconds: float  # from the first token to the last
    peak_memory: float  # GB
    counts: DraftCounts


def generate(
    model, prompt: mx.array, max_tokens: int, arm: Arm | Depth, draft_p_min: float | None = None
) -> Generation:
    """One run of one arm."""
    counts = DraftCounts()
    steps: Any
    if arm == PLAIN:
        steps = generate_step(prompt, model, max_tokens=max_tokens)
    else:
        options: Any = {"num_draft_tokens": arm, "draft_p_min": draft_p_min}
        steps = mtp_generate_step(prompt, model, max_tokens=max_tokens, counts=counts, **options)
    mx.clear_cache()
    mx.reset_peak_memory()
    tokens: list[int] = []
    start = first = time.perf_counter()
    for token, *_ in steps:
        if not tokens:
            first = time.perf_counter()
        tokens.append(token)
    end = time.perf_counter()
    return Generation(tokens, first - start, end - first, mx.get_peak_memory() / 1e9, counts)


def in_turn(arms: Sequence[Any], i: int) -> list[Any]:
    """The arms of turn i: another goes first each time."""
    i %= len(arms)
    return [*arms[i:], *arms[:i]]


def sum_counts(every: Sequence[DraftCounts]) -> DraftCounts:
    n = max(len(c.drafted) for c in every)
    drafted, accepted = (
        [sum(values) for values in zip(*([*v, *[0] * (n - len(v))] for v in of))]
        for of in ([c.drafted for c in every], [c.accepted for c in every])
    )
    return DraftCounts(drafted, accepted)


def check_sizes(max_tokens: int, repeat: int) -> None:
    if max_tokens < 2:
        raise ValueError(f"max_tokens must be 2 or more, not {max_tokens}: time is taken from the first token on.")
    if repeat < 1:
        raise ValueError(f"repeat must be 1 or more, not {repeat}.")
