"""Ways to run passes: compiled, submitted to the device in pieces, and with attention over a window in groups of rows.

The fastest way depends on the device and its host.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
from tqdm import tqdm

from ..caches import recurrent
from ..caches.prompt_cache import PromptCache, make_prompt_cache
from ..decoding.loop import prefill
from ..layers.attention import fused_queries
from ..layers.compiled import Compiler
from .runs import in_turn

WINDOWS = (1, 4)  # tokens: a plain step, and one with three drafts
PIECES = (4, 8)  # attention layers
CONTEXT = 4096  # tokens before the windows in which attention is timed
LONG_WINDOWS = (9, 17)  # tokens: eight drafts, the most of the head, and twice as many
N_CALLS = 4  # a round


class Way(NamedTuple):
    """As in ``DraftConfig``."""

    compiled: bool = True
    pieces: int | None = None
    attention_rows: int | None = None


Seconds = dict[tuple[int, Way], list[float]]  # of each round, by window and way


@contextmanager
def applied(model: Any, way: Way) -> Iterator[None]:
    """A context in which the model's passes run this way."""
    drafting = model.drafting
    before = Way(drafting.compiled, drafting.pieces, drafting.attention_rows)
    try:
        drafting.compiled, drafting.pieces, drafting.attention_rows = way
        yield
    finally:
        drafting.compiled, drafting.pieces, drafting.attention_rows = before


def fastest_way(model: Any, prompt: mx.array, repeat: int) -> Way:
    """The fastest way after a prompt [T].

    First the ways are compared over short windows. Then attention in groups of as many rows as MLX's fused attention takes is
    compared with attention over all rows, after the prompt repeated up to ``CONTEXT`` tokens.
    """
    n_attention = sum(not layer.is_linear for layer in model.layers)
    others = [Way(compiled=False), *(Way(pieces=n) for n in PIECES if n < n_attention)]
    best = _fastest(model, prompt, WINDOWS, [Way(), *others], repeat)
    (head,) = model.mtp.layers
    grouped = best._replace(attention_rows=fused_queries(head.self_attn))
    long_prompt = mx.tile(prompt, -(-CONTEXT // prompt.size))[:CONTEXT]
    return _fastest(model, long_prompt, LONG_WINDOWS, [best, grouped], repeat)


def _fastest(model: Any, prompt: mx.array, windows: Sequence[int], ways: Sequence[Way], repeat: int) -> Way:
    """The first way, unless every round of another way was faster than all of its rounds, for all windows."""
    seconds, best = time_ways(model, prompt, windows, ways, repeat), ways[0]
    for way in ways[1:]:
        if all(max(seconds[n, way]) < min(seconds[n, best]) for n in windows):
            best = way
    return best


def time_ways(model: Any, prompt: mx.array, windows: Sequence[int], ways: Sequence[Way], repeat: int) -> Seconds:
    """Time a verify pass over each window in each way, alternating. The first round is not counted."""
    timer = Timer(model, prompt)
    seconds: Seconds = {(n, way): [] for n in windows for way in ways}
    for i in tqdm(range(repeat + 1), desc=f"passes over {max(windows)} tokens", disable=None):
        calls: Seconds = {kind: [] for kind in seconds}
        for j in range(N_CALLS):
            for n, way in in_turn(list(seconds), i + j):
                with applied(model, way):
                    calls[n, way].append(timer.verify(n))
        for kind, times in calls.items():
            if i > 0:
                seconds[kind].append(statistics.median(times))
    return seconds


class Timer:
    """Times passes over several tokens after a prompt [T]."""

    def __init__(self, model: Any, prompt: mx.array):
        self.model, self.compiler = model, Compiler()
        entries = make_prompt_cache(model)
        prefill(prompt, model, prompt_cache=entries)
        mx.eval([c.state for c in entries])
        cache = PromptCache(entries, len(model.layers))
        self.backbone, self.n_tokens, self.token = cache.backbone, cache.n_tokens, prompt[None, -1:]  # [1, 1]

    def verify(self, n: int) -> float:
        """The seconds of a pass over n tokens, of which the first is kept."""
        window = mx.repeat(self.token, n, axis=1)  # [1, n]
        options = {"return_hidden": True, "n_confirmed": 1, "compiler": self.compiler}
        start = time.perf_counter()
        mx.eval(self.model(window, cache=self.backbone, **options))
        seconds = time.perf_counter() - start
        recurrent.rollback(self.backbone, self.n_tokens, 1)
        mx.eval([c.state for c in self.backbone if isinstance(c, recurrent.ArraysCache)])
        self.n_tokens += 1
        return seconds
