"""The command ``mlx_mtp``: ``mlx_mtp generate ...`` runs ``mlx_mtp.generate ...``."""

import sys
from difflib import get_close_matches
from itertools import takewhile
from pkgutil import resolve_name

from ._version import __version__
from .cli.display import one_line_errors
from .errors import MTPError

PARSERS = "mlx_mtp.cli.parsers"
# The place of each command, that of its parser, which imports less, and its use
COMMANDS = {
    "demo": ("mlx_mtp.generate.demo:main", f"{PARSERS}:demo_parser", "compare generation with and without drafts"),
    "generate": ("mlx_mtp.generate.__main__:main", f"{PARSERS}:generate_parser", "generate text"),
    "chat": ("mlx_mtp.chat:main", f"{PARSERS}:chat_parser", "chat with a model"),
    "server": (
        "mlx_mtp.server.__main__:main",
        "mlx_mtp.server.__main__:make_parser",
        "serve a model to apps and coding agents",
    ),
    "launch": ("mlx_mtp.launch:main", "mlx_mtp.launch:make_parser", "start a coding agent with a server of its own"),
    "convert": (
        "mlx_mtp.convert.__main__:main",
        f"{PARSERS}:convert_parser",
        "convert a model, and keep or add its MTP head",
    ),
    "benchmark": (
        "mlx_mtp.benchmark.__main__:main",
        f"{PARSERS}:benchmark_parser",
        "measure the speed, and find the fastest settings",
    ),
    "fit": ("mlx_mtp.fit.__main__:main", "mlx_mtp.fit.__main__:make_parser", "train the MTP head of a fine-tune"),
    "models": ("mlx_mtp.about:models", f"{PARSERS}:models_parser", "list published models and their names"),
    "doctor": ("mlx_mtp.about:doctor", f"{PARSERS}:doctor_parser", "check this machine and a model"),
}
USES = "\n".join(f"  {name:<13}{use}" for name, (*_, use) in COMMANDS.items())
HELP = f"usage: mlx_mtp COMMAND [flags]\n\n{USES}\n\n`mlx_mtp COMMAND --help` lists the flags of a command."


@one_line_errors("mlx_mtp")
def main() -> None:
    command = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if command == "help" and len(sys.argv) > 1:
        command, sys.argv[1:] = sys.argv[1], ["--help"]
    if command in ("", "-h", "--help", "help"):
        print(HELP)
    elif command == "--version":
        print(f"mlx_mtp {__version__}")
    elif command in COMMANDS:
        place, parser, _ = COMMANDS[command]
        if {"-h", "--help"} & {*takewhile("--".__ne__, sys.argv)}:
            resolve_name(parser)().print_help()
        else:
            resolve_name(place)()
    elif command.startswith("-"):
        after = next((word for word in sys.argv[1:] if word in COMMANDS), "COMMAND")
        raise MTPError(f"The command comes first: mlx_mtp {after} {command} ...")
    else:
        near = get_close_matches(command, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(COMMANDS)}."
        raise MTPError(f"There is no command {command}: {hint}")


if __name__ == "__main__":
    main()
