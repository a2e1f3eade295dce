"""The parts of a step, timed separately: the verify pass, the head's pass, the rollback.

Let V(n) be the time of a verify pass over n tokens and D the time of a pass of the head. If n steps have drafted k_1, ..., k_n
tokens and yielded N tokens, the parts allow a speed, relative to plain decoding, of

    N V(1) / sum(V(k_i + 1) + k_i D)        achieved / allowed is the efficiency of the loop

Copied drafts cost no pass of the head: their D is 0.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..caches import recurrent as caches
from ..caches.prompt_cache import PromptCache, make_prompt_cache
from ..decoding.counts import DraftCounts
from ..decoding.loop import prefill
from ..distributed.ranks import from_rank_0
from ..layers.compiled import Compiler
from ..layers.mtp import run_head
from ..pacing.depth import MAX_DRAFT_TOKENS

N_CALLS = 20  # timed calls of each part
ENOUGH = 20.0  # seconds for a part; then three calls are enough
N_ROLLBACKS = 5
# Tokens. Windows up to this length and the longest one are timed; the others are interpolated.
EVERY = MAX_DRAFT_TOKENS + 1


@dataclass
class Parts:
    """The seconds of the parts, each the median of several calls that do not overlap."""

    # V(1), V(2), ...: a backbone pass over n tokens in an open window; from 10 on but the last, on a line.
    verify: list[float]
    head: float  # D: a pass of the head over one token, with its output layer and argmax
    rollback: list[float]  # to 1, 2, ... up to 8 tokens of the longest window
    # The part of these until Python has built the graph. The rest is the wait for the device.
    verify_built: list[float] = field(default_factory=list)
    head_built: float = 0.0
    exchange: dict[int, float] = field(default_factory=dict)  # of n tokens between all ranks, over 1 token and the most
    n_exchanges: int = 0  # one after the other in a verify pass

    def seconds(self, n_steps: int, counts: DraftCounts) -> float:
        """The time of ``n_steps`` steps, with and without drafts."""
        drafted, copied = _steps(counts.drafted), _steps(counts.copied)
        seconds = (n_steps - sum(drafted) - sum(copied)) * self.verify[0]
        seconds += sum(n * (self.verify[k] + k * self.head) for k, n in enumerate(drafted, 1))
        return seconds + sum(n * self.verify[k] for k, n in enumerate(copied, 1))


def _steps(drafted: Sequence[int]) -> list[int]:
    """The number of steps with 1, 2, ... drafts, from the number of drafts by position."""
    return [n - m for n, m in pairwise([*drafted, 0])]


def time_parts(model: Any, prompt: mx.array, max_draft_tokens: int) -> Parts:
    """Time the parts of a step after a prompt [T]."""
    timer = Timer(model, prompt, max_draft_tokens)
    verify = timer.time_passes()
    rollback = timer.time_rollbacks(min(N_ROLLBACKS, len(verify[1])))
    head = timer.time_head()
    median = statistics.median
    lengths = range(1, timer.longest + 1)
    return Parts(
        np.interp(lengths, [*verify], [median(t.seconds for t in times) for times in verify.values()]).tolist(),
        median(t.seconds for t in head),
        [median(s) for s in rollback],
        np.interp(lengths, [*verify], [median(t.built for t in times) for times in verify.values()]).tolist(),
        median(t.built for t in head),
        {} if model.ranks is None else {n: timer.time_exchange(n) for n in (1, timer.longest)},
        _n_exchanges(model),
    )


def _n_exchanges(model: Any) -> int:
    """The exchanges in a pass: two in each shared layer, or in a pipeline one between stages and one with all ranks."""
    if model.ranks is None:
        return 0
    stages: int = model.model.pipeline_size
    return stages if stages > 1 else 2 * len(model.layers)


class Timer:
    """Times the parts of a step after a prompt [T], for windows of 1 to ``max_draft_tokens + 1`` tokens."""

    def __init__(self, model: Any, prompt: mx.array, max_draft_tokens: int):
        self.model, self.compiler = model, Compiler()
        entries = make_prompt_cache(model)
        prefill(prompt, model, prompt_cache=entries)
        mx.eval([c.state for c in entries])
        cache = PromptCache(entries, len(model.layers))
        self.backbone, self.head_cache, self.hidden = cache.backbone, cache.head, cache.last_hidden
        self.offset = cache.n_tokens
        self.token = prompt[None, -1:]  # [1, 1]
        self.longest = max_draft_tokens + 1
        lengths = sorted({*range(1, min(self.longest, EVERY) + 1), self.longest})
        self.windows = {n: mx.repeat(self.token, n, axis=1) for n in lengths}  # [1, n] each

    def verify(self, n: int) -> "Time":
        """Time a pass over n tokens that leaves its window open."""
        options = {"n_confirmed": 1, "compiler": self.compiler}
        return _time(lambda: self.model(self.windows[n], cache=self.backbone, return_hidden=True, **options))

    def rollback(self, n: int) -> float:
        """Time closing the window with n of its tokens kept."""

        def call() -> None:
            caches.rollback(self.backbone, self.offset, n)
            mx.eval([c.state for c in self.backbone if isinstance(c, caches.ArraysCache)])

        seconds = _timed(call)
        self.offset += n
        return seconds

    def time_passes(self) -> dict[int, list["Time"]]:
        """The times of passes, by the number of tokens.

        Lengths alternate, so that a pause of the machine affects all of them. The first round compiles and is not counted.
        """
        verify: dict[int, list[Time]] = {n: [] for n in self.windows}
        start = time.perf_counter()
        for i in range(N_CALLS + 1):
            if i > 3 and from_rank_0(self.model.ranks, lambda: time.perf_counter() - start > ENOUGH):
                break
            for n, times in verify.items():
                t = self.verify(n)
                if i > 0:
                    times.append(t)
                self.rollback(1)
        return verify

    def time_rollbacks(self, n_calls: int) -> list[list[float]]:
        """The seconds of rollbacks to 1, 2, ... up to 8 tokens of the longest window."""
        rollback: list[list[float]] = [[] for _ in range(min(self.longest, EVERY) - 1)]
        for n, seconds in enumerate(rollback, 1):
            for _ in range(n_calls):
                self.verify(self.longest)
                seconds.append(self.rollback(n))
        return rollback

    def time_head(self) -> list["Time"]:
        """The times of passes of the head over one token, without the first, which compiles."""

        assert self.hidden is not None
        hidden = self.hidden

        def build() -> mx.array:
            out = run_head(self.model, hidden, self.token, self.head_cache, compiler=self.compiler)
            return mx.argmax(self.model.draft_logits(out), axis=-1)

        times = []
        for _ in range(N_CALLS + 1):
            times.append(_time(build))
            self.head_cache.trim(1)
        return times[1:]

    def time_exchange(self, n: int) -> float:
        """The median seconds of one sum over all ranks of the hidden states of n tokens, [1, n, H]."""
        assert self.hidden is not None
        hidden = mx.repeat(self.hidden, n, axis=1)
        mx.eval(hidden)
        group = self.model.ranks.group
        calls = [lambda: mx.eval(mx.distributed.all_sum(hidden, group=group))] * (N_CALLS + 1)
        return statistics.median([_timed(call) for call in calls][1:])


class Time(NamedTuple):
    """Of a pass."""

    seconds: float
    built: float  # of these, until its graph was built


def _time(build: Callable[[], Any]) -> Time:
    start = time.perf_counter()
    out = build()
    built = time.perf_counter()
    mx.eval(out)
    return Time(time.perf_counter() - start, built - start)


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
