"""The parsers of the commands: groups of flags, defaults in the help, and suggestions for unknown flags."""

import argparse
import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from mlx_lm.utils import _parse_size

from .._version import __version__
from ..errors import MTPError

# Flags whose text may be empty.
TEXTS = (
    "prompt", "system_prompt", "prefill_response", "chat_template", "chat_template_config", "allowed_origins", "api_key",
)  # fmt: skip
# The groups of --help and their flags, in this order.
SHARED_GROUPS: dict[str, Sequence[str]] = {
    "model": (
        "model", "served_model_name", "adapter_path", "serve_model", "allow_any_model",
        "trust_remote_code", "dtype", "quantize_activations", "unload_after", "keep_warm",
    ),
    "prompt": (
        "prompt", "prompts", "context", "system_prompt", "image", "images", "prefill_response", "thinking", "chat_template",
        "use_default_chat_template", "ignore_chat_template", "chat_template_config", "chat_template_args",
        "extra_eos_token",
    ),
    "drafts": (
        "mtp", "copy_drafts", "acceptance", "draft_p_min", "check", "show_drafts", "draft_vocab", "draft_head_bits",
        "mtp_bits", "settings", "num_draft_tokens", "draft_model",
    ),
    "sampling": (
        "max_tokens", "json_schema", "temp", "top_p", "top_k", "min_p", "min_tokens_to_keep", "xtc_probability",
        "xtc_threshold", "seed",
    ),
    "caches": (
        "prefill_step_size", "max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start", "prompt_cache_file",
        "prompt_cache_dir", "prompt_cache_size", "prompt_cache_bytes", "prompt_cache_disk_bytes", "max_memory", "ngram_memory",
    ),
    "requests": (
        "host", "port", "print_config", "api_key", "api_key_file", "allowed_origins", "allowed_hosts",
        "no_ui", "log_level", "max_queue", "decode_concurrency",
        "prompt_concurrency", "max_token_gap", "min_decode_share",
    ),
    "machines": ("pipeline",),
}  # fmt: skip

# Flags and commands of earlier versions, and what to use instead, such as "--old": "use --new".
REMOVED = {
    "--mtp-bits": "generate, chat, server and benchmark quantize the head in memory with it. convert keeps it in 16 bits.",
    "--mtp-group-size": "--mtp-bits of generate, chat, server and benchmark chooses the size of groups.",
    "--print-completion": "the flags of a command are in its --help.",
    "cache": "`mlx_mtp doctor` shows the folder of downloaded heads; delete those that you do not need.",
    "draft_vocab": "--draft-vocab N drafts from the first N token ids, the special tokens and the tokens of the text.",
    "--allowed-media-domains": "the client downloads an image and sends a data URL.",
    "--allowed-local-media-path": "the client reads an image and sends a data URL.",
    "--no-figures": "the line below each answer is always printed.",
    "--cache-gb": "mlx_mtp fit records no more texts than --iters and --batch-size train on.",
    "--lora-rank": "mlx_mtp fit writes the whole head, beside links to the model's files.",
    "--report": "--json FILE writes the machine and the figures.",
    "--assume-acceptance": "python -m benchmarks.synthetic --acceptance RATE in a checkout.",
    "--synthetic": "time random weights with `python -m benchmarks.synthetic` in a checkout.",
    "--exact": "for the bits of plain decoding, decode plainly with --no-mtp. --check compares the two.",
}
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


def finish(
    parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[str]] = SHARED_GROUPS
) -> argparse.ArgumentParser:
    """Sort the flags of a parser into groups, show their defaults, and add ``--version``. Return the parser."""
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    ungrouped = parser._optionals._group_actions
    for title, names in groups.items():
        if found := [action for name in names for action in ungrouped if action.dest == name]:
            group = parser.add_argument_group(title)
            for action in found:
                ungrouped.remove(action)
                group._group_actions.append(action)
    for action in parser._actions:
        text, default = action.help or "", action.default
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


def _explain(unknown: Sequence[str], flags: Collection[str]) -> str:
    words = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    for word in words:
        if word in REMOVED:
            return f"{word} was removed: {REMOVED[word]}"
        if word in CONTEXT and "--context" not in flags:
            return (
                f"There is no {word}: a context grows with the text, up to the model's own limit. --max-tokens limits the "
                "answer, and --max-memory the memory."
            )
    if not unknown[0].startswith("-") and (flag := next((f for f in ("--prompt", "--model") if f in flags), None)):
        what = flag.removeprefix("--")
        return f"{unknown[0]!r} is not a flag: give the {what} with {flag} {shlex.quote(unknown[0])}"
    meant = [m for word in words for m in _meant(word, flags)]
    question = f": did you mean {' '.join(meant)}?" if meant else ""
    return f"unrecognized arguments: {' '.join(unknown)}{question}"


def _meant(word: str, flags: Collection[str]) -> list[str]:
    same = SAME_USE.get(word, word)
    return [same] if same in flags else get_close_matches(word, flags, n=1, cutoff=0.75)


def number_or(*words: str) -> Callable[[str], str | int]:
    def convert(text: str) -> str | int:
        try:
            return text if text in words else int(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(f"must be {', '.join(words)} or a number, not {text!r}") from e

    return convert


def byte_size(text: str) -> int:
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
