"""One command for all: ``mlx_mtp generate ...`` is ``mlx_mtp.generate ...``."""

import sys
from difflib import get_close_matches
from importlib import import_module

from ._version import __version__

COMMANDS = {
    "demo": ("mlx_mtp.generate.demo", "compare plain decoding with drafts, on one prompt"),
    "generate": ("mlx_mtp.generate.__main__", "generate text"),
    "chat": ("mlx_mtp.chat.__main__", "chat with a model"),
    "server": ("mlx_mtp.server.__main__", "serve a model to clients and coding agents"),
    "convert": ("mlx_mtp.convert.__main__", "convert a checkpoint, keep or add its head"),
    "benchmark": ("mlx_mtp.benchmark.__main__", "measure the speed on this machine, and tune it"),
    "fit": ("mlx_mtp.fit.__main__", "train a head for a fine-tune"),
    "draft_vocab": ("mlx_mtp.draft_vocab", "choose the tokens that are drafted"),
    "models": ("mlx_mtp.about.models", "list published models by the names that --model takes"),
    "doctor": ("mlx_mtp.about.doctor", "check this machine and a model"),
    "cache": ("mlx_mtp.about.cache", "list and remove fetched heads"),
}
HELP = "\n".join(
    [
        "usage: mlx_mtp COMMAND [flags]",
        "",
        *(f"  {name:<13}{use}" for name, (_, use) in COMMANDS.items()),
        "",
        "`mlx_mtp COMMAND --help` lists the flags of a command.",
    ]
)


def main() -> None:
    command = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if command in ("", "-h", "--help"):
        print(HELP)
    elif command == "--version":
        print(f"mlx_mtp {__version__}")
    elif command in COMMANDS:
        import_module(COMMANDS[command][0]).main()
    else:
        near = get_close_matches(command, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(COMMANDS)}."
        print(f"mlx_mtp: error: There is no command {command}: {hint}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
