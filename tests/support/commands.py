"""Commands in this process, which has imported everything, and errors in one line."""

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest


def run_command(main: Callable[[], Any], capsys: Any, *argv: Any, stdin: str = "") -> tuple[int, str, str]:
    """Run the ``main`` of a module of ``mlx_mtp`` -> (exit status, stdout, stderr)."""
    name = main.__module__.removesuffix(".__main__")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, argv)])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            status = main() or 0
        except SystemExit as e:
            status = e.code
    return status, *capsys.readouterr()


def refusal(main: Callable[[], Any], capsys: Any, *argv: Any, stdin: str = "") -> str:
    """The one line of a command that ends with status 2 and prints nothing else."""
    status, out, err = run_command(main, capsys, *argv, stdin=stdin)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    return err


def refused(message: str, call: Callable[..., Any], *args: Any, error: Any = ValueError, **options: Any) -> str:
    """A call raises this error with this message, in one line -> all of it."""
    with pytest.raises(error, match=message) as e:
        call(*args, **options)
    said = str(e.value)
    del e  # its frames would hold what was given until the next garbage collection
    assert "\n" not in said
    return said


def report(text: str) -> dict[str, str]:
    """The lines of a report, ``NAME: VALUE`` each, by their names."""
    return {key: value.strip() for key, colon, value in (line.partition(":") for line in text.splitlines()) if colon}
