"""The command line of ``mlx_mtp.benchmark``."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .. import cli, prompts
from ..checkpoint import settings
from ..checkpoint.files import check_target
from ..checkpoint.hub import fetch
from ..checkpoint.load import DEMO, load
from ..decoding.depth import MAX_DRAFT_TOKENS
from . import plot, recommend, tune
from .measure import Report, measure
from .report import show, show_growth
from .runs import AUTO
from .shapes import SHAPES
from .synthetic import synthetic_model

COPYING = "copying"  # in place of a file of prompts
ACCEPTANCE = 0.8  # of a synthetic model
SYNTHETIC_TOKENS = 128  # of its prompt


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlx_mtp.benchmark", description="MTP against mlx-lm's plain generation.")
    parser.add_argument("--model", help="Local directory or Hugging Face repo (default: the bundled demo).")
    parser.add_argument("--synthetic", choices=SHAPES, help="Time random weights of these shapes in place of a model.")
    parser.add_argument(
        "--acceptance",
        type=float,
        help="With --synthetic: the acceptance rate of a draft whose predecessors were accepted "
        f"(default: {ACCEPTANCE}).",
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
    parser.add_argument("--repeat", type=int, default=5, help="The number of rounds (default: 5).")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="A text file of prompts, separated by lines of three dashes, or `copying` for four kinds of request whose "
        "answers copy from the prompt (default: nine kinds of request; for the demo, beginnings of Python files).",
    )
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="Lengthen each prompt to about N tokens. With several lengths, measure each and print how times grow.",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="Measure auto, fixed depths and cheaper drafts against plain decoding, and write the best settings to "
        "--settings, where --mtp finds them.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the figures to this file.")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="Draw speed by depth into this image.")
    cli.add_copy_drafts(parser)
    cli.add_arguments(parser)
    cli.add_pipeline(parser)
    for action in parser._actions:
        if action.dest == "copy_drafts":
            action.help = (
                "Where the text repeats itself, draft what followed there: see mlx_mtp.generate (default: auto beside auto, "
                "off beside a fixed depth)."
            )
        if action.dest == "settings":
            action.default, action.metavar = None, "FILE"
            action.help = (
                "Measure with the tuned settings in this file (default: none, so that auto is auto); with --tune, the file "
                "to write (default: one in the user's cache folder)."
            )
    return parser


def main() -> None:
    with cli.one_line_errors("mlx_mtp.benchmark"):
        run(cli.parse(make_parser()))


def run(args: argparse.Namespace) -> None:
    check_flags(args)
    if args.tune:
        run_tune(args)
        return
    model, name, prompts_by_length = prepare(args)
    reports: list[Report] = []
    for tokens in prompts_by_length:
        report = measure(
            model,
            tokens,
            (AUTO, *range(1, (args.compare_depths or 0) + 1)),
            max_tokens=args.max_tokens,
            repeat=args.repeat,
            copy_drafts=args.copy_drafts,
            name=name,
            acceptance_was_set=args.acceptance,
        )
        print(show(report), end="\n\n" if len(prompts_by_length) > 1 else "\n")
        reports.append(report)
    if len(reports) > 1:
        print(show_growth(reports, len(model.layers)))
    if mx.distributed.init().rank() > 0:
        return
    if args.json:
        write_json(args.json, [asdict(r) for r in reports] if len(reports) > 1 else asdict(reports[0]))
    if args.plot:
        plot.draw(reports[0]).savefig(args.plot, dpi=150)


def prepare(args: argparse.Namespace) -> tuple[Any, str, list[Mapping[str, mx.array]]]:
    """The model, its name for the report, and the prompts at each length."""
    if args.synthetic:
        if args.acceptance is None:
            args.acceptance = ACCEPTANCE
        model, script = synthetic_model(
            SHAPES[args.synthetic],
            args.acceptance,
            draft_vocab=args.draft_vocab,
            mtp_bits=args.mtp_bits,
            draft_head_bits=args.draft_head_bits,
        )
        lengths = [n or SYNTHETIC_TOKENS for n in args.context]
        texts = [mx.array([script.token(i) for i in range(n)]) for n in lengths]
        return model, f"synthetic {args.synthetic}", [{"synthetic": tokens} for tokens in texts]
    model, tokenizer = load(
        args.model or str(DEMO), **cli.options(args) | {"settings": args.settings or False}, **cli.groups(args)
    )
    name = args.model or "demo"
    if model.drafting.tuned is not None:
        name += f" with {model.drafting.tuned}"
    return model, name, [encode_prompts(args, tokenizer, n) for n in args.context]


def encode_prompts(args: argparse.Namespace, tokenizer: TokenizerWrapper, context: int) -> dict[str, mx.array]:
    if args.prompts == COPYING:
        texts = prompts.copying_kinds()
    elif args.prompts:
        texts = prompts.read_prompts(Path(args.prompts))
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
    tokens = encode_prompts(args, tokenizer, args.context[0])
    measured = tune.tune(model, tokenizer, path, tokens, max_tokens=args.max_tokens, repeat=args.repeat)
    print(recommend.show(measured))
    settings.write(file, key, name, recommend.recommend(measured).settings)
    print(f"Written to {file}: `--mtp` and `mlx_mtp.load` use it from now on.")
    if args.json:
        write_json(args.json, [asdict(m) for m in measured])


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def check_flags(args: argparse.Namespace) -> None:
    """
    Check the flags before anything is measured.

    Raises:
        ValueError: A flag is out of range, or does not go with another.
    """
    cli.check_alone(args, "synthetic", "tune")
    if args.tune:
        check_tune(args)
    if args.synthetic:
        if args.model or args.prompts:
            raise ValueError("--synthetic replaces the model and its prompts: remove --model and --prompts.")
        if args.draft_vocab is not None and not isinstance(args.draft_vocab, int):
            raise ValueError("--synthetic has no tokenizer: give --draft-vocab a number.")
    elif args.acceptance is not None:
        raise ValueError("--acceptance requires --synthetic.")
    if args.acceptance is not None and not 0 <= args.acceptance <= 1:
        raise ValueError(f"--acceptance must be a probability, from 0 to 1, not {args.acceptance}.")
    cli.check_copy_drafts(args)
    if args.compare_depths is not None and not 1 <= args.compare_depths <= MAX_DRAFT_TOKENS:
        raise ValueError(f"--compare-depths must be from 1 to {MAX_DRAFT_TOKENS}, not {args.compare_depths}.")
    if min(args.context) < 0:
        raise ValueError(f"--context must be a number of tokens, not {min(args.context)}.")
    if len(args.context) > 1 and (args.tune or args.plot):
        raise ValueError(f"{'--tune' if args.tune else '--plot'} takes one length: give --context one number.")
    for file in (args.json, args.plot):
        if file:
            check_target(file)
    if args.plot:
        if args.compare_depths is None:
            raise ValueError("--plot draws speed by depth and requires --compare-depths.")
        plot.check(args.plot)


def check_tune(args: argparse.Namespace) -> None:
    fixed = ("synthetic", "compare_depths", "copy_drafts", "plot", "draft_vocab", "mtp_bits", "draft_head_bits")
    for flag in (flag for flag in fixed if getattr(args, flag) is not None):
        raise ValueError(f"--tune chooses what to measure: remove --{flag.replace('_', '-')}.")
    if args.repeat < 2:
        raise ValueError("--tune requires --repeat 2 or more: the spread of the rounds tells what is a gain.")
    if args.settings is False:
        raise ValueError("--tune writes settings: remove --settings off, or name a file.")


if __name__ == "__main__":
    main()
