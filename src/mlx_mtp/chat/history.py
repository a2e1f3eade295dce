"""The lines that the user has typed: arrow keys edit them and bring earlier ones back, also those of earlier chats."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_state_path

from ..cli.errors import sentence

LINES = 1000  # that are kept


def history_file() -> Path:
    return user_state_path("mlx_mtp", appauthor=False) / "chat_history"


@contextmanager
def history(file: Path) -> Iterator[None]:
    """Inside, ``input`` edits lines in a terminal and knows those in this file, to which it adds."""
    try:
        import readline
    except ImportError:  # not every Python is built with it
        print("This Python has no readline: the arrow keys do not work.", file=sys.stderr)
        yield
        return
    readline.set_history_length(LINES)
    with _told("read"):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            readline.read_history_file(file)
    try:
        yield
    finally:
        with _told("kept"):
            readline.write_history_file(file)


@contextmanager
def _told(done: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        print(f"The history is not {done}: {sentence(e)}", file=sys.stderr)
