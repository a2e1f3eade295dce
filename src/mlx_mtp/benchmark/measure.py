"""MTP against mlx-lm's own generation: greedy runs that alternate on the same prompts. A run is named for its drafts:

plain              none: mlx-lm's own generation
no drafts          none: the gain of compiled passes
1, 2, ...          the head, this many tokens in every step
auto, no copies    the head, the fastest number of tokens
copies alone       copies of the text, without the head
auto               the head or copies, whichever is faster

A ratio compares two runs of one round.
"""

import copy
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import zip_longest
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream, wired_limit

from .._version import __version__
from ..cli.display import alternate
from ..core.batch.generate_step import mtp_generate_step
from ..core.batch.ids import token_ids
from ..core.decoding.counts import DraftCounts, OfSource
from ..core.drafts.sources import N_GRAM
from ..core.pacing import MAX_DRAFT_TOKENS
from ..core.pacing.depth import Depth
from ..errors import MTPError
from ..memory import GB, needs_of

PLAIN = "plain"
NO_DRAFTS = "no drafts"
NO_COPIES = "auto, no copies"
COPIES = "copies alone"
AUTO = "auto"
Run = int | str  # a fixed draft length, or one of these
# The source of a token is that of the accepted draft, or the target's own choice. Each pass has one choice
# of the target: the token of a plain step, or the token after the accepted drafts.
TARGET = "target"
OVERALL = "overall"
LOOPS = 1 / 3  # a larger share of repeated tokens is reported


class Generation(NamedTuple):
    tokens: list[int]
    origins: list[str]  # of each token
    first_token: float  # seconds from the start
    seconds: float  # from the first token to the last
    peak_memory: float  # GB
    counts: DraftCounts

    @property
    def n_timed(self) -> int:
        return len(self.tokens) - 1

    @property
    def n_steps(self) -> int:
        """The number of passes that yielded them. The last pass has no token of the target if the text ends with a draft."""
        return self.origins[1:].count(TARGET) + (self.origins[-1] != TARGET)


Round = dict[tuple[str, Run], Generation]  # by prompt and run


@dataclass
class Result:
    """One run compared with plain generation, on one prompt or on all. Speeds and sources exclude the first token."""

    prompt: str
    run: Run
    prompt_tokens: int
    plain_tps: float  # tokens per second, the median of the rounds
    mtp_tps: float
    ratio: float  # the median of the rounds
    ratio_low: float
    ratio_high: float
    plain_first_token: float  # seconds, the median of the rounds
    mtp_first_token: float
    plain_peak_memory: float  # GB
    mtp_peak_memory: float
    origins: dict[str, int]  # the tokens of all rounds by source, the target among them
    counts: dict[str, OfSource]  # the drafts by source and position
    tokens_per_step: float
    identical: bool

    def percent(self, source: str) -> int:
        """The percentage of tokens from a source; those of all sum to 100."""
        if source == TARGET:
            return 100 - sum(self.percent(name) for name in self.origins if name != TARGET)
        return round(100 * self.origins.get(source, 0) / sum(self.origins.values()))


@dataclass
class Report:
    model: str
    machine: dict[str, Any]  # the chip and other properties that affect the speed
    versions: dict[str, str]
    max_tokens: int
    repeat: int
    needed_memory: float  # GB, estimated for the longest text
    repeated: dict[str, float]  # by prompt, see ``repeated_share``
    results: list[Result]
    prefill: list[dict[str, float]] = field(default_factory=list)  # of each prompt, see ``measure_prefill``

    def of(self, prompt: str) -> list[Result]:
        return [r for r in self.results if r.prompt == prompt]


def measure(
    model: Any,
    prompts: Mapping[str, mx.array],
    runs: Sequence[Run] = (NO_DRAFTS, NO_COPIES, AUTO),
    *,
    max_tokens: int = 128,
    repeat: int = 5,
    stop: Collection[int] = (),
    name: str = "",
) -> Report:
    """Time plain and MTP generation on prompts [T] by name, alternating: a result of each run for each prompt and for all."""
    turns: list[Run] = [PLAIN, *runs]
    # Each run keeps the times of its steps from one text to the next, as in normal use.
    depths: dict[Run, Depth] = {
        run: Depth(MAX_DRAFT_TOKENS, times=copy.deepcopy(model.pace.times)) for run in (NO_COPIES, AUTO)
    }

    def one(prompt: str, run: Run) -> Generation:
        return generate(model, prompts[prompt], max_tokens, run, depths.get(run), stop=stop)

    sizes = {p: tokens.size for p, tokens in prompts.items()}
    with wired_limit(model, [generation_stream]):
        rounds = alternate(turns, sorted(sizes, key=sizes.__getitem__), repeat, one, model.ranks)
    texts: dict[str, Any] = {p: (tokens.tolist(), rounds[0][p, PLAIN].tokens) for p, tokens in prompts.items()}
    machine = {  # nothing names it or its user
        "chip": str(mx.device_info()["device_name"]),
        "device": mx.default_device().type.name,
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": f"macOS {macos}" if (macos := platform.mac_ver()[0]) else f"{platform.system()} {platform.release()}",
    }
    rows = [*((p, {p: n}) for p, n in sizes.items()), (OVERALL, sizes)]
    return Report(
        model=name,
        machine=machine,
        versions={"mlx": version("mlx"), "mlx-lm": version("mlx-lm"), "mlx-mtp": __version__},
        max_tokens=max_tokens,
        repeat=repeat,
        needed_memory=needs_of(model, max(sizes.values()) + max_tokens).total / GB,
        repeated={p: repeated_share(*text) for p, text in texts.items()},
        results=[summarize(row, run, of_row, rounds) for run in runs for row, of_row in rows],
    )


def measure_prefill(model: Any, prompt: mx.array, repeat: int) -> dict[str, float]:
    """The seconds of plain and MTP generation to the first token of a prompt [T], the medians of the rounds.

    MTP's include the head's keys and values.
    """
    with wired_limit(model, [generation_stream]):
        one = partial(generate, model, prompt, 2)
        rounds = alternate([PLAIN, AUTO], [""], repeat, lambda _, run: one(run), model.ranks)
    plain, mtp = (statistics.median(own["", run].first_token for own in rounds) for run in (PLAIN, AUTO))
    return {"prompt_tokens": prompt.size, "plain": plain, "mtp": mtp}


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
    """Time one run on one prompt [T] with the ``Depth`` of auto. Raise an MTPError if the text ends with its first token."""
    prompt = mx.array(token_ids(prompt, model))
    counts = DraftCounts()
    steps: Any
    if run == PLAIN:
        steps = generate_step(prompt, model, max_tokens=max_tokens)
    else:
        n_drafts = run if isinstance(run, int) else 0 if run in (NO_DRAFTS, COPIES) else depth or "auto"
        steps = mtp_generate_step(
            prompt,
            model,
            max_tokens=max_tokens,
            num_draft_tokens=n_drafts,
            copy_drafts="auto" if run in (AUTO, COPIES) else "off",
            draft_p_min=draft_p_min,
            counts=counts,
        )
    mx.clear_cache()
    mx.reset_peak_memory()
    tokens: list[int] = []
    origins: list[str] = []
    start = first = time.perf_counter()
    for token, _, *drafted in steps:
        if not tokens:
            first = time.perf_counter()
        tokens.append(token)
        origins.append(counts.source if drafted == [True] else TARGET)
        if token in stop:
            break
    end = time.perf_counter()
    steps.close()
    mx.synchronize(generation_stream)  # finish the pass in flight, which is not part of the next run
    if len(tokens) < 2:
        raise MTPError(f"The model ends its text at once on a prompt of {prompt.size} tokens: leave this prompt out.")
    return Generation(tokens, origins, first - start, end - first, mx.get_peak_memory() / 1e9, counts)


def summarize(name: str, run: Run, sizes: Mapping[str, int], rounds: Sequence[Round]) -> Result:
    """Of the prompts with these ``sizes``, together."""
    plain, mtp = ([[generations[p, r] for p in sizes] for generations in rounds] for r in (PLAIN, run))
    plain_speeds, mtp_speeds = (list(map(speed, of)) for of in (plain, mtp))
    ratios = [b / a for a, b in zip(plain_speeds, mtp_speeds)]
    every = [g for one in mtp for g in one]
    total = sum_counts(g.counts for g in every)
    return Result(
        prompt=name,
        run=run,
        prompt_tokens=sum(sizes.values()),
        plain_tps=statistics.median(plain_speeds),
        mtp_tps=statistics.median(mtp_speeds),
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        plain_first_token=statistics.median(g.first_token for one in plain for g in one),
        mtp_first_token=statistics.median(g.first_token for g in every),
        plain_peak_memory=max(g.peak_memory for one in plain for g in one),
        mtp_peak_memory=max(g.peak_memory for g in every),
        origins=dict(Counter(source for g in every for source in g.origins[1:])),
        counts={source: own for source, own in total.by_source.items() if any(own)},
        tokens_per_step=sum(g.n_timed for g in every) / sum(g.n_steps for g in every),
        identical=all(a.tokens == b.tokens for one, other in zip(plain, mtp) for a, b in zip(one, other)),
    )


def speed(generations: Sequence[Generation]) -> float:
    """Tokens per second of several generations, whose texts may differ in length after a difference by rounding."""
    return sum(g.n_timed for g in generations) / sum(g.seconds for g in generations)


def sum_counts(counts: Iterable[DraftCounts]) -> DraftCounts:
    total = DraftCounts()
    for source, own in (item for c in counts for item in c.by_source.items()):
        both = zip(total.of(source), own)  # drafts, and accepted ones
        total.by_source[source] = OfSource(*([*map(sum, zip_longest(*pair, fillvalue=0))] for pair in both))
    return total


def repeated_share(prompt: Sequence[int], text: Sequence[int]) -> float:
    """The share of a text that repeats itself: tokens that copies of the text, but not of its prompt, would draft."""
    of_prompt, of_text = (Counter(zip(*(tokens[i:] for i in range(N_GRAM + 1)))) for tokens in (prompt, text))
    return sum(n - 1 for n_gram, n in of_text.items() if n_gram not in of_prompt) / len(text)


def loop_warning(shares: Mapping[str, float]) -> str | None:
    """A warning that names repetitive texts, if any, by their repeated shares: drafts are nearly always right in a loop."""
    loops = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share > LOOPS)
    told = f"Warning: texts that repeat themselves, and how much of each: {loops}."
    return f"{told} Their figures hold for loops: use other prompts." if loops else None
