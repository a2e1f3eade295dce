"""What the command lines do with an error of the user's: one line, exit status 2, no traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as e:
        print(f"{program}: error: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
