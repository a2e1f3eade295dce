"""What the command lines share: flags of models that draft, checks of flags, and errors in one line."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, get_args

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from .checkpoint.vocabulary import LIST_FILE
from .decoding.depth import MAX_COPY_TOKENS, MAX_DRAFT_TOKENS
from .decoding.loop import asks_for_copies
from .decoding.sampling import AcceptanceName
from .distributed.ranks import Ranks
from .distributed.watch import watch

INTERRUPTED = 130  # the exit status of a program that Ctrl-C has ended
KV_BITS, KV_GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)  # of MLX's quantization
# The lowest and the highest value of each flag.
LIMITS: dict[str, tuple[float, float]] = {
    "temp": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (0, math.inf),
    "min_tokens_to_keep": (1, math.inf),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "seed": (0, 2**64 - 1),
    "prefill_step_size": (1, math.inf),
    "max_kv_size": (1, math.inf),
    "quantized_kv_start": (0, math.inf),
    "draft_p_min": (0, 1),
}


@contextmanager
def one_line_errors(program: str, on_loss: Sequence[Callable[[str], None]] = ()) -> Iterator[None]:
    """Exit with status 2 and one line for an error of the user's, and with 130 when interrupted.

    Of the processes of ``mlx.launch``, rank 0 prints, and where one is lost, the others call ``on_loss`` and end.
    """
    group = mx.distributed.init()
    with rank_0_prints():
        try:
            with watch(Ranks(group) if group.size() > 1 else None, on_loss=on_loss):
                yield
        except (ValueError, OSError) as e:
            print(f"{program}: error: {' '.join(str(e).split())}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)


@contextmanager
def rank_0_prints() -> Iterator[None]:
    """Inside, the other processes of ``mlx.launch`` are silent: output, warnings and bars. A traceback comes after it."""
    if mx.distributed.init().rank() == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """Add mlx-lm's flag of several machines."""
    parser.add_argument(
        "--pipeline",
        action="store_true",
        help="With mlx.launch, use pipelining instead of tensor parallelism.",
    )


def groups(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``mlx_mtp.load`` that say how the processes of ``mlx.launch`` run the model together."""
    group = mx.distributed.init()
    if group.size() == 1:
        return {}
    return {"pipeline_group" if args.pipeline else "tensor_group": group}


def check_alone(args: argparse.Namespace, *flags: str) -> None:
    """
    Raises:
        ValueError: There are several processes, and one of the flags, which run in one alone, is given.
    """
    if (n := mx.distributed.init().size()) > 1:
        for name in flags:
            if getattr(args, name):
                raise ValueError(f"{_flag(name)} runs in one process, not in {n}: leave it out.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a model that drafts."""
    parser.add_argument(
        "--draft-vocab",
        metavar="N|FILE",
        type=lambda x: int(x) if x.isdecimal() else x,
        help="Draft from the first N token ids, or from those in a file of mlx_mtp.draft_vocab; verification uses the whole "
        f"vocabulary. 0 is the whole vocabulary. Defaults to {LIST_FILE} beside the checkpoint where there is one.",
    )
    parser.add_argument(
        "--mtp-bits", type=int, help="Quantize the head's decoder layer on loading. Defaults to no quantization."
    )
    parser.add_argument(
        "--draft-head-bits", type=int, help="Quantize a copy of lm_head for the drafts alone. Defaults to no copy."
    )
    parser.add_argument(
        "--settings",
        default=True,
        metavar="FILE|off",
        type=lambda x: False if x == "off" else x,
        help="Settings that `python -m mlx_mtp.benchmark --tune` has written; off ignores them. Defaults to a file in the "
        "user's cache folder, if there is one. Ignored when one of the three flags above is given.",
    )


def add_acceptance(parser: argparse.ArgumentParser, without_mtp: str = "") -> None:
    """Add the flag that says how sampled drafts are accepted; ``without_mtp`` is its default then, in a sentence."""
    parser.add_argument(
        "--acceptance",
        choices=get_args(AcceptanceName),
        help="How sampled drafts are accepted; the distribution is the model's in each case. rejection accepts the most; "
        "coupled makes the text a function of the prompt and the seed alone, the same at every depth and without --mtp; match "
        "draws the tokens of mlx-lm with the same seed. Defaults to coupled with a seed and to rejection without."
        + without_mtp,
    )


def add_copy_drafts(parser: argparse.ArgumentParser) -> None:
    """Add the flag of copy drafts."""
    parser.add_argument(
        "--copy-drafts",
        metavar="auto|off|N",
        type=lambda x: x if x in ("auto", "off") else int(x),
        help="Where the text repeats itself, draft what followed there: auto, wherever that is faster than the head's drafts, "
        f"or N tokens at a time, up to {MAX_COPY_TOKENS}. Also without --mtp, for a model without a head. Defaults to off "
        "without --mtp and with a number of --num-draft-tokens, and to auto otherwise.",
    )


def check_copy_drafts(args: argparse.Namespace) -> None:
    """Raise a ValueError if ``--copy-drafts`` is out of range."""
    n = getattr(args, "copy_drafts", None)
    if isinstance(n, int) and not 1 <= n <= MAX_COPY_TOKENS:
        raise ValueError(f"--copy-drafts must be auto, off or from 1 to {MAX_COPY_TOKENS}, not {n}.")


def copies(args: argparse.Namespace) -> bool:
    """Whether ``--copy-drafts`` asks for copies."""
    return asks_for_copies(getattr(args, "copy_drafts", None))


def drafts(args: argparse.Namespace) -> bool:
    """Whether the flags ask for drafts of the model's head or for copies."""
    return bool(args.mtp) or copies(args)


def auto_or_number(text: str) -> str | int:
    """The type of ``--num-draft-tokens``."""
    return text if text == "auto" else int(text)


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``mlx_mtp.load`` that the flags of ``add_arguments`` give."""
    return {name: getattr(args, name) for name in ("draft_vocab", "mtp_bits", "draft_head_bits", "settings")}


def check_generation_flags(args: argparse.Namespace, no_limit: bool = True) -> None:
    """
    Check the flags of sampling, sizes and drafts that a command line has, before anything is loaded.

    Without ``--mtp``, ``num_draft_tokens`` becomes mlx-lm's default where it was not given.

    Args:
        args (argparse.Namespace): The parsed flags; a flag that the command line lacks is not checked.
        no_limit (bool): Allow ``--max-tokens -1``, which is no limit. Default: ``True``.

    Raises:
        ValueError: A flag is out of range, or does not go with another.
    """
    for name, (low, high) in LIMITS.items():
        value = getattr(args, name, None)
        if value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"{low} or more" if high == math.inf else f"from {low} to {high}"
            raise ValueError(f"{_flag(name)} must be {allowed}, not {value}.")
    if args.max_tokens < 1 and not (no_limit and args.max_tokens == -1):
        allowed = "1 or more, or -1 for no limit" if no_limit else "1 or more"
        raise ValueError(f"--max-tokens must be {allowed}, not {args.max_tokens}.")
    for name, values in (("kv_bits", KV_BITS), ("kv_group_size", KV_GROUP_SIZES)):
        value = getattr(args, name)
        if value is not None and value not in values:
            raise ValueError(f"{_flag(name)} must be one of {', '.join(map(str, values))}, not {value}.")
    _check_drafting(args)


def _check_drafting(args: argparse.Namespace) -> None:
    if args.mtp and args.draft_model is not None:
        raise ValueError("--mtp and --draft-model cannot be combined.")
    n = args.num_draft_tokens
    check_copy_drafts(args)
    if copies(args) and args.draft_model is not None:
        raise ValueError("--copy-drafts and --draft-model cannot be combined.")
    if copies(args) and not args.mtp and n is not None:
        raise ValueError(
            "--num-draft-tokens requires --mtp or --draft-model: with --copy-drafts alone there is no head."
        )
    if n is None and not args.mtp:
        args.num_draft_tokens = n = 3
    if n == "auto" and not args.mtp:
        raise ValueError("--num-draft-tokens auto requires --mtp.")
    if args.mtp and isinstance(n, int) and not 0 <= n <= MAX_DRAFT_TOKENS:
        raise ValueError(f"--num-draft-tokens must be auto or from 0 to {MAX_DRAFT_TOKENS}, not {n}.")
    if not args.mtp and n < 1:
        raise ValueError(f"--num-draft-tokens must be 1 or more, not {n}.")
    acceptance = getattr(args, "acceptance", None)
    if acceptance == "rejection" and not args.mtp:
        raise ValueError("--acceptance rejection requires --mtp.")
    if acceptance == "coupled" and args.draft_model is not None:
        raise ValueError("--acceptance coupled cannot be combined with --draft-model.")


def check_model_flags(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    """
    Check the flags that depend on the model, once its config is known.

    Args:
        args (argparse.Namespace): The parsed flags.
        config (Mapping[str, Any]): The model's config.

    Raises:
        ValueError: A flag does not fit the model.
    """
    text_config = config.get("text_config", config)
    vocab_size, head_dim = text_config.get("vocab_size"), text_config.get("head_dim")
    if vocab_size is not None:
        for name, high in (("top_k", vocab_size - 1), ("min_tokens_to_keep", vocab_size)):
            if getattr(args, name, 0) > high:
                raise ValueError(
                    f"{_flag(name)} must be at most {high} for a vocabulary of {vocab_size} tokens, "
                    f"not {getattr(args, name)}."
                )
    if args.kv_bits is not None and head_dim is not None:
        row = mx.zeros((1, 1, 1, head_dim))
        try:
            mx.eval(QuantizedKVCache(args.kv_group_size, args.kv_bits).update_and_fetch(row, row))
        except ValueError as e:
            raise ValueError(
                f"--kv-bits {args.kv_bits} with --kv-group-size {args.kv_group_size} does not fit the model, whose "
                f"attention heads have {head_dim} values: use --kv-bits 4 or 8 and --kv-group-size 32 or 64."
            ) from e


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
