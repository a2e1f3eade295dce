"""Timed runs: plain mlx-lm and MTP, greedy, on the same prompts. The name of a run has the source of its drafts:

plain              none: mlx-lm's own generation
no drafts          none: the gain of compiled passes
1, 2, ...          the head, this many tokens in every step
auto, no copies    the head, the fastest number of tokens
copies alone       copies of the text, without the head
auto               the head or copies, whichever is faster
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream

from ..decoding.counts import DraftCounts
from ..decoding.loop import mtp_generate_step
from ..drafts.sources import N_GRAM
from ..pacing.depth import Depth

PLAIN, NO_DRAFTS, NO_COPIES, COPIES, AUTO = "plain", "no drafts", "auto, no copies", "copies alone", "auto"
Run = int | str  # a fixed depth, or one of these
# The source of a token: an accepted draft of the head, an accepted copy, or the target's own choice. Each pass has one choice
# of the target: the token of a plain step, or the token after the accepted drafts.
HEAD, COPY, TARGET = "head", "copy", "target"
T = TypeVar("T")


@dataclass
class Generation:
    """The tokens of one run on one prompt, and its times."""

    tokens: list[int]
    origins: list[str]  # of each token
    first_token: float  # seconds from the start
    seconds: float  # from the first token to the last
    peak_memory: float  # GB
    counts: DraftCounts

    @property
    def n_timed(self) -> int:
        """The number of timed tokens: all but the first."""
        return len(self.tokens) - 1

    @property
    def n_steps(self) -> int:
        """The number of passes that yielded them. The last pass has no token of the target if the text ends with a draft."""
        return self.origins[1:].count(TARGET) + (self.origins[-1] != TARGET)


def generate(
    model: Any,
    prompt: mx.array,
    max_tokens: int,
    run: Run,
    depth: Depth | None = None,
    *,
    stop: Collection[int] = (),
    draft_p_min: float | None = None,
) -> Generation:
    """Time one run on one prompt, [T].

    Args:
        depth (Depth, optional): The depth of auto. Default: ``None``, the model's own.
        stop (Collection[int]): Tokens that end the text. Default: none.

    Raises:
        ValueError: The text ends with its first token.
    """
    counts = DraftCounts()
    steps: Any
    if run == PLAIN:
        steps = generate_step(prompt, model, max_tokens=max_tokens)
    else:
        options: dict[str, Any] = {"num_draft_tokens": _n_drafts(run, depth), "draft_p_min": draft_p_min}
        options["copy_drafts"] = "auto" if run in (AUTO, COPIES) else "off"
        steps = mtp_generate_step(prompt, model, max_tokens=max_tokens, counts=counts, **options)
    mx.clear_cache()
    mx.reset_peak_memory()
    tokens: list[int] = []
    marks: list[tuple[bool, int]] = []  # whether a token was drafted, and the number of copying steps so far
    start = first = time.perf_counter()
    for token, _, *drafted in steps:
        if not tokens:
            first = time.perf_counter()
        tokens.append(token)
        marks.append((drafted == [True], sum(counts.copied[:1])))
        if token in stop:
            break
    end = time.perf_counter()
    steps.close()
    mx.synchronize(generation_stream)  # finish the pass in flight, which is not part of the next run
    if len(tokens) < 2:
        raise ValueError(f"The model ends its text at once on a prompt of {prompt.size} tokens: leave this prompt out.")
    return Generation(tokens, _origins(marks), first - start, end - first, mx.get_peak_memory() / 1e9, counts)


def _n_drafts(run: Run, depth: Depth | None) -> Any:
    """``num_draft_tokens`` of a run."""
    if isinstance(run, int):
        return run
    return 0 if run in (NO_DRAFTS, COPIES) else depth or "auto"


def _origins(marks: Sequence[tuple[bool, int]]) -> list[str]:
    """The source of each token. A step yields its drafts, which have one source, and then the target's token."""
    origins, n_before = [], 0  # steps that had copied before this step
    for drafted, n_copying in marks:
        origins.append(TARGET if not drafted else COPY if n_copying > n_before else HEAD)
        if not drafted:
            n_before = n_copying
    return origins


def speed(generations: Sequence[Generation]) -> float:
    """Tokens per second of several generations, whose texts may differ in length after a difference by rounding."""
    return sum(g.n_timed for g in generations) / sum(g.seconds for g in generations)


def in_turn(runs: Sequence[T], i: int) -> list[T]:
    """The runs in the order of turn i: each turn begins with another run."""
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


def repeated_share(prompt: Sequence[int], text: Sequence[int]) -> float:
    """The share of a generated text that could be copied from itself but not from its prompt.

    A token counts if it and the tokens before it, as many as a copy must match, occur earlier in the text, but not in the
    prompt. The share depends only on the tokens, not on their source. In a loop, all tokens after the first repetition count.
    """
    known, seen, n = set(_n_grams(prompt)), set(), 0
    for n_gram in _n_grams(text):
        n += n_gram in seen and n_gram not in known
        seen.add(n_gram)
    return n / len(text)


def _n_grams(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[i:] for i in range(N_GRAM + 1))))


def check_sizes(max_tokens: int, repeat: int) -> None:
    if max_tokens < 2:
        raise ValueError(f"max_tokens must be 2 or more, not {max_tokens}: times start at the first token.")
    if repeat < 1:
        raise ValueError(f"repeat must be 1 or more, not {repeat}.")
