"""What the command lines share: the flags of a model that drafts, and errors in one line."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .checkpoint.vocabulary import LIST_FILE

INTERRUPTED = 130  # the exit status of a program that Ctrl-C has ended


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as e:
        print(f"{program}: error: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a command line that loads a model to draft with."""
    parser.add_argument(
        "--draft-vocab",
        metavar="N|FILE",
        type=lambda x: int(x) if x.isdecimal() else x,
        help="Draft from the first N token ids, or from those in a file of mlx_mtp.draft_vocab; verification is from all. "
        f"0 is all. Defaults to {LIST_FILE} beside the checkpoint, or else to all.",
    )
    parser.add_argument(
        "--mtp-bits", type=int, help="Quantize the head's decoder layer when it is loaded. Defaults to no quantization."
    )
    parser.add_argument(
        "--draft-head-bits", type=int, help="Quantize a copy of lm_head for the drafts alone. Defaults to no copy."
    )
    parser.add_argument(
        "--settings",
        default=True,
        metavar="FILE|off",
        type=lambda x: False if x == "off" else x,
        help="What `python -m mlx_mtp.benchmark --tune` has written, if anything; off is to do without. Defaults to a file in "
        "the user's cache folder. One of the three flags before is enough for it to be left aside.",
    )


def auto_or_number(text: str) -> str | int:
    """The argument of ``--num-draft-tokens``."""
    return text if text == "auto" else int(text)


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``mlx_mtp.load`` that these flags stand for."""
    return {name: getattr(args, name) for name in ("draft_vocab", "mtp_bits", "draft_head_bits", "settings")}
