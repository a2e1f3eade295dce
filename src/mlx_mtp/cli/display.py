"""Output of commands: tables, colors of tokens, progress bars, errors in one line, and runs before those that are timed."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from itertools import zip_longest
from typing import Any, TextIO, TypeVar

import mlx.core as mx
from tqdm import tqdm

from ..core.distributed import LOST, Ranks, is_loss
from ..core.traces import n_traces
from ..errors import MTPError, advice, as_mtp_error, is_mendable

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")
COLORS = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}
DELAY = 1.0  # seconds that a prompt takes without a bar
MAX_REPEATS = 6  # of a run that is not timed
INTERRUPTED = 130  # exit status after Ctrl-C
OTHERS = 3.0  # seconds in which mlx.launch ends the other ranks
BROKEN_PIPE = 141  # exit status after SIGPIPE


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as columns, the first aligned left. Those that do not fit the terminal are below, with the first repeated."""
    columns: list[list[str]] = []
    for cells in zip_longest(*rows, fillvalue=""):
        align = str.rjust if columns else str.ljust
        columns.append([align(cell, max(map(len, cells))) for cell in cells])
    first = columns[0]
    parts = [[columns[0]]]
    for column in columns[1:]:
        width = len("  ".join(cells[0] for cells in [*parts[-1], column]))
        if width > shutil.get_terminal_size().columns and len(parts[-1]) > 1:
            parts.append([first])
        parts[-1].append(column)
    texts = ["\n".join("  ".join(cells).rstrip() for cells in zip(*part)) for part in parts]
    return "\n\n".join(texts).split("\n")


def paint(text: str, source: str) -> str:
    """A text in its source's color. The model's own has the terminal's, a prompt is dim, and stdout may be no terminal."""
    if source == "model" or not text or not sys.stdout.isatty():
        return text
    from ..core.drafts.sources import source_of  # and mlx-lm, which commands without colors do without

    return f"\033[{2 if source == 'prompt' else COLORS[source_of(source)[1]]}m{text}\033[0m"


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line at once, to stdout or a file."""
    print(f"[INFO] {text}", file=file, flush=True)


def typed(read: Callable[[], str]) -> str:
    """Text of standard input, without a byte order mark. Raises an MTPError if it is not UTF-8."""
    with as_mtp_error("Standard input is not text in UTF-8", UnicodeError):
        text = read().removeprefix("\ufeff")
        text.encode()
    return text


@contextmanager
def prompt_progress() -> Iterator[Callable[[int, int], None]]:
    with tqdm(desc="Processing the prompt", unit=" tokens", delay=DELAY, leave=False, disable=None) as bar:

        def show(n_processed: int, n_prompt: int) -> None:
            bar.total = n_prompt
            bar.update(n_processed - bar.n)
            if n_processed >= n_prompt:
                bar.close()

        yield show


def prepare(runs: Iterable[Callable[[], Any]], ranks: Ranks | None = None) -> None:
    """Repeat each run until it makes no trace: traces are made once in a process, and MLX's CPU kernels once on a machine."""
    description = "Preparing: kernels are compiled once on a machine"
    with tqdm(desc=description, unit="run", leave=False, disable=None) as progress:
        for run in runs:
            for _ in range(MAX_REPEATS):
                n_before = n_traces()
                run()
                progress.update()
                made = n_traces() > n_before
                if not (made if ranks is None else ranks.broadcast(made)):
                    break


def alternate(
    runs: Sequence[R], prompts: Sequence[P], repeat: int, one: Callable[[P, R], T], ranks: Ranks | None = None
) -> list[dict[tuple[P, R], T]]:
    """Make every run on every prompt ``repeat`` times, alternating, after ``prepare`` -> the results of ``one`` by round."""
    prepare((partial(one, prompts[0], run) for run in runs), ranks)
    rounds: list[dict[tuple[P, R], T]] = [{} for _ in range(repeat)]
    with tqdm(total=repeat * len(prompts) * len(runs), disable=None) as progress:
        for i, made in enumerate(rounds):
            for j, prompt in enumerate(prompts):
                for run in in_turn(runs, i + j):
                    progress.set_description(f"{prompt}, {run}")
                    made[prompt, run] = one(prompt, run)
                    progress.update()
    return rounds


def in_turn(runs: Sequence[T], i: int) -> list[T]:
    i %= len(runs)
    return [*runs[i:], *runs[:i]]


# Errors in one line, and the output of several processes


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """A context that exits with one line and status 2 for an error that the user can mend, or 1 for the GPU's, or 130 after
    Ctrl-C. Rank 0 prints, and others where it has no error. The standard streams are those of ``usable_streams``.
    """
    group = mx.distributed.init()
    with usable_streams(program), rank_0_prints():
        try:
            yield
        except BrokenPipeError:
            raise
        except (MTPError, OSError) as e:
            if not is_mendable(e):
                raise
            print(end="", flush=True)  # raises the error again if it is that of the output
            error = f"{program}: error: {' '.join(sentence(e).split())}"
            if group.rank() != 0:
                time.sleep(OTHERS)  # an error of all ranks is printed once
                error = f"Rank {group.rank()}: {error}"
            print(error, file=sys.stderr if group.rank() == 0 else sys.__stderr__, flush=True)
            sys.exit(2)
        except RuntimeError as e:
            if not is_loss(e) and advice(e) is None:
                raise
            print(f"{program}: error: {LOST if is_loss(e) else sentence(e)}", file=sys.stderr)
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)


def sentence(error: Exception) -> str:
    """The message of an error, without the number of system errors, and with advice for those of the GPU."""
    if (remedy := advice(error)) is not None:
        return f"{error} {remedy}"
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{error.strerror}." if error.filename is None else f"{error.filename}: {error.strerror}."


@contextmanager
def usable_streams(program: str) -> Iterator[None]:
    """A context that exits silently with 141 if the reader of the output has ended, and with one line and 1 if a standard
    stream is closed, whose number the next file that is opened would get, or the output cannot be written.
    """
    for stream, name in ((sys.stdin, "input"), (sys.stdout, "output"), (sys.stderr, "error")):
        if stream is None:
            print(f"{program}: error: Standard {name} is closed: give /dev/null.", file=sys.stderr)
            sys.exit(1)
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except OSError as e:
        if not is_mendable(e):
            raise
        status = BROKEN_PIPE if isinstance(e, BrokenPipeError) else 1
        if status == 1:
            with suppress(OSError):
                print(
                    f"{program}: error: {e.filename or 'Standard output'}: {e.strerror}.", file=sys.stderr, flush=True
                )
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # Python writes what is left of them at exit
            os.dup2(nowhere, stream.fileno())
        sys.exit(status)


@contextmanager
def rank_0_prints() -> Iterator[None]:
    """A context that silences output, warnings and bars of all processes but rank 0. Tracebacks are printed after it."""
    if mx.distributed.init().rank() == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
