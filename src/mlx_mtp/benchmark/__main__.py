"""The command line of ``mlx_mtp benchmark``."""

import argparse
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .. import prompts
from ..checkpoint import settings
from ..checkpoint.config import read_config
from ..checkpoint.fetched import fetch_missing_head
from ..checkpoint.load import DEMO, load
from ..checkpoint.storage.hub import fetch
from ..cli.arguments import check_alone, check_head, check_limits, head_of, load_options, rank_groups
from ..cli.display import one_line_errors
from ..cli.flags import LOADING, MODEL_HELP, add_flags
from ..cli.parser import SHARED_GROUPS, finish, flag_of, parse
from ..files import check_target, write_atomic
from ..layers.passes import compiled_differences, report_differences
from ..pacing.depth import MAX_DRAFT_TOKENS
from . import plot, tune
from .measure import Report, measure
from .report import gain, show, show_growth
from .runs import AUTO, NO_COPIES, NO_DRAFTS, check_sizes

# Built-in sets of prompts, by the value of --prompts.
KINDS: dict[str, Callable[[], dict[str, str]]] = {
    "nine": prompts.nine_kinds,
    "copying": prompts.copying_kinds,
    "python": prompts.python_beginnings,
}
DEMO_NAME = "demo"
GROUPS = {"measurement": ("max_tokens", "repeat", "compare_depths", "tune", "json", "plot"), **SHARED_GROUPS}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_mtp benchmark",
        description="Compare the speed of MTP and plain mlx-lm, alternating on the same prompts.",
        conflict_handler="resolve",  # an added flag replaces the flag of the same name
    )
    _add_measurement(parser)
    _add_outputs(parser)
    _add_prompts(parser)
    add_flags(parser, (*LOADING, "--pipeline"))
    _add_model(parser)
    return finish(parser, GROUPS)


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-tokens", "-m", type=int, default=128, help="Maximum number of tokens for each prompt (default: 128).")
    add("--repeat", type=int, default=5, help="The number of rounds (default: 5).")
    add(
        "--compare-depths",
        nargs="?",
        type=int,
        const=4,
        metavar="K",
        help="Also measure the head at each fixed depth from 1 to K, or to 4 without K.",
    )
    add(
        "--tune",
        nargs="?",
        const=True,
        default=False,
        metavar="FILE",
        help="Measure auto, fixed depths and cheaper drafts against plain decoding, and write the best settings to FILE "
        "(default: one in the user's cache folder, where --mtp finds it).",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="Write the figures to this file.")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="Draw speed by depth into this image; requires --compare-depths.",
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--prompts",
        metavar="FILE|KIND",
        help="A file of prompts, separated by lines of three dashes, or a built-in set: nine (kinds of request), copying "
        "(four prompts with answers that repeat them), python (beginnings of Python files). Default: nine, or python for the "
        "demo.",
    )
    add(
        "--context",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="Lengthen each prompt to about N tokens (default: as it is). With several lengths, measure each and print how "
        "times grow.",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model and its head. The head is always measured, without tuned settings by default."""
    add = parser.add_argument
    add("--model", help=MODEL_HELP)
    add(
        "--mtp",
        nargs="?",
        const=True,
        default=True,
        metavar="HEAD",
        help="Use the head in HEAD, a folder or Hugging Face repo with only a head (default: the model's own).",
    )
    add(
        "--settings",
        metavar="FILE",
        help="Measure with the tuned settings in this file (default: no settings).",
    )


def main() -> None:
    with one_line_errors("mlx_mtp benchmark"):
        run(parse(make_parser()))


def run(args: argparse.Namespace) -> None:
    check_flags(args)
    if args.tune:
        run_tune(args)
        return
    subject = prepare(args)
    runs = (NO_DRAFTS, *range(1, (args.compare_depths or 0) + 1), NO_COPIES, AUTO)
    reports: list[Report] = []
    for tokens in subject.prompts:
        report = measure(
            subject.model,
            tokens,
            runs,
            max_tokens=args.max_tokens,
            repeat=args.repeat,
            stop=subject.stop,
            name=subject.name,
        )
        print(show(report), end="\n\n" if len(subject.prompts) > 1 else "\n")
        reports.append(report)
    if len(reports) > 1:
        print(show_growth(reports, len(subject.model.layers)))
    if mx.distributed.init().rank() == 0:
        write(args, reports)
    names = [f"auto, --context {n}" for n in args.context] if len(reports) > 1 else ["auto"]
    print("", *map(gain, reports, names), sep="\n")


def write(args: argparse.Namespace, reports: Sequence[Report]) -> None:
    """Write the files that the flags request."""
    if args.json:
        write_json(args.json, [asdict(r) for r in reports] if len(reports) > 1 else asdict(reports[0]))
    if args.plot:
        plot.draw(reports[0]).savefig(args.plot, dpi=150)


@dataclass
class Subject:
    """A model and prompts to measure."""

    model: Any
    name: str  # for the report
    prompts: list[Mapping[str, mx.array]]  # at each length
    stop: Collection[int]  # tokens that end a text


def prepare(args: argparse.Namespace) -> Subject:
    options = load_options(args) | {"settings": args.settings or False}
    model, tokenizer = load(args.model or str(DEMO), mtp=head_of(args), **options, **rank_groups(args))
    name = args.model or DEMO_NAME
    name = Path(name).resolve().name if Path(name).exists() else name  # without the path of a folder
    if model.drafting.tuned is not None:
        name += f" with {model.drafting.tuned}"
    return Subject(model, name, [encode_prompts(args, tokenizer, n) for n in args.context], tokenizer.eos_token_ids)


def prompt_kind(args: argparse.Namespace) -> str:
    """The kind of the prompts; a file of prompts is ``own``."""
    if args.prompts:
        return args.prompts if args.prompts in KINDS else "own"
    return "nine" if args.model else "python"


def encode_prompts(args: argparse.Namespace, tokenizer: TokenizerWrapper, context: int) -> dict[str, mx.array]:
    kind = prompt_kind(args)
    texts = KINDS[kind]() if kind in KINDS else prompts.read_prompts(Path(args.prompts))
    return {name: prompts.encode(tokenizer, text, context) for name, text in texts.items()}


def run_tune(args: argparse.Namespace) -> None:
    name = args.model or str(DEMO)
    path = fetch(name, None)
    key = settings.key_of(path, *head_folders(args, name, path))
    file = settings.default_file(key) if args.tune is True else Path(args.tune)
    settings.check_writable(file)
    model, tokenizer = load(name, mtp=head_of(args), draft_vocab=0, settings=False, max_memory=args.max_memory)
    tokens = encode_prompts(args, tokenizer, args.context[0])
    measured = tune.tune(model, tokenizer, tokens, max_tokens=args.max_tokens, repeat=args.repeat)
    print(tune.show(measured))
    print(report_differences(compiled_differences(model, min(tokens.values(), key=len))))
    settings.write(file, key, name, tune.recommend(measured).settings)
    users = "`--mtp` and `mlx_mtp.load` use it from now on" if args.tune is True else f"`--settings {file}` uses it"
    print(f"Written to {file}: {users}.")
    if args.json:
        write_json(args.json, [asdict(m) for m in measured])


def head_folders(args: argparse.Namespace, name: str, path: Path) -> list[Path]:
    """The folder of a head from outside the checkpoint."""
    if isinstance(args.mtp, str):
        return [fetch(args.mtp, None)]
    head = fetch_missing_head(name, path, read_config(path, name))
    return [] if head is None else [head.folder]


def write_json(file: Path, value: Any) -> None:
    write_atomic(file, json.dumps(value, indent=2) + "\n")


def check_flags(args: argparse.Namespace) -> None:
    """Check the flags before anything is measured.

    Raises:
        ValueError: A flag is out of range or cannot be combined with another.
    """
    check_alone(args, "tune")
    check_head(args)
    check_sizes(args.max_tokens, args.repeat)
    if args.tune:
        check_tune(args)
    if prompt_kind(args) not in KINDS:
        prompts.read_prompts(Path(args.prompts))
    check_limits(vars(args), {"compare_depths": (1, MAX_DRAFT_TOKENS)})
    if min(args.context) < 0:
        raise ValueError(f"--context must be a number of tokens, not {min(args.context)}.")
    for flag in (flag for flag in ("tune", "plot") if len(args.context) > 1 and getattr(args, flag)):
        raise ValueError(f"--{flag} takes one length: give --context one number.")
    for file in (args.json, args.plot):
        if file:
            check_target(file)
    if args.plot:
        if args.compare_depths is None:
            raise ValueError("--plot draws speed by depth and requires --compare-depths.")
        plot.check(args.plot)


def check_tune(args: argparse.Namespace) -> None:
    fixed = ("compare_depths", "plot", "draft_vocab", "mtp_bits", "draft_head_bits")
    for flag in (flag for flag in fixed if getattr(args, flag) is not None):
        raise ValueError(f"--tune chooses the settings to measure: remove {flag_of(flag)}.")
    if args.repeat < 2:
        raise ValueError("--tune requires --repeat 2 or more: it compares a gain with the spread of the rounds.")
    if args.settings is not None:
        raise ValueError(
            "--tune measures without settings: remove --settings. To write another file, give --tune FILE."
        )
    if args.tune is not True:
        settings.check_writable(Path(args.tune))


if __name__ == "__main__":
    main()
