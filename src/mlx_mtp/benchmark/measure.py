"""MTP against mlx-lm's own generation, side by side in one run.

The arms take turns: plain ``mlx_lm`` generation and MTP at each depth, on the same prompts, greedy, so many tokens each,
whatever they are. A ratio is of two runs of one round. Beside it stands what the parts of a step allow: with V(n) the time of
a verify pass over n tokens and D that of a pass of the head, each timed alone, n steps that drafted k_1, ..., k_n tokens and
yielded N allow

    N V(1) / sum(V(k_i + 1) + k_i D)        achieved / allowed is the efficiency of the loop
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit
from tqdm import tqdm

from ..decoding.depth import MAX_DRAFT_TOKENS
from ..decoding.loop import mtp_generate_step
from ..decoding.pace import DraftCounts
from ..models import cache as caches
from .runs import AUTO, PLAIN, Arm, Generation, check_sizes, generate, in_turn, sum_counts

OVERALL = "overall"
N_CALLS = 20  # of a part that is timed
ENOUGH = 20.0  # seconds, after which three of them do
WARM_UP = 64  # tokens of a prompt: reading a long one would take minutes, and timing the parts does so


@dataclass
class Parts:
    """Seconds, the median of a number of calls, each evaluated before the next begins."""

    verify: list[float]  # V(1), V(2), ...: a backbone pass over n tokens in an open window
    head: float  # D: a pass of the head over one token, its output layer and argmax included
    rollback: list[float]  # going back to 1, 2, ... of the longest window's tokens
    exact: dict[int, float] = field(default_factory=dict)  # as verify, with exact=True, over 2 tokens and over the most

    def seconds(self, n_tokens: int, counts: DraftCounts) -> float:
        """Of the passes that yielded so many tokens."""
        n_plain = n_tokens - sum(counts.accepted) - (counts.drafted[0] if counts.drafted else 0)
        steps = [n_plain] + [n - m for n, m in zip(counts.drafted, [*counts.drafted[1:], 0])]  # that drafted 0, 1, ...
        return sum(n * (self.verify[k] + k * self.head) for k, n in enumerate(steps))


@dataclass
class Result:
    """An arm beside plain generation, on one prompt or on all."""

    prompt: str
    num_draft_tokens: Arm
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
    tokens_per_step: float
    allowed: float
    efficiency: float
    identical: bool

    @property
    def acceptance(self) -> list[float]:
        """The part of the drafts that stood, by position."""
        return [a / d for a, d in zip(self.accepted, self.drafted)]

    @property
    def step_to_plain(self) -> float:
        """The mean time of a step, whatever it yielded, to that of a token of plain decoding."""
        return self.tokens_per_step / self.ratio


@dataclass
class Report:
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


def time_parts(model, prompt: mx.array, max_draft_tokens: int) -> Parts:
    """Time the parts of a step alone, behind a prompt [T]."""
    prompt_cache = caches.make_prompt_cache(model)
    for _ in mtp_generate_step(prompt, model, max_tokens=0, prompt_cache=prompt_cache):
        pass
    backbone, head_cache = prompt_cache[: len(model.layers)], prompt_cache[len(model.layers)]
    hidden = prompt_cache[-1][0]  # of the last token, [1, 1, H]
    mx.eval([c.state for c in prompt_cache])
    offset = prompt.size

    windows = [mx.repeat(prompt[None, -1:], n, axis=1) for n in range(1, max_draft_tokens + 2)]  # [1, n] each
    verify: list[list[float]] = [[] for _ in windows]
    exact: dict[int, list[float]] = {2: [], len(windows): []}
    rollback: list[list[float]] = [[] for _ in windows[1:]]

    def timed(call, *args, **kwargs):
        tic = time.perf_counter()
        call(*args, **kwargs)
        return time.perf_counter() - tic

    def forward(window, exact=False):
        mx.eval(model(window, cache=prompt_cache, return_hidden=True, n_confirmed=1, exact=exact))

    def back(n):
        nonlocal offset
        caches.rollback(backbone, offset, n)
        mx.eval([c.state for c in backbone if isinstance(c, caches.ArraysCache)])
        offset += n

    # Lengths take turns, so that a pause of the machine falls on all alike. The first turn compiles what is to be compiled.
    start = time.perf_counter()
    for i in range(N_CALLS + 1):
        if i > 3 and time.perf_counter() - start > ENOUGH:
            break
        for window, seconds in zip(windows, verify):
            t = timed(forward, window)
            if i > 0:
                seconds.append(t)
            back(1)
        for n, seconds in exact.items():
            t = timed(forward, windows[n - 1], exact=True)
            if i > 0:
                seconds.append(t)
            back(1)
    for n, seconds in enumerate(rollback, 1):
        for _ in range(min(5, len(verify[0]))):
            forward(windows[-1])
            seconds.append(timed(back, n))

    def head():
        out = model.mtp(model.model.embed_tokens(prompt[None, -1:]), hidden, head_cache)
        mx.eval(mx.argmax(model.draft_logits(out), axis=-1))

    head_seconds = []
    for _ in range(N_CALLS + 1):
        head_seconds.append(timed(head))
        head_cache.trim(1)
    median = statistics.median
    return Parts(
        [median(s) for s in verify],
        median(head_seconds[1:]),
        [median(s) for s in rollback],
        {n: median(s) for n, s in exact.items()},
    )


def measure(
    model,
    prompts: Mapping[str, mx.array],
    depths: Sequence[Arm] = (AUTO,),
    *,
    max_tokens: int = 128,
    repeat: int = 5,
    name: str = "",
    acceptance_was_set: float | None = None,
) -> Report:
    """
    Time plain and MTP generation on each prompt, in turns.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``.
        prompts (Mapping[str, mx.array]): The tokens of each, [T], by name.
        depths (Sequence[Union[int, str]]): Numbers of tokens to draft in a step, and ``"auto"``.
        max_tokens (int): Tokens to generate for each, whatever they are: no token ends a run. Default: ``128``.
        repeat (int): The number of rounds. Default: ``5``.
        name (str): The model's, for the report.
        acceptance_was_set (float, optional): That of a synthetic model, for the report.

    Returns:
        Report: For each depth a result on each prompt, and one on all, named ``"overall"``.
    """
    check_sizes(max_tokens, repeat)
    deepest = max(MAX_DRAFT_TOKENS if k == AUTO else int(k) for k in depths)
    arms: list[Arm] = [PLAIN, *depths]
    rounds: list[dict[tuple[str, Arm], Generation]] = []
    n_runs = repeat * len(prompts) * len(arms)
    with wired_limit(model, [generation_stream]), tqdm(total=n_runs, desc="warming up", disable=None) as bar:  # type: ignore[list-item]
        by_length = sorted(prompts.values(), key=len)
        for arm in arms:
            generate(model, by_length[0][:WARM_UP], min(max_tokens, 32), arm)
        bar.set_description("timing the parts")
        parts = time_parts(model, by_length[len(by_length) // 2], deepest)
        for i in range(repeat):
            runs = {}
            for j, (prompt, tokens) in enumerate(prompts.items()):
                for arm in in_turn(arms, i + j):
                    bar.set_description(f"{prompt}, {arm}")
                    runs[prompt, arm] = generate(model, tokens, max_tokens, arm)
                    bar.update()
            rounds.append(runs)

    report = Report(
        name,
        str(mx.default_device()),
        {package: version(package) for package in ("mlx", "mlx-lm")},
        max_tokens,
        repeat,
        acceptance_was_set,
        parts,
    )
    n_prompt = {prompt: tokens.size for prompt, tokens in prompts.items()}
    for k in depths:
        every = [summarize(prompt, k, n, [prompt], rounds, parts) for prompt, n in n_prompt.items()]
        report.results += [*every, summarize(OVERALL, k, sum(n_prompt.values()), list(prompts), rounds, parts)]
    return report


def summarize(
    name: str,
    arm: Arm,
    prompt_tokens: int,
    prompts: list[str],
    rounds: list[dict[tuple[str, Arm], Generation]],
    parts: Parts,
) -> Result:
    """What the rounds say of an arm on these prompts together."""
    plain, mtp = ([[runs[p, a] for p in prompts] for runs in rounds] for a in (PLAIN, arm))  # [round][prompt]
    plain_seconds, mtp_seconds = ([sum(g.seconds for g in r) for r in arm] for arm in (plain, mtp))
    plain_first, mtp_first = (statistics.median(g.first_token for r in arm for g in r) for arm in (plain, mtp))
    ratios = sorted(a / b for a, b in zip(plain_seconds, mtp_seconds))
    ratio = statistics.median(ratios)
    counts = [sum_counts([g.counts for g in r]) for r in mtp]
    # The first token of each comes before the clock starts.
    n_tokens = sum(len(g.tokens) - 1 for g in mtp[0])
    total = sum_counts(counts)
    allowed = n_tokens * len(rounds) * parts.verify[0] / parts.seconds(n_tokens * len(rounds), total)
    return Result(
        prompt=name,
        num_draft_tokens=arm,
        prompt_tokens=prompt_tokens,
        plain_tps=n_tokens / statistics.median(plain_seconds),
        mtp_tps=n_tokens / statistics.median(mtp_seconds),
        ratio=ratio,
        ratio_low=ratios[0],
        ratio_high=ratios[-1],
        plain_first_token=plain_first,
        mtp_first_token=mtp_first,
        plain_peak_memory=max(g.peak_memory for r in plain for g in r),
        mtp_peak_memory=max(g.peak_memory for r in mtp for g in r),
        drafted=total.drafted,
        accepted=total.accepted,
        tokens_per_step=n_tokens * len(rounds) / (n_tokens * len(rounds) - sum(total.accepted)),
        allowed=allowed,
        efficiency=ratio / allowed,
        identical=all(a.tokens == b.tokens for r, s in zip(plain, mtp) for a, b in zip(r, s)),
    )
