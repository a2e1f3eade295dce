"""Output of commands: tables, colors of tokens, progress bars, and runs before those that are timed."""

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOBase
from typing import Any, TextIO

from tqdm import tqdm

from ..distributed.ranks import Ranks
from ..traces import n_traces

# By source: green, yellow and blue. The model's own tokens have the terminal's color, and a prompt is dim.
COLORS = {"head": 32, "copies": 33, "grammar": 34, "prompt": 2}
DELAY = 1.0  # seconds that a prompt takes without a bar
SECONDS = 30  # between two lines in a log
MOST_REPEATS = 6  # of a run that is not timed
LINE = "[INFO] {desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed} elapsed, {remaining} left"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as columns no wider than the terminal: the first aligned left, the others right.

    Columns that do not fit are printed below, with the first column repeated. A row may have fewer columns.
    """
    columns = range(max(map(len, rows)))
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in columns]
    parts, used = [[0]], widths[0]
    for i in columns[1:]:
        used += 2 + widths[i]
        if used > shutil.get_terminal_size().columns and parts[-1] != [0]:
            parts.append([0])
            used = widths[0] + 2 + widths[i]
        parts[-1].append(i)
    lines = []
    for part in parts:
        lines += [""] * (part is not parts[0])
        for row in rows:
            cells = [f"{row[i]:>{widths[i]}}" for i in part[1:] if i < len(row)]
            lines.append("  ".join([f"{row[0]:<{widths[0]}}", *cells]).rstrip())
    return lines


def paint(text: str, source: str) -> str:
    """A text in its source's color. Without color if stdout is not a terminal."""
    if source not in COLORS or not text or not sys.stdout.isatty():
        return text
    return f"\033[{COLORS[source]}m{text}\033[0m"


def say(text: str) -> None:
    """Print a line at once, also to a file."""
    print(f"[INFO] {text}", flush=True)


@contextmanager
def prompt_progress() -> Iterator[Callable[[int, int], None]]:
    """The callback of a progress bar on stderr, if that is a terminal. The bar disappears after prefill."""
    with tqdm(desc="Processing the prompt", unit=" tokens", delay=DELAY, leave=False, disable=None) as bar:

        def show(n_processed: int, n_prompt: int) -> None:
            bar.total = n_prompt
            bar.update(n_processed - bar.n)
            if n_processed >= n_prompt:
                bar.close()

        yield show


def bar(desc: str, unit: str, total: int, disable: bool = False) -> "tqdm[Any]":
    """A progress bar on stderr, shown from the start, with the estimated time left. In a log, a line from time to time.

    Args:
        unit (str): The unit, in the singular.
    """
    how: dict[str, Any] = {}
    if not sys.stderr.isatty():
        how = {"file": _Lines(sys.stderr), "bar_format": LINE, "mininterval": SECONDS, "miniters": 1}
    return tqdm(desc=desc, unit=unit, total=total, disable=disable or total == 0, **how)


def prepare(runs: Iterable[Callable[[], Any]], ranks: Ranks | None = None) -> None:
    """Repeat each run until it makes no trace, since a first run is slower: traces are made once in a process, and MLX's CPU
    backend compiles kernels once on a machine.

    Args:
        runs (Iterable[Callable]): Whole runs as those that are timed afterwards. With other shapes, other traces are made.
    """
    description = "Preparing: kernels are compiled once on a machine"
    with tqdm(desc=description, unit="run", leave=False, disable=None) as progress:
        for run in runs:
            for _ in range(MOST_REPEATS):
                n_before = n_traces()
                run()
                progress.update()
                made = n_traces() > n_before
                if not (made if ranks is None else ranks.broadcast(made)):
                    break


class _Lines(TextIOBase):
    """A stream that writes each state of a progress bar as a line."""

    def __init__(self, stream: TextIO):
        self.stream, self.last = stream, ""

    def write(self, text: str) -> int:
        state = text.strip()
        if state not in ("", self.last):  # a bar is drawn again when it is closed
            print(state, file=self.stream, flush=True)
            self.last = state
        return len(text)
