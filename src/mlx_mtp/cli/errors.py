"""Errors in one line, and the output of several processes."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import mlx.core as mx

from ..distributed.ranks import LOST, is_loss

INTERRUPTED = 130  # exit status after Ctrl-C
OTHERS = 3.0  # seconds in which mlx.launch ends the other ranks
BROKEN_PIPE = 141  # exit status after SIGPIPE
SYSTEM_ERRORS: dict[type[OSError], str] = {
    FileNotFoundError: "There is no file or folder {}.",
    FileExistsError: "{} exists already.",
    IsADirectoryError: "{} is a folder: name a file.",
    NotADirectoryError: "{} is below a file, which is not a folder.",
    PermissionError: "You have no permission to use {}.",
}


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """A context that exits with status 2 and one line for a user's error, with 130 after Ctrl-C, and silently with 141 if the
    reader of the output has ended, as in ``| head``.

    Of the processes of ``mlx.launch``, only rank 0 prints, and others where rank 0 has no error. If one ends, MLX raises an
    error in the others, or ``mlx.launch`` ends them.
    """
    group = mx.distributed.init()
    with _silent_on_broken_pipe(), rank_0_prints():
        try:
            yield
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as e:
            error = f"{program}: error: {' '.join(sentence(e).split())}"
            if group.rank() != 0:
                time.sleep(OTHERS)  # an error of all ranks is printed once
                error = f"Rank {group.rank()}: {error}"
            print(error, file=sys.stderr if group.rank() == 0 else sys.__stderr__, flush=True)
            sys.exit(2)
        except RuntimeError as e:
            if not is_loss(e):
                raise
            print(f"{program}: error: {LOST}", file=sys.stderr)
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)


def sentence(error: ValueError | OSError) -> str:
    """The message of an error, without the number of system errors."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None:
        return f"{error.strerror}."
    for kind, text in SYSTEM_ERRORS.items():
        if isinstance(error, kind):
            return text.format(error.filename)
    return f"{error.filename}: {error.strerror}."


@contextmanager
def _silent_on_broken_pipe() -> Iterator[None]:
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        # Python flushes unwritten output again at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        sys.exit(BROKEN_PIPE)


@contextmanager
def rank_0_prints() -> Iterator[None]:
    """A context that silences output, warnings and bars of all processes but rank 0. Tracebacks are printed after it."""
    if mx.distributed.init().rank() == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
