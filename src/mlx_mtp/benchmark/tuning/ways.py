"""Whether passes are faster compiled, and handed to the device in pieces, which depends on the device and its host."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
from tqdm import tqdm

from ..parts import Timer
from ..runs import in_turn

WINDOWS = (1, 4)  # tokens: a plain step, and one with three drafts
PIECES = (4, 8)  # attention layers
N_CALLS = 5  # a round


class Way(NamedTuple):
    """As in ``DraftConfig``."""

    compiled: bool = True
    pieces: int | None = None


@contextmanager
def applied(model: Any, way: Way) -> Iterator[None]:
    """Inside, the model's passes run this way."""
    drafting = model.drafting
    before = Way(drafting.compiled, drafting.pieces)
    try:
        drafting.compiled, drafting.pieces = way
        yield
    finally:
        drafting.compiled, drafting.pieces = before


Seconds = dict[tuple[int, Way], list[float]]  # of each round, by window and way


def fastest_way(model: Any, prompt: mx.array, repeat: int) -> Way:
    """The default, unless every round of another way was faster than all of its own, in all windows behind a prompt [T]."""
    n_attention = sum(not layer.is_linear for layer in model.layers)
    ways = [Way(), Way(compiled=False), *(Way(pieces=n) for n in PIECES if n < n_attention)]
    seconds, best = time_ways(model, prompt, ways, repeat), ways[0]
    for way in ways[1:]:
        if all(max(seconds[n, way]) < min(seconds[n, best]) for n in WINDOWS):
            best = way
    return best


def time_ways(model: Any, prompt: mx.array, ways: list[Way], repeat: int) -> Seconds:
    """Time a verify pass over each window in each way, in turn; the first round is not counted."""
    timer = Timer(model, prompt, max(WINDOWS) - 1)
    seconds: Seconds = {(n, way): [] for n in WINDOWS for way in ways}
    for i in tqdm(range(repeat + 1), desc="compiled passes", disable=None):
        calls: Seconds = {kind: [] for kind in seconds}
        for j in range(N_CALLS):
            for n, way in in_turn(list(seconds), i + j):
                with applied(model, way):
                    calls[n, way].append(timer.verify(n).seconds)
                    timer.rollback(1)
        for kind, times in calls.items():
            if i > 0:
                seconds[kind].append(statistics.median(times))
    return seconds
