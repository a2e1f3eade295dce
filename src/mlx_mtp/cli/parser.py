"""The parsers of the commands: defaults in the help, and suggestions for unknown flags."""

import argparse
import json
import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from .._version import __version__
from ..errors import MTPError

# Flags whose text may be empty.
TEXTS = (
    "prompt", "system_prompt", "prefill_response", "chat_template", "chat_template_config", "allowed_origins", "api_key",
)  # fmt: skip
# Flags of other programs, and the flag of the same use.
SAME_USE = {
    "--temperature": "--temp",
    "--max-new-tokens": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--model-path": "--model",
    "--system": "--system-prompt",
    "--system-message": "--system-prompt",
    "--speculative-config": "--mtp",
    "--num-speculative-tokens": "--num-draft-tokens",
    "--draft-max": "--num-draft-tokens",
}
# Flags of other programs for the size of the context, which has no limit here but the memory.
CONTEXT = ("--ctx", "--ctx-size", "--n-ctx", "--num-ctx", "--context-size", "--context-length", "--max-model-len")


def extend(parser: argparse.ArgumentParser, program: str, description: str) -> argparse.ArgumentParser:
    """Make a parser with mlx-lm's flags. A flag that is added replaces mlx-lm's flag of the same name."""
    options: dict[str, Any] = {"conflict_handler": "resolve", "add_help": False}  # the parent has -h
    return argparse.ArgumentParser(prog=program, description=description, parents=[parser], **options)


def finish(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Show the defaults of flags in the help, and add ``--version``. Return the parser."""
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    for action in parser._actions:
        text = action.help or ""
        default = action.default
        is_value = isinstance(default, (str, int, float)) and default not in ("", argparse.SUPPRESS)
        if is_value and default is not False and action.nargs != 0 and "efault" not in text:
            action.help = text.removesuffix(".") + " (default: %(default)s)" + "." * text.endswith(".")
    required = [f"{a.option_strings[0]} {a.metavar or a.dest.upper()}" for a in parser._actions if a.required]
    parser.usage = " ".join(["%(prog)s", *required, "[flags]"])
    return parser


def parse(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse words, by default the command line, or raise an MTPError if a flag is unknown or its value is empty."""
    args, unknown = parser.parse_known_args(words)
    if unknown:
        raise MTPError(_explain(unknown, parser._option_string_actions))
    for name, value in vars(args).items():
        if name not in TEXTS and "" in (value if isinstance(value, list) else [value]):
            raise MTPError(f"{flag_of(name)} is empty: give it a value, or leave it out.")
    return args


def check_limits(values: Mapping[str, Any], limits: Mapping[str, tuple[float, float]]) -> None:
    """Raise an MTPError if the value of a flag is not within its limits. Missing flags and ``None`` are not checked."""
    for name, (low, high) in limits.items():
        value = values.get(name)
        if value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"{low} or more" if high == math.inf else f"from {low} to {high}"
            raise MTPError(f"{flag_of(name)} must be {allowed}, not {value}.")


def _explain(unknown: Sequence[str], flags: Collection[str]) -> str:
    meant: list[str] = []
    if "--q-bits" in flags and (of_head := [word for word in unknown if word.startswith("--mtp-")]):
        other = "other commands quantize it in memory, with --mtp-bits"
        return f"The head stays in bfloat16: leave out {of_head[0]}; {other}."
    for word in (word.partition("=")[0] for word in unknown if word.startswith("-")):
        if word in CONTEXT and "--context" not in flags:
            return (
                f"There is no {word}: a context grows with the text, up to the model's own limit. --max-tokens limits the "
                "answer, and --max-memory the memory."
            )
        same = SAME_USE.get(word, word)
        meant += [same] if same in flags else get_close_matches(word, flags, n=1, cutoff=0.75)
    if not unknown[0].startswith("-") and (flag := next((f for f in ("--prompt", "--model") if f in flags), None)):
        what = flag.removeprefix("--")
        return f"{unknown[0]!r} is not a flag: give the {what} with {flag} {shlex.quote(unknown[0])}"
    question = f": did you mean {' '.join(meant)}?" if meant else ""
    return f"unrecognized arguments: {' '.join(unknown)}{question}"


def number_or(*words: str) -> Callable[[str], str | int]:
    def convert(text: str) -> str | int:
        try:
            return text if text in words else int(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(f"must be {', '.join(words)} or a number, not {text!r}") from e

    return convert


def byte_size(text: str) -> int:
    from mlx_lm.utils import _parse_size  # a second

    try:
        return int(_parse_size(text))
    except (ArithmeticError, KeyError, ValueError) as e:
        raise argparse.ArgumentTypeError(f"must be a size such as 10GB, not {text!r}") from e


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as e:
        raise argparse.ArgumentTypeError(f"must be JSON, not {text!r}: {e}") from e
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text}")
    return value


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
