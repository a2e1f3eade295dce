"""MTP against mlx-lm's own generation, side by side.

Runs take turns: plain mlx-lm and MTP at each depth, on the same prompts. A ratio compares two runs of one round. Beside it is
the ratio that the parts of a step allow, see ``parts.py``.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit
from tqdm import tqdm

from ..decoding.depth import MAX_DRAFT_TOKENS
from ..decoding.loop import CopyDrafts, most_copies
from .parts import Parts, time_parts
from .runs import AUTO, PLAIN, Generation, Run, check_sizes, generate, in_turn, sum_counts

OVERALL = "overall"
WARM_UP = 64  # tokens of a prompt: reading a long one takes minutes, and timing the parts reads one
Round = dict[tuple[str, Run], Generation]  # by prompt and run


@dataclass
class Result:
    """MTP at one depth beside plain generation, on one prompt or on all."""

    prompt: str
    num_draft_tokens: Run
    prompt_tokens: int
    plain_tps: float  # tokens per second after the first token, the median of the rounds
    mtp_tps: float
    ratio: float  # the median of the rounds
    ratio_low: float
    ratio_high: float
    plain_first_token: float  # seconds, the median of the rounds
    mtp_first_token: float
    plain_peak_memory: float  # GB
    mtp_peak_memory: float
    drafted: list[int]  # by position
    accepted: list[int]
    copied: list[int]
    copies_accepted: list[int]
    tokens_per_step: float
    allowed: float
    efficiency: float
    identical: bool

    @property
    def acceptance(self) -> list[float]:
        """The acceptance rate of the head's drafts, by position."""
        return [a / d for a, d in zip(self.accepted, self.drafted)]

    @property
    def step_to_plain(self) -> float:
        """The mean time of a step over that of a token of plain decoding."""
        return self.tokens_per_step / self.ratio


@dataclass
class Report:
    """All results of one model."""

    model: str
    device: str
    versions: dict[str, str]
    max_tokens: int
    repeat: int
    acceptance_was_set: float | None  # of a synthetic model
    parts: Parts
    results: list[Result] = field(default_factory=list)

    def of(self, prompt: str) -> list[Result]:
        return [r for r in self.results if r.prompt == prompt]


def measure(
    model: Any,
    prompts: Mapping[str, mx.array],
    depths: Sequence[Run] = (AUTO,),
    *,
    max_tokens: int = 128,
    repeat: int = 5,
    copy_drafts: CopyDrafts | None = None,
    name: str = "",
    acceptance_was_set: float | None = None,
) -> Report:
    """
    Time plain and MTP generation on each prompt, in turns.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``.
        prompts (Mapping[str, mx.array]): The tokens of each, [T], by name.
        depths (Sequence[Union[int, str]]): Numbers of tokens to draft in a step, and ``"auto"``.
        max_tokens (int): Tokens to generate for each prompt; no token stops a run. Default: ``128``.
        repeat (int): The number of rounds. Default: ``5``.
        copy_drafts (Union[int, str], optional): As in ``mtp_generate_step``. Default: ``None``, ``"auto"`` for the depth
          ``"auto"`` and ``"off"`` for the others.
        name (str): The model's name, for the report.
        acceptance_was_set (float, optional): The acceptance rate of a synthetic model, for the report.

    Returns:
        Report: For each depth a result on each prompt, and one on all, named ``"overall"``.
    """
    check_sizes(max_tokens, repeat)
    runs: list[Run] = [PLAIN, *depths]
    n_runs = repeat * len(prompts) * len(runs)
    with wired_limit(model, [generation_stream]), tqdm(total=n_runs, desc="warming up", disable=None) as bar:
        by_length = sorted(prompts.values(), key=len)
        for run in runs:
            generate(model, by_length[0][:WARM_UP], min(max_tokens, 32), run, copy_drafts=copy_drafts)
        bar.set_description("timing the parts")
        deepest = max(_most_drafts(k, copy_drafts) for k in depths)
        parts = time_parts(model, by_length[len(by_length) // 2], deepest)
        rounds = [_run_round(model, prompts, runs, i, max_tokens, copy_drafts, bar) for i in range(repeat)]
    versions = {package: version(package) for package in ("mlx", "mlx-lm")}
    report = Report(name, str(mx.default_device()), versions, max_tokens, repeat, acceptance_was_set, parts)
    names = list(prompts)
    for k in depths:
        report.results += [summarize(p, k, prompts[p].size, [p], rounds, parts) for p in names]
        n_tokens = sum(tokens.size for tokens in prompts.values())
        report.results.append(summarize(OVERALL, k, n_tokens, names, rounds, parts))
    return report


def _most_drafts(run: Run, copy_drafts: CopyDrafts | None) -> int:
    if run == AUTO:
        return max(MAX_DRAFT_TOKENS, most_copies(None, copy_drafts))
    return max(int(run), most_copies(int(run), copy_drafts))


def _run_round(
    model: Any,
    prompts: Mapping[str, mx.array],
    runs: Sequence[Run],
    i: int,
    max_tokens: int,
    copy_drafts: CopyDrafts | None,
    bar: Any,
) -> Round:
    """Every run on every prompt once; the order changes with the round and the prompt."""
    generations: Round = {}
    for j, (prompt, tokens) in enumerate(prompts.items()):
        for run in in_turn(runs, i + j):
            bar.set_description(f"{prompt}, {run}")
            generations[prompt, run] = generate(model, tokens, max_tokens, run, copy_drafts=copy_drafts)
            bar.update()
    return generations


def summarize(
    name: str, run: Run, prompt_tokens: int, prompts: Sequence[str], rounds: Sequence[Round], parts: Parts
) -> Result:
    """Summarize what the rounds say of a run on these prompts together."""
    plain, mtp = ([[generations[p, r] for p in prompts] for generations in rounds] for r in (PLAIN, run))
    plain_seconds, mtp_seconds = ([sum(g.seconds for g in one) for one in of] for of in (plain, mtp))
    ratios = [a / b for a, b in zip(plain_seconds, mtp_seconds)]
    ratio = statistics.median(ratios)
    total = sum_counts([g.counts for one in mtp for g in one])
    n_tokens = sum(len(g.tokens) - 1 for g in mtp[0])  # the clock starts at the first token of each
    n_all = n_tokens * len(rounds)
    allowed = n_all * parts.verify[0] / parts.seconds(n_all, total)
    return Result(
        prompt=name,
        num_draft_tokens=run,
        prompt_tokens=prompt_tokens,
        plain_tps=n_tokens / statistics.median(plain_seconds),
        mtp_tps=n_tokens / statistics.median(mtp_seconds),
        ratio=ratio,
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        plain_first_token=statistics.median(g.first_token for one in plain for g in one),
        mtp_first_token=statistics.median(g.first_token for one in mtp for g in one),
        plain_peak_memory=max(g.peak_memory for one in plain for g in one),
        mtp_peak_memory=max(g.peak_memory for one in mtp for g in one),
        drafted=total.drafted,
        accepted=total.accepted,
        copied=total.copied,
        copies_accepted=total.copies_accepted,
        tokens_per_step=n_all / (n_all - sum(total.accepted) - sum(total.copies_accepted)),
        allowed=allowed,
        efficiency=ratio / allowed,
        identical=all(a.tokens == b.tokens for one, other in zip(plain, mtp) for a, b in zip(one, other)),
    )
