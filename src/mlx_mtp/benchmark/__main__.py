"""The command line of ``mlx_mtp benchmark``."""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import prompts
from ..checkpoint import DEMO, settings
from ..checkpoint.heads.originals import check_method, fetch_missing_head
from ..checkpoint.hub import fetch
from ..checkpoint.load import load
from ..checkpoint.reader import CheckpointReader, fetch_checkpoint
from ..cli.arguments import check_alone, check_head, load_options
from ..cli.display import one_line_errors, table
from ..cli.parser import check_limits, flag_of, parse
from ..cli.parsers import benchmark_parser
from ..core.pacing import MAX_DRAFT_TOKENS
from ..core.pacing.step_times import HEAD
from ..errors import MTPError, require
from ..files import check_target, write_atomic
from . import tune
from .measure import AUTO, NO_COPIES, NO_DRAFTS, OVERALL, Report, Result, loop_warning, measure, measure_prefill

# Built-in sets of prompts, by the value of --prompts.
KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "nine": prompts.nine_kinds,
    "copying": prompts.copying_kinds,
    "python": prompts.python_beginnings,
}
COLUMNS: list[tuple[str, Callable[[Result], str]]] = [
    ("tokens/s", lambda r: f"{r.mtp_tps:.1f}"),
    ("ratio", lambda r: f"{r.ratio:.2f}"),
    ("lowest", lambda r: f"{r.ratio_low:.2f}"),
    ("highest", lambda r: f"{r.ratio_high:.2f}"),
    ("tokens/step", lambda r: f"{r.tokens_per_step:.2f}"),
]
DETAILS: list[tuple[str, Callable[[Result], str]]] = [
    ("first token, s", lambda r: f"{r.plain_first_token:.3f} {r.mtp_first_token:.3f}"),
    ("peak GB", lambda r: f"{r.plain_peak_memory:.2f} {r.mtp_peak_memory:.2f}"),
    ("copies accepted", lambda r: "/".join(str(sum(n)) for n in reversed(r.counts.get("copies", ([], []))))),
    ("step/plain", lambda r: f"{r.tokens_per_step / r.ratio:.2f}"),  # which does not depend on the acceptance rate
]
PREFILL = (2048, 8192)  # tokens
LIMITS = {flag: (low, math.inf) for flag, low in (("max_tokens", 2), ("prefill", 2), ("repeat", 1), ("context", 0))}
LIMITS["compare_depths"] = (1, MAX_DRAFT_TOKENS)


@one_line_errors("mlx_mtp benchmark")
def main() -> None:
    args = parse(benchmark_parser())
    check_flags(args)
    if args.tune:
        run_tune(args)
        return
    options = load_options(args) | {"settings": args.settings or False}
    model, tokenizer = load(args.model or str(DEMO), **options)
    name = args.model or "demo"
    name = Path(name).resolve().name if Path(name).exists() else name  # without the path of a folder
    if model.draft_settings.are_tuned:
        name += f" with {model.draft_settings.tuned}"
    runs = (NO_DRAFTS, *range(1, (args.compare_depths or 0) + 1), NO_COPIES, AUTO)
    sizes = {"max_tokens": args.max_tokens, "repeat": args.repeat}
    several = len(args.context) > 1
    reports: list[Report] = []
    for n in args.context:
        tokens = {prompt: prompts.encode(tokenizer, text, n) for prompt, text in read_texts(args).items()}
        reports.append(measure(model, tokens, runs, stop=tokenizer.eos_token_ids, name=name, **sizes))
        if n == args.context[0] and args.prefill is not None:
            text = next(iter(read_texts(args).values()))
            long = (prompts.encode(tokenizer, text, size) for size in args.prefill or PREFILL)
            reports[-1].prefill = [measure_prefill(model, prompt, args.repeat) for prompt in long]
        print(show(reports[-1]), end="\n\n" if several else "\n")
    if mx.distributed.init().rank() == 0:
        if args.json:
            figures = [asdict(r) for r in reports] if several else asdict(reports[0])
            write_atomic(args.json, json.dumps(figures, indent=2) + "\n")
        if args.plot:
            plot(reports[0]).savefig(args.plot, dpi=150)
    names = [f"auto, --context {n}" for n in args.context] if several else ["auto"]
    print("", *map(gain, reports, names), sep="\n")


def read_texts(args: argparse.Namespace) -> dict[str, str]:
    kind = args.prompts or ("nine" if args.model else "python")
    return KINDS[kind]() if kind in KINDS else prompts.read_prompts(Path(kind))


def run_tune(args: argparse.Namespace) -> None:
    name = args.model or str(DEMO)
    check_method(CheckpointReader(name))
    checkpoint = fetch_checkpoint(name)
    if isinstance(args.mtp, str):
        heads = [fetch(args.mtp, None)]
    else:
        head = fetch_missing_head(checkpoint)
        heads = [] if head is None else [head.folder]
    key = settings.key_of(checkpoint.path, *heads)  # heads from outside the checkpoint
    file = settings.default_file(key) if args.tune is True else Path(args.tune)
    settings.check_writable(file)
    model, tokenizer = load(name, **load_options(args) | {"draft_vocab": 0, "settings": False})
    (n,) = args.context
    tokens = {prompt: prompts.encode(tokenizer, text, n) for prompt, text in read_texts(args).items()}
    measured = tune.tune(model, tokenizer, tokens, max_tokens=args.max_tokens, repeat=args.repeat)
    print(tune.show(measured))
    settings.write(file, key, name, tune.recommend(measured).settings)
    users = "`--mtp` and `mlx_mtp.load` use it from now on" if args.tune is True else f"`--settings {file}` uses it"
    print(f"Written to {file}: {users}.")
    if args.json:
        write_atomic(args.json, json.dumps([asdict(m) for m in measured], indent=2) + "\n")


def check_flags(args: argparse.Namespace) -> None:
    check_alone(args, "tune")
    check_head(args)
    lowest = {"context": min(args.context), "prefill": min(args.prefill or PREFILL)}
    check_limits(vars(args) | lowest, LIMITS)
    if args.tune:
        for name in ("compare_depths", "prefill", "plot", "draft_vocab", "mtp_bits", "draft_head_bits", "settings"):
            if getattr(args, name) is not None:
                raise MTPError(f"--tune chooses what to measure: remove {flag_of(name)}.")
        if args.repeat < 2:
            raise MTPError("--tune requires --repeat 2 or more: it compares a gain with the spread of the rounds.")
        if args.tune is not True:
            settings.check_writable(Path(args.tune))
    read_texts(args)
    for flag in (flag for flag in ("tune", "plot") if len(args.context) > 1 and getattr(args, flag)):
        raise MTPError(f"--{flag} takes one length: give --context one number.")
    for file in (args.json, args.plot):
        if file:
            check_target(file)
    if args.plot:
        if args.compare_depths is None:
            raise MTPError("--plot draws speed by draft length and requires --compare-depths.")
        require("plot", "A plot")
        from matplotlib.figure import Figure

        formats = Figure().canvas.get_supported_filetypes()
        if args.plot.suffix[1:] not in formats:
            ways = ", .".join(sorted(formats))
            raise MTPError(f"{args.plot} is not an image that matplotlib can write: name it with one of .{ways}.")


def show(report: Report) -> str:
    overall = report.of(OVERALL)
    names = list(dict.fromkeys(r.prompt for r in report.results))
    versions = ", ".join(f"{name} {v}" for name, v in report.versions.items())
    used = max(r.mtp_peak_memory for r in report.results)
    sources = dict.fromkeys(source for r in report.results for source in r.origins)
    rows = [["", *(title for title, _ in COLUMNS), *sources]]
    for name in names:
        rows.append([f"{name}: plain", f"{report.of(name)[0].plain_tps:.1f}"])
        rows += [
            [f"  {r.run}", *(column(r) for _, column in COLUMNS), *(f"{r.percent(source)}%" for source in sources)]
            for r in report.of(name)
        ]
    details = [[OVERALL, *(title for title, _ in DETAILS)]]
    details += [[f"  {r.run}", *(column(r) for _, column in DETAILS)] for r in overall]
    lines = [
        f"{report.model} on {report.machine['chip']} ({report.machine['device']}); {versions}",
        f"Memory: {report.needed_memory:.3f} GB estimated, at most {used:.3f} GB used",
        f"Up to {report.max_tokens} tokens for each prompt, {report.repeat} rounds; of two figures the first is plain "
        "mlx-lm's",
        *("", *table(rows), "", *table(details), ""),
    ]
    rates = [[f"  {r.run}", *(f"{a / d:.2f}" for d, a in zip(*r.counts[HEAD]))] for r in overall if HEAD in r.counts]
    if rates:
        lines += ["Acceptance rate of the head's drafts, by position", *table(rates), ""]
    if report.prefill:
        seconds = [["prefill", "plain, s", "mtp, s", "plain / mtp"]]
        for p in report.prefill:
            ratio = p["plain"] / p["mtp"]
            seconds.append([f"  {p['prompt_tokens']:,}", f"{p['plain']:.2f}", f"{p['mtp']:.2f}", f"{ratio:.2f}"])
        lines += [*table(seconds), ""]
    differing = [f"{r.prompt} ({r.run})" for r in report.results if not r.identical and r.prompt != OVERALL]
    lines.append(
        f"Tokens differ from those of plain mlx-lm: {', '.join(differing)}"
        if differing
        else "All runs generated the tokens of plain mlx-lm"
    )
    loops = loop_warning(report.repeated)
    return "\n".join([*lines, *([loops] if loops else [])])


def gain(report: Report, name: str = "auto") -> str:
    """The gain of the default, auto, over all prompts, in two parts: of compiled passes, and of drafts."""
    ratios = {r.run: r for r in report.of(OVERALL)}
    auto = ratios[AUTO]
    compiled = ratios[NO_DRAFTS].ratio
    return (
        f"{name}: {auto.ratio:.2f} times as fast as plain mlx-lm ({auto.ratio_low:.2f} to {auto.ratio_high:.2f} by round): "
        f"compiled passes {compiled:.2f}, drafts {auto.ratio / compiled:.2f}"
    )


def plot(report: Report) -> Any:
    """Draw the head's speed by draft length for all prompts together, with auto as lines. The report has a fixed one."""
    from matplotlib.figure import Figure

    fixed = [r for r in report.of(OVERALL) if isinstance(r.run, int)]
    lengths = [int(r.run) for r in fixed]
    ratios = [r.ratio for r in fixed]
    spread = [[r.ratio - r.ratio_low for r in fixed], [r.ratio_high - r.ratio for r in fixed]]
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.axhline(1, color="gray", label="plain mlx-lm")
    axes.errorbar(lengths, ratios, spread, fmt="o-", capsize=3, label="head, fixed draft length")
    for r, color in zip((r for r in report.of(OVERALL) if r.run in (NO_COPIES, AUTO)), ("C1", "C2")):
        axes.axhline(r.ratio, color=color, linestyle=":", label=f"{r.run}: {r.ratio:.2f}")
    axes.set_title(f"{Path(report.model).name}, {report.max_tokens} tokens a prompt, {report.repeat} rounds")
    axes.set(xticks=lengths, xlabel="drafts in a step", ylabel="speed, plain mlx-lm = 1", ylim=(0, None))
    axes.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    main()
