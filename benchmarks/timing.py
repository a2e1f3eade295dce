"""Runs that alternate, so that a machine that slows down slows all of them, and their figures."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
from mlx_lm.generate import generation_stream
from tqdm import tqdm

from mlx_mtp.cli.display import in_turn

K = TypeVar("K")
V = TypeVar("V")


class Seconds(NamedTuple):
    wall: float
    cpu: float  # of this process


def take_turns(runs: Mapping[K, Callable[[], V]], repeat: int, desc: str = "") -> dict[K, list[V]]:
    """What each run returns in each round; every round begins with another run."""
    results: dict[K, list[V]] = {run: [] for run in runs}
    for i in tqdm(range(repeat), desc=desc, disable=None, leave=False):
        for run in in_turn(list(runs), i):
            results[run].append(runs[run]())
    return results


def time_in_turns(runs: Mapping[K, Iterator[Any]], turn: int, n_turns: int) -> dict[K, Seconds]:
    """The time of ``n_turns`` turns of as many tokens, of generators that are open at once in this process."""
    total = dict.fromkeys(runs, Seconds(0.0, 0.0))
    for i in range(n_turns):
        for run in in_turn(list(runs), i):
            mx.synchronize(generation_stream)
            start = Seconds(time.perf_counter(), time.process_time())
            for _ in islice(runs[run], turn):
                pass
            mx.synchronize(generation_stream)  # what has begun of the next token is this run's work
            end = Seconds(time.perf_counter(), time.process_time())
            total[run] = Seconds(*(t + b - a for t, a, b in zip(total[run], start, end)))
    return total


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratios(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Of two runs, in each round."""
    return [x / y for x, y in zip(a, b)]


def spread(values: Sequence[float]) -> str:
    """The median, and the lowest and the highest."""
    return f"{statistics.median(values):.3f} ({min(values):.2f} to {max(values):.2f})"
