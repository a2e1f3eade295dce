"""``mlx_mtp.benchmark``: what ``measure`` and ``tune`` find, from the command line."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import cli, prompts
from ..checkpoint import settings
from ..checkpoint.files import check_target
from ..checkpoint.hub import fetch
from ..checkpoint.load import DEMO, load
from ..decoding.depth import MAX_DRAFT_TOKENS
from . import plot, tune
from .measure import measure
from .report import show, show_growth
from .runs import AUTO
from .synthetic import SHAPES, synthetic_model


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
    cli.add_arguments(parser)
    for action in parser._actions:
        if action.dest == "settings":
            action.default, action.metavar = None, "FILE"
            action.help = (
                "Measure with the settings in a file of --tune (default: without, so that auto is auto); with --tune, the file "
                "to write (default: one in the user's cache folder)."
            )
    return parser


def main() -> None:
    args = make_parser().parse_args()
    with cli.one_line_errors("mlx_mtp.benchmark"):
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
        model, tokenizer = load(args.model or str(DEMO), **cli.options(args) | {"settings": args.settings or False})
        if model.drafting.tuned is not None:
            name += f" with {model.drafting.tuned}"
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
    file = settings.default_file(key) if args.settings is None else Path(args.settings)
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
        if file:
            check_target(file)
    if args.plot:
        if args.compare_depths is None:
            raise ValueError("--plot draws speed by depth: give --compare-depths, too.")
        plot.check(args.plot)


if __name__ == "__main__":
    main()
