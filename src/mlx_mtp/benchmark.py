"""``mlx_mtp.benchmark``: MTP against mlx-lm's own generation, side by side in one run.

The arms take turns: plain ``mlx_lm`` generation and MTP at each depth, on the same prompts, greedy, so many tokens each,
whatever they are. A ratio is of two runs of one round. Beside it stands what the parts of a step allow: with V(n) the time of
a verify pass over n tokens and D that of a pass of the head, each timed alone, n steps that drafted k_1, ..., k_n tokens and
yielded N allow

    N V(1) / sum(V(k_i + 1) + k_i D)        achieved / allowed is the efficiency of the loop
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit
from tqdm import tqdm

from . import cache as caches
from . import draft_head, plot, prompts, settings, tune
from .arms import AUTO, PLAIN, Arm, Generation, check_sizes, generate, in_turn, sum_counts
from .errors import one_line_errors
from .hub import fetch
from .load import DEMO, load
from .prompts import PYTHON as PROMPTS
from .speculative import MAX_DRAFT_TOKENS, DraftCounts, mtp_generate_step
from .synthetic import SHAPES, synthetic_model

__all__ = ["PROMPTS", "Parts", "Report", "Result", "measure", "time_parts"]

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

    def timed(call):
        tic = time.perf_counter()
        call()
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
            seconds += [timed(lambda window=window: forward(window))][: i > 0]
            back(1)
        for n, seconds in exact.items():
            seconds += [timed(lambda n=n: forward(windows[n - 1], exact=True))][: i > 0]
            back(1)
    for n, seconds in enumerate(rollback, 1):
        for _ in range(min(5, len(verify[0]))):
            forward(windows[-1])
            seconds.append(timed(lambda n=n: back(n)))

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


COLUMNS: list[tuple[str, Callable[[Result], str]]] = [
    ("prompt          ", lambda r: f"{r.prompt:16}"),
    ("tokens", lambda r: str(r.prompt_tokens)),
    ("drafts", lambda r: str(r.num_draft_tokens)),
    ("plain t/s", lambda r: f"{r.plain_tps:.1f}"),
    ("MTP t/s", lambda r: f"{r.mtp_tps:.1f}"),
    ("ratio", lambda r: f"{r.ratio:.2f}"),
    (" low to high", lambda r: f"{r.ratio_low:.2f} to {r.ratio_high:.2f}"),
    ("allowed", lambda r: f"{r.allowed:.2f}"),
    ("efficiency", lambda r: f"{r.efficiency:.2f}"),
    ("tokens/step", lambda r: f"{r.tokens_per_step:.2f}"),
    ("first token, s", lambda r: f"{r.plain_first_token:.3f} {r.mtp_first_token:.3f}"),
    ("  peak GB", lambda r: f"{r.plain_peak_memory:.2f} {r.mtp_peak_memory:.2f}"),
    ("same", lambda r: "yes" if r.identical else "no"),
    ("accepted/drafted", lambda r: f"{sum(r.accepted)}/{sum(r.drafted)}"),
    ("by position", lambda r: " ".join(f"{a:.2f}" for a in r.acceptance).ljust(11)),
]


def show(report: Report) -> str:
    """The report as lines for people."""
    parts, one = report.parts, report.parts.verify[0]
    passes = ", ".join(f"{n}: {v / one:.2f}" for n, v in enumerate(parts.verify, 1))
    exact = ", ".join(f"{n}: {t / one:.2f}" for n, t in parts.exact.items())
    back = ", ".join(f"{n}: {r / parts.verify[-1]:.3f}" for n, r in enumerate(parts.rollback, 1))
    versions = ", ".join(f"{name} {v}" for name, v in report.versions.items())
    lines = [f"{report.model} on {report.device}; {versions}"]
    if report.acceptance_was_set is not None:
        lines.append(
            f"Random weights of real shapes. Acceptance was SET to {report.acceptance_was_set}, not measured: "
            "the ratios hold for a head that is right so often."
        )
    lines += [
        f"{report.max_tokens} tokens for each prompt, {report.repeat} rounds; of two figures the first is plain mlx-lm's",
        "",
        f"Verify pass over 1 token: {one * 1e3:.2f} ms; the head: {parts.head / one:.3f} of it",
        f"Verify pass over n tokens, of that over 1: {passes}",
        f"With --exact, of the plain pass over 1: {exact}",
        f"Going back to n of {len(parts.verify)} tokens, of the pass over all: {back}",
        "",
        "  ".join(name for name, _ in COLUMNS),
    ]
    for name in dict.fromkeys(r.prompt for r in report.results):
        for r in report.of(name):
            lines.append("  ".join(f"{column(r):>{len(title)}}" for title, column in COLUMNS).rstrip())
    return "\n".join(lines)


def show_growth(reports: Sequence[Report], n_layers: int) -> str:
    """How time grows with the context, as lines for people: that of a token, of a step, and that to the first token."""
    titles = ["tokens", "drafts", "ms a token", "of the first", "ratio", "tokens/step"]
    titles += ["step/plain", "of the first", "efficiency", "first token, s", "ratio"]
    n_prompts = len({r.prompt for r in reports[0].results}) - 1
    rows = []
    for first, *others in zip(*(r.of(OVERALL) for r in reports)):
        for r in (first, *others):
            rows.append(
                [
                    str(r.prompt_tokens // n_prompts),
                    str(r.num_draft_tokens),
                    f"{1e3 / r.plain_tps:.2f} {1e3 / r.mtp_tps:.2f}",
                    f"{first.plain_tps / r.plain_tps:.2f} {first.mtp_tps / r.mtp_tps:.2f}",
                    f"{r.ratio:.2f}",
                    f"{r.tokens_per_step:.2f}",
                    f"{r.step_to_plain:.2f}",
                    f"{r.step_to_plain / first.step_to_plain:.2f}",
                    f"{r.efficiency:.2f}",
                    f"{r.plain_first_token:.3f} {r.mtp_first_token:.3f}",
                    f"{r.mtp_first_token / r.plain_first_token:.3f}",
                ]
            )
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) for row in [titles, *rows]]
    return "\n".join(
        [
            "By length, all prompts together (tokens: the mean of a prompt); of two figures the first is plain mlx-lm's.",
            "A token's time also goes by how many drafts stand, and so by the text; a step's (step/plain) does not.",
            f"The head is one layer beside {n_layers}: a prompt should take no more than {1 + 1 / n_layers:.3f} of plain.",
            "",
            *lines,
        ]
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlx_mtp.benchmark", description="MTP against mlx-lm's plain generation.")
    parser.add_argument("--model", help="Local directory or Hugging Face repo (default: the bundled demo).")
    parser.add_argument("--synthetic", choices=SHAPES, help="Random weights of these shapes in place of a model.")
    parser.add_argument(
        "--acceptance",
        type=float,
        help="With --synthetic: the probability of a draft to stand, given that those before it stood (default: 0.8).",
    )
    parser.add_argument(
        "--compare-depths",
        nargs="?",
        type=int,
        const=4,
        metavar="K",
        help="Beside auto, measure each fixed depth from 1 to K (default: 4).",
    )
    parser.add_argument("--max-tokens", "-m", type=int, default=128, help="Tokens for each prompt (default: 128).")
    parser.add_argument("--repeat", type=int, default=5, help="Times that each arm runs (default: 5).")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="A text file of prompts, parted by lines of three dashes (default: nine kinds of request; "
        "for the demo, beginnings of Python files).",
    )
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="Lengthen each prompt to about N tokens. With several lengths each is measured, and a table says what grows.",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="Measure plain decoding against auto, fixed depths and cheaper drafts, and write what is best to --settings, "
        "where --mtp finds it.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the figures to this file.")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="Draw speed by depth into this image.")
    draft_head.add_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    with one_line_errors("mlx_mtp.benchmark"):
        run(args)


def run(args: argparse.Namespace) -> None:
    check(args)
    if args.tune:
        run_tune(args)
        return
    name, acceptance = args.model or "demo", None
    every: list[dict[str, mx.array]]  # the prompts, for each length
    if args.synthetic:
        name, acceptance = f"synthetic {args.synthetic}", 0.8 if args.acceptance is None else args.acceptance
        model, script = synthetic_model(
            SHAPES[args.synthetic],
            acceptance,
            draft_vocab=args.draft_vocab,
            mtp_bits=args.mtp_bits,
            draft_head_bits=args.draft_head_bits,
        )
        every = [{"synthetic": mx.array([script.token(i) for i in range(n or 128)])} for n in args.context]
    else:
        model, tokenizer = load(args.model or str(DEMO), **draft_head.options(args))
        every = [encoded_prompts(args, tokenizer, n) for n in args.context]
    reports = []
    for tokens in every:
        report = measure(
            model,
            tokens,
            (AUTO, *range(1, (args.compare_depths or 0) + 1)),
            max_tokens=args.max_tokens,
            repeat=args.repeat,
            name=name,
            acceptance_was_set=acceptance,
        )
        print(show(report), end="\n\n" if len(every) > 1 else "\n")
        reports.append(report)
    if len(reports) > 1:
        print(show_growth(reports, len(model.layers)))
    if args.json:
        write_json(args.json, [asdict(r) for r in reports] if len(reports) > 1 else asdict(reports[0]))
    if args.plot:
        plot.draw(reports[0]).savefig(args.plot, dpi=150)


def encoded_prompts(args: argparse.Namespace, tokenizer, context: int) -> dict[str, mx.array]:
    if args.prompts:
        texts = prompts.read_prompts(args.prompts)
    else:
        texts = prompts.nine_kinds() if args.model else prompts.python_beginnings()
    return {name: prompts.encode(tokenizer, text, context) for name, text in texts.items()}


def run_tune(args: argparse.Namespace) -> None:
    name = args.model or str(DEMO)
    path = fetch(name, None)
    key = settings.key_of(path)
    file = settings.default_file(key) if args.settings is True else Path(args.settings)
    settings.check_writable(file)
    model, tokenizer = load(name, draft_vocab=0, settings=False)
    tokens = encoded_prompts(args, tokenizer, args.context[0])
    measured = tune.tune(model, tokenizer, path, tokens, max_tokens=args.max_tokens, repeat=args.repeat)
    print(tune.show(measured))
    settings.write(file, key, name, tune.recommend(measured).settings)
    print(f"Written to {file}: `--mtp` and `mlx_mtp.load` use it from now on.")
    if args.json:
        write_json(args.json, [asdict(m) for m in measured])


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def check(args: argparse.Namespace) -> None:
    """Raise a ValueError for what would fail only after all was measured, or has no meaning."""
    if args.tune:
        fixed = ("synthetic", "compare_depths", "plot", "draft_vocab", "mtp_bits", "draft_head_bits")
        for flag in (flag for flag in fixed if getattr(args, flag) is not None):
            raise ValueError(f"--tune chooses by itself what to measure: leave out --{flag.replace('_', '-')}.")
        if args.repeat < 2:
            raise ValueError("--tune needs --repeat 2 or more: the spread of the rounds tells what is a gain.")
        if args.settings is False:
            raise ValueError("--tune writes settings: leave out --settings off, or name a file.")
    if args.synthetic:
        if args.model or args.prompts:
            raise ValueError(
                "--synthetic takes the place of a model and of its prompts: leave out --model and --prompts."
            )
        if args.draft_vocab is not None and not isinstance(args.draft_vocab, int):
            raise ValueError("--synthetic has no tokenizer: give --draft-vocab a number.")
    elif args.acceptance is not None:
        raise ValueError("--acceptance is of --synthetic: give both, or neither.")
    if args.acceptance is not None and not 0 <= args.acceptance <= 1:
        raise ValueError(f"--acceptance must be a probability, from 0 to 1, not {args.acceptance}.")
    if args.compare_depths is not None and not 1 <= args.compare_depths <= MAX_DRAFT_TOKENS:
        raise ValueError(f"--compare-depths must be from 1 to {MAX_DRAFT_TOKENS}, not {args.compare_depths}.")
    if min(args.context) < 0:
        raise ValueError(f"--context must be a number of tokens, not {min(args.context)}.")
    if len(args.context) > 1 and (args.tune or args.plot):
        raise ValueError(f"{'--tune' if args.tune else '--plot'} is of one length: give --context one number.")
    for file in (args.json, args.plot):
        if file and not file.parent.is_dir():
            raise FileNotFoundError(f"There is no folder {file.parent} to write {file.name} to.")
    if args.plot:
        if args.compare_depths is None:
            raise ValueError("--plot draws speed by depth: give --compare-depths, too.")
        plot.check(args.plot)


if __name__ == "__main__":
    main()
