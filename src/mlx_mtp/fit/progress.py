"""How far a part of a fit has come: a bar in a terminal; elsewhere, such as in a log, a line now and then."""

import sys
from io import TextIOBase
from typing import Any, TextIO

from tqdm import tqdm

SECONDS = 30  # between two lines
LINE = "[INFO] {desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed} elapsed, {remaining} left"


class _Lines(TextIOBase):
    """A stream for a bar, each state of which becomes a line."""

    def __init__(self, stream: TextIO):
        self.stream, self.last = stream, ""

    def write(self, text: str) -> int:
        state = text.strip()
        if state not in ("", self.last):  # a bar is drawn again when it is closed
            print(state, file=self.stream, flush=True)
            self.last = state
        return len(text)


def say(text: str) -> None:
    """Print a line at once, also to a file."""
    print(f"[INFO] {text}", flush=True)


def bar(desc: str, unit: str, total: int, disable: bool = False) -> "tqdm[Any]":
    """A bar on stderr, which is shown from the start, with an estimate of the time that is left.

    Args:
        desc (str): The work.
        unit (str): The unit, in the singular.
        total (int): How many there are.
        disable (bool): Show nothing. Default: ``False``.
    """
    how: dict[str, Any] = {}
    if not sys.stderr.isatty():
        how = {"file": _Lines(sys.stderr), "bar_format": LINE, "mininterval": SECONDS, "miniters": 1}
    return tqdm(desc=desc, unit=unit, total=total, disable=disable or total == 0, **how)
