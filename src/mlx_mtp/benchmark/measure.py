"""MTP against mlx-lm's own generation, side by side.

Runs alternate on the same prompts: plain mlx-lm, the head without copies, copies without the head, and both. A ratio compares
two runs of one round. It is reported with the ratio that the parts of a step allow, see ``parts.py``.
"""

import copy
import os
import platform
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit
from tqdm import tqdm

from .._version import __version__
from ..cli.display import prepare
from ..memory import GB, needs_of
from ..pacing.batch_depth import timing_of
from ..pacing.depth import MAX_DRAFT_TOKENS, Depth
from .runs import (
    AUTO,
    COPY,
    HEAD,
    NO_COPIES,
    NO_DRAFTS,
    PLAIN,
    TARGET,
    Generation,
    Run,
    check_sizes,
    generate,
    in_turn,
    repeated_share,
    speed,
    sum_counts,
)

OVERALL = "overall"
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
    origins: dict[str, int]  # the tokens of all rounds by source: the head, copies, and the target itself
    drafted: list[int]  # by position
    accepted: list[int]
    copied: list[int]
    copies_accepted: list[int]
    tokens_per_step: float
    identical: bool

    @property
    def acceptance(self) -> list[float]:
        """The acceptance rate of the head's drafts, by position."""
        return [a / d for a, d in zip(self.accepted, self.drafted)]

    @property
    def step_to_plain(self) -> float:
        """The mean time of a step over that of a token of plain decoding."""
        return self.tokens_per_step / self.ratio

    def fraction(self, origin: str) -> float:
        """The fraction of the tokens from this source; the three sum to 1."""
        return self.origins[origin] / sum(self.origins.values())


@dataclass
class Report:
    """All results of one model."""

    model: str
    machine: dict[str, Any]  # the chip and other properties that affect the speed
    versions: dict[str, str]
    max_tokens: int
    repeat: int
    needed_memory: float  # GB, estimated for the longest text
    repeated: dict[str, float]  # by prompt, see ``repeated_share``
    results: list[Result] = field(default_factory=list)

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
    """Time plain and MTP generation, alternating. The report has a result of each run for each prompt and for all.

    Args:
        prompts (Mapping[str, mx.array]): The tokens of each prompt, [T], by name.
        runs (Sequence[Union[int, str]]): The sources of drafts, see ``runs.py``.
        stop (Collection[int]): Tokens that end a text. Default: none.
        name (str): The model's name, for the report.

    Raises:
        ValueError: A number is out of range, or a text ends at once.
    """
    check_sizes(max_tokens, repeat)
    turns: list[Run] = [PLAIN, *runs]
    # Each run keeps the times of its steps from one text to the next, as in normal use.
    depths: dict[Run, Depth] = {
        run: Depth(MAX_DRAFT_TOKENS, times=copy.deepcopy(timing_of(model).of_one)) for run in (NO_COPIES, AUTO)
    }

    def one(prompt: str, run: Run) -> Generation:
        return generate(model, prompts[prompt], max_tokens, run, depths.get(run), stop=stop)

    by_length = sorted(prompts, key=lambda prompt: prompts[prompt].size)
    with wired_limit(model, [generation_stream]), tqdm(disable=None) as bar:
        prepare((partial(one, by_length[0], run) for run in turns), model.ranks)
        bar.reset(total=repeat * len(prompts) * len(turns))
        rounds = [_run_round(list(prompts), turns, i, one, bar) for i in range(repeat)]
    versions = {"mlx": version("mlx"), "mlx-lm": version("mlx-lm"), "mlx-mtp": __version__}
    texts: dict[str, Any] = {p: (tokens.tolist(), rounds[0][p, PLAIN].tokens) for p, tokens in prompts.items()}
    report = Report(
        model=name,
        machine=describe_machine(),
        versions=versions,
        max_tokens=max_tokens,
        repeat=repeat,
        needed_memory=needs_of(model, prompts[by_length[-1]].size + max_tokens).total / GB,
        repeated={p: repeated_share(*text) for p, text in texts.items()},
    )
    names = list(prompts)
    for run in runs:
        report.results += [summarize(p, run, prompts[p].size, [p], rounds) for p in names]
        n_tokens = sum(tokens.size for tokens in prompts.values())
        report.results.append(summarize(OVERALL, run, n_tokens, names, rounds))
    return report


def describe_machine() -> dict[str, Any]:
    """The chip by MLX's name, and other properties that affect the speed. Nothing names the machine or its user."""
    return {
        "chip": str(mx.device_info()["device_name"]),
        "device": mx.default_device().type.name,
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": f"macOS {macos}" if (macos := platform.mac_ver()[0]) else f"{platform.system()} {platform.release()}",
    }


def _run_round(
    prompts: Sequence[str], runs: Sequence[Run], i: int, one: Callable[[str, Run], Generation], bar: Any
) -> Round:
    """Time every run on every prompt once, in an order that changes with the round and the prompt."""
    generations: Round = {}
    for j, prompt in enumerate(prompts):
        for run in in_turn(runs, i + j):
            bar.set_description(f"{prompt}, {run}")
            generations[prompt, run] = one(prompt, run)
            bar.update()
    return generations


def summarize(name: str, run: Run, prompt_tokens: int, prompts: Sequence[str], rounds: Sequence[Round]) -> Result:
    """Summarize the rounds of a run over these prompts."""
    plain, mtp = ([[generations[p, r] for p in prompts] for generations in rounds] for r in (PLAIN, run))
    plain_speeds, mtp_speeds = ([speed(one) for one in of] for of in (plain, mtp))
    ratios = [b / a for a, b in zip(plain_speeds, mtp_speeds)]
    ratio = statistics.median(ratios)
    every = [g for one in mtp for g in one]
    total = sum_counts([g.counts for g in every])
    n_tokens, n_steps = sum(g.n_timed for g in every), sum(g.n_steps for g in every)
    return Result(
        prompt=name,
        run=run,
        prompt_tokens=prompt_tokens,
        plain_tps=statistics.median(plain_speeds),
        mtp_tps=statistics.median(mtp_speeds),
        ratio=ratio,
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        plain_first_token=statistics.median(g.first_token for one in plain for g in one),
        mtp_first_token=statistics.median(g.first_token for g in every),
        plain_peak_memory=max(g.peak_memory for one in plain for g in one),
        mtp_peak_memory=max(g.peak_memory for g in every),
        origins={o: sum(g.origins[1:].count(o) for g in every) for o in (HEAD, COPY, TARGET)},
        drafted=total.drafted,
        accepted=total.accepted,
        copied=total.copied,
        copies_accepted=total.copies_accepted,
        tokens_per_step=n_tokens / n_steps,
        identical=all(a.tokens == b.tokens for one, other in zip(plain, mtp) for a, b in zip(one, other)),
    )
