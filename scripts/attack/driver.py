"""The command line that the attacks share."""

import argparse
from collections.abc import Sequence


def arguments(description: str, count: int, flags: Sequence[str] = ()) -> argparse.Namespace:
    """Of the command line: ``count``, ``seed``, and these flags."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()
