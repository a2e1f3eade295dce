"""Whether attention over a window is faster in groups of rows, which depends on the device: see ``layers/attention.py``."""

import statistics
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from ..layers.attention import fused_queries
from .parts import Timer
from .runs import in_turn

CONTEXT = 4096  # tokens before the windows
WINDOWS = (9, 17)  # tokens: eight drafts, the most of the head, and twice as many
N_CALLS = 3  # a round
Seconds = dict[tuple[int, int | None], list[float]]  # of each round, by window and rows


def fastest_rows(model: Any, prompt: mx.array, repeat: int) -> int | None:
    """Measure windows behind a prompt [T], repeated up to ``CONTEXT`` tokens.

    Returns:
        Optional[int]: The rows that MLX's fused attention takes, if groups of as many are faster; ``None`` if not.
    """
    (head,) = model.mtp.layers
    rows = fused_queries(head.self_attn)
    seconds = time_windows(model, mx.tile(prompt, -(-CONTEXT // prompt.size))[:CONTEXT], rows, repeat)
    return rows if all(max(seconds[n, rows]) < min(seconds[n, None]) for n in WINDOWS) else None


def time_windows(model: Any, prompt: mx.array, rows: int, repeat: int) -> Seconds:
    """Time a verify pass over each window, whole and in groups of ``rows``, in turn; the first round is not counted."""
    timer = Timer(model, prompt, max(WINDOWS) - 1)
    seconds: Seconds = {(n, r): [] for n in WINDOWS for r in (None, rows)}
    try:
        for i in tqdm(range(repeat + 1), desc="attention in groups of rows", disable=None):
            calls: Seconds = {kind: [] for kind in seconds}
            for j in range(N_CALLS):
                for n, r in in_turn(list(seconds), i + j):
                    model.drafting.attention_rows = r
                    calls[n, r].append(timer.verify(n).seconds)
                    timer.rollback(1)
            for kind, times in calls.items():
                if i > 0:
                    seconds[kind].append(statistics.median(times))
    finally:
        model.drafting.attention_rows = None
    return seconds
