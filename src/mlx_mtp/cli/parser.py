"""The parsers of the commands: groups of flags, defaults in the help, and suggestions for unknown flags."""

import argparse
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mlx_lm.utils import _parse_size

from .._version import __version__

# Flags whose text may be empty.
TEXTS = (
    "prompt",
    "system_prompt",
    "prefill_response",
    "chat_template",
    "chat_template_config",
    "allowed_origins",
    "api_key",
)
# The groups of --help and their flags, in this order.
SHARED_GROUPS: dict[str, Sequence[str]] = {
    "model": (
        "model", "synthetic", "assume_acceptance", "served_model_name", "adapter_path", "serve_model", "allow_any_model",
        "trust_remote_code", "quantize_activations",
    ),
    "prompt": (
        "prompt", "prompts", "context", "system_prompt", "image", "images", "prefill_response", "thinking", "chat_template",
        "use_default_chat_template", "ignore_chat_template", "chat_template_config", "chat_template_args",
        "extra_eos_token",
    ),
    "drafts": (
        "mtp", "copy_drafts", "acceptance", "draft_p_min", "exact", "check", "show_drafts", "figures", "draft_vocab",
        "draft_head_bits", "mtp_bits", "settings", "num_draft_tokens", "draft_model",
    ),
    "sampling": (
        "max_tokens", "json_schema", "temp", "top_p", "top_k", "min_p", "min_tokens_to_keep", "xtc_probability",
        "xtc_threshold", "seed",
    ),
    "caches": (
        "prefill_step_size", "max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start", "prompt_cache_file",
        "prompt_cache_dir", "prompt_cache_size", "prompt_cache_bytes", "prompt_cache_disk_bytes", "max_memory",
    ),
    "requests": (
        "host", "port", "print_config", "api_key", "api_key_file", "allowed_origins", "allowed_hosts",
        "allowed_local_media_path", "allowed_media_domains", "no_ui", "log_level", "max_queue", "decode_concurrency",
        "prompt_concurrency", "max_token_gap", "min_decode_share",
    ),
    "machines": ("pipeline",),
}  # fmt: skip


class Given(argparse.Action):
    """Stores a flag's value, and ``has_NAME``: whether the command line has the flag."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"has_{self.dest}", True)


def extend(parser: argparse.ArgumentParser, program: str, description: str) -> argparse.ArgumentParser:
    """Make a parser with mlx-lm's flags. A flag that is added replaces mlx-lm's flag of the same name."""
    options: dict[str, Any] = {"conflict_handler": "resolve", "add_help": False}  # the parent has -h
    return argparse.ArgumentParser(prog=program, description=description, parents=[parser], **options)


def finish(
    parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[str]] = SHARED_GROUPS
) -> argparse.ArgumentParser:
    """Sort the flags of a parser into groups, show their defaults, and add ``--version``. Return the parser.

    Args:
        groups (Mapping[str, Sequence[str]]): The flags of each group, by title; a flag belongs to the first group with it.
    """
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    ungrouped, flags = parser._optionals._group_actions, {a.dest: a for a in parser._actions}
    for title, names in groups.items():
        if found := [flags[name] for name in names if flags.get(name) in ungrouped]:
            group = parser.add_argument_group(title)
            for action in found:
                ungrouped.remove(action)
                group._group_actions.append(action)
    for action in flags.values():
        text, default = action.help or "", action.default
        is_value = isinstance(default, (str, int, float)) and default not in ("", argparse.SUPPRESS)
        if is_value and default is not False and action.nargs != 0 and "efault" not in text:
            action.help = text.removesuffix(".") + " (default: %(default)s)" + "." * text.endswith(".")
    required = [f"{a.option_strings[0]} {a.metavar or a.dest.upper()}" for a in flags.values() if a.required]
    parser.usage = " ".join(["%(prog)s", *required, "[flags]"])
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ValueError: The value of a flag is empty.
    """
    args, unknown = parser.parse_known_args()
    if unknown:
        similar = _similar(unknown, parser._option_string_actions)
        question = f": did you mean {' '.join(similar)}?" if similar else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{question}")
    for name, value in vars(args).items():
        if name not in TEXTS and "" in (value if isinstance(value, list) else [value]):
            raise ValueError(f"{flag_of(name)} is empty: give it a value, or leave it out.")
    return args


def _similar(unknown: Sequence[str], flags: Iterable[str]) -> list[str]:
    """The flag that is most similar to an unknown one, if any."""
    words = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    return [match for word in words for match in difflib.get_close_matches(word, flags, n=1, cutoff=0.75)]


def number_or(*words: str) -> Callable[[str], str | int]:
    """The type of a flag with a number or one of these words."""

    def convert(text: str) -> str | int:
        try:
            return text if text in words else int(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(f"must be {', '.join(words)} or a number, not {text!r}") from e

    return convert


def byte_size(text: str) -> int:
    """The type of a flag with a size as in mlx-lm, such as 10GB."""
    try:
        return int(_parse_size(text))
    except (ArithmeticError, KeyError, ValueError) as e:
        raise argparse.ArgumentTypeError(f"must be a size such as 10GB, not {text!r}") from e


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
