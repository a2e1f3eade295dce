"""Timed runs: plain mlx-lm and MTP at each depth, greedy, on the same prompts, with no token that stops."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.generate import generate_step

from ..decoding.depth import Depth
from ..decoding.loop import CopyDrafts, mtp_generate_step
from ..decoding.pace import DraftCounts

PLAIN, AUTO = "plain", "auto"
Run = int | str  # a fixed depth, AUTO or PLAIN
T = TypeVar("T")


@dataclass
class Generation:
    """What one run on one prompt yielded, and its times."""

    tokens: list[int]
    first_token: float  # seconds from the start
    seconds: float  # from the first token to the last
    peak_memory: float  # GB
    counts: DraftCounts


def generate(
    model: Any,
    prompt: mx.array,
    max_tokens: int,
    run: Run | Depth,
    draft_p_min: float | None = None,
    copy_drafts: CopyDrafts | None = None,
) -> Generation:
    """Time one run on one prompt, [T]."""
    counts = DraftCounts()
    steps: Iterable[tuple[int, Any] | tuple[int, Any, bool]]
    if run == PLAIN:
        steps = generate_step(prompt, model, max_tokens=max_tokens)
    else:
        options: dict[str, Any] = {"num_draft_tokens": run, "draft_p_min": draft_p_min, "copy_drafts": copy_drafts}
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


def in_turn(runs: Sequence[T], i: int) -> list[T]:
    """The runs in the order of turn i: each turn begins with another."""
    i %= len(runs)
    return [*runs[i:], *runs[:i]]


def sum_counts(counts: Sequence[DraftCounts]) -> DraftCounts:
    return DraftCounts(
        _sum_columns([c.drafted for c in counts]),
        _sum_columns([c.accepted for c in counts]),
        _sum_columns([c.copied for c in counts]),
        _sum_columns([c.copies_accepted for c in counts]),
    )


def _sum_columns(rows: Sequence[Sequence[int]]) -> list[int]:
    width = max(map(len, rows))
    return [sum(row[i] for row in rows if i < len(row)) for i in range(width)]


def check_sizes(max_tokens: int, repeat: int) -> None:
    if max_tokens < 2:
        raise ValueError(f"max_tokens must be 2 or more, not {max_tokens}: times start at the first token.")
    if repeat < 1:
        raise ValueError(f"repeat must be 1 or more, not {repeat}.")
