"""The command ``mlx_mtp server``, which first checks that its libraries are installed."""

import argparse
import sys

from ..cli.display import one_line_errors, say
from ..errors import require

NAME = "mlx_mtp server"


def make_parser() -> argparse.ArgumentParser:
    require("server", NAME)
    from .command_line import make_parser

    return make_parser()


def main() -> None:
    with one_line_errors(NAME):
        require("server", NAME)
        say("Importing mlx-lm and the server", sys.stderr)  # which takes seconds
    from .serve import main

    main()


if __name__ == "__main__":
    main()
