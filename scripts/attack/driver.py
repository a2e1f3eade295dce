"""What the attacks share: the command line, and cases that each have random numbers of their own."""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

MakeCase = Callable[[random.Random], dict[str, Any]]


def attack(random_case: MakeCase, run_case: Callable[..., None], count: int, seed: int) -> int:
    """Run cases, of which each that raises is printed -> how many did."""
    n_failed = 0
    for i in tqdm(range(count), disable=None):
        case = random_case(random.Random(f"{seed} {i}"))
        try:
            run_case(**case)
        except Exception as e:
            n_failed += 1
            print(f"case {i} of seed {seed}: {type(e).__name__}: {e}\n{case}", flush=True)
    return n_failed


def arguments(description: str, count: int, flags: Sequence[str] = ()) -> argparse.Namespace:
    """Of the command line: ``count``, ``seed``, and these flags."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()


def main(description: str, random_case: MakeCase, run_case: Callable[..., None], count: int) -> None:
    args = arguments(description, count)
    n_failed = attack(random_case, run_case, args.count, args.seed)
    print(f"{args.count} cases, {n_failed} failed")
    sys.exit(n_failed > 0)
