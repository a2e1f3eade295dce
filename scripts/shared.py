"""What scripts and benchmarks share: their flags, long texts, and running without a network."""

import argparse
import inspect
import os
import sys
from importlib import import_module
from typing import Any

MODULES = ("argparse", "ast", "bisect", "calendar", "cmd", "configparser", "difflib", "functools")
SOURCES = {name: inspect.getsource(import_module(name)) for name in MODULES}


def script_parser(doc: str | None, **flags: Any) -> argparse.ArgumentParser:
    """
    Args:
        doc (str): The docstring of the program, whose first line the help shows.
        flags (Any): The default of each flag, or (the default, the help). Values have its type, and are several where it
          is a list; ``False`` is a switch.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name, flag in flags.items():
        default, text = flag if isinstance(flag, tuple) else (flag, "")
        names = [f"--{name.replace('_', '-')}", *["-m"] * (name == "max_tokens")]
        if default is False:
            parser.add_argument(*names, action="store_true", help=text)
        else:
            is_list = isinstance(default, list)
            kind, shown = type(default[0] if is_list else default), " ".join(map(str, default)) if is_list else default
            options: dict[str, Any] = {"nargs": "+"} if is_list else {}
            parser.add_argument(*names, type=kind, default=default, help=f"{text} (default: {shown})", **options)
    return parser


def run_without_network(module: str) -> None:
    """Run this program again with ``--inside``, in a network namespace that has nothing but the loopback device, as root."""
    again = [sys.executable, "-m", module, *sys.argv[1:], "--inside"]
    os.execvp("unshare", ["unshare", "-n", "bash", "-c", 'ip link set lo up; exec "$@"', "bash", *again])
