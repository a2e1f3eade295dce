"""The flags of several commands. Nothing here imports mlx-lm: ``--help`` answers at once."""

import argparse
from collections.abc import Iterable
from typing import Any, get_args

from ..checkpoint import AUTO, DTYPES
from ..core.pacing import MAX_COPY_TOKENS, MAX_DRAFT_TOKENS
from ..core.sampling import PARAMETERS, AcceptanceName
from .parser import byte_size, flag_of, number_or

MODEL_HELP = "Local directory or Hugging Face repo (default: the bundled demo)."  # the help of --model
TEMPLATE_HELP = """JSON for the chat template, e.g. '{"enable_thinking":false}'"""
LOADING = (  # see ``load_options``
    "--draft-vocab", "--mtp-bits", "--draft-head-bits", "--settings", "--dtype", "--max-memory", "--ngram-memory",
)  # fmt: skip
_FLAGS: dict[str, tuple[dict[str, Any], str]] = {  # the options of each, and its help text
    "--mtp": (
        {"nargs": "?", "const": True, "metavar": "HEAD"},
        "Draft with the model's multi-token-prediction head, and download its base model's once if the checkpoint has "
        "none. HEAD selects another: a folder or Hugging Face repo with only a head (such as model type qwen3_5_mtp). "
        "Without this flag, a model drafts if it has its head or the head was downloaded before.",
    ),
    "--no-mtp": (
        {"dest": "mtp", "action": "store_const", "const": False},
        "Generate as mlx-lm does, without the head.",
    ),
    "--num-draft-tokens": (
        {"metavar": "auto|N", "type": number_or("auto")},
        f"Number of tokens to draft per step, up to {MAX_DRAFT_TOKENS}, or auto: the fastest number at each step "
        "(default: from the tuned settings, or auto).",
    ),
    "--copy-drafts": (
        {"metavar": "auto|off|N", "type": number_or("auto", "off")},
        "Draft by prompt lookup: if the text repeats itself, copy the tokens that followed. auto copies when this is "
        f"faster than the head's drafts; N copies N tokens at a time, up to {MAX_COPY_TOKENS}. Works without "
        "a head. Defaults to off without a head or with a number of --num-draft-tokens, and to auto otherwise.",
    ),
    "--acceptance": (
        {"choices": get_args(AcceptanceName)},
        "How sampled drafts are accepted; all three sample from the model's distribution. rejection accepts the most "
        "drafts; coupled gives one text for a prompt and a seed, with any number of drafts and without any; match samples "
        "as mlx-lm. Defaults to coupled with a seed and to rejection without one.",
    ),
    "--draft-vocab": (
        {"type": int, "metavar": "N"},
        "Draft from the first N token ids, the special tokens and the tokens of the text; verification uses the whole "
        "vocabulary. 0 is the whole vocabulary. Defaults to the tuned settings, or 0.",
    ),
    "--mtp-bits": (
        {"type": int, "metavar": "BITS"},
        "Quantize the head's decoder layer to this many bits on loading. Defaults to no quantization.",
    ),
    "--draft-head-bits": (
        {"type": int, "metavar": "BITS"},
        "Draft with a copy of lm_head in this many bits; verification uses lm_head itself. Defaults to no copy.",
    ),
    "--settings": (
        {"default": True, "metavar": "FILE|off", "type": lambda x: False if x == "off" else x},
        "Settings file of `mlx_mtp benchmark --tune`; off uses no settings. Defaults to a file in the user's cache "
        "folder, if there is one. Ignored with --draft-vocab, --draft-head-bits or --mtp-bits.",
    ),
    "--dtype": (
        {"choices": (AUTO, *DTYPES), "default": AUTO},
        "Type of weights that are not quantized, and so of activations and caches. auto is the checkpoint's; on M1 and "
        "M2, which have no bfloat16 arithmetic, it is float16 in place of bfloat16.",
    ),
    "--max-memory": (
        {"type": byte_size, "metavar": "SIZE"},
        "Maximum memory of the process, such as 20GB. A model that needs more is refused before loading. Defaults to "
        "MLX's limit on this machine.",
    ),
    "--ngram-memory": (
        {"action": argparse.BooleanOptionalAction},
        "Load the n-gram table of Qwen3.8-Flash-Next into memory, or read its rows from the files. Defaults to loading "
        "it if the model with it takes at most 60%% of the memory.",
    ),
    "--images": (
        {"action": "store_true"},
        "Accept images. If the checkpoint has no vision encoder, its base model's is downloaded once. A checkpoint "
        "with one accepts images without this flag if it drafts.",
    ),
    "--prompt-cache-dir": (
        {"metavar": "DIR"},
        "Folder for prompt caches, which one process uses at a time. A cached beginning of a prompt is not prefilled "
        "again, even after a restart. The folder contains the texts.",
    ),
    "--pipeline": ({"action": "store_true"}, "Use pipelining instead of tensor parallelism, with mlx.launch."),
}
FLAGS = {flag: {**options, "help": text} for flag, (options, text) in _FLAGS.items()}


def add_flags(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    for name in names:
        parser.add_argument(name, **FLAGS[name])


def add_drafting(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``generate`` and ``chat`` share, and help texts for mlx-lm's flags that differ here."""
    add = parser.add_argument
    add("--model", type=str, help=MODEL_HELP)
    add("--max-kv-size", type=int, help="Set the maximum key-value cache size, without drafts.")
    add(
        "--seed",
        type=int,
        help="PRNG seed (default: none, so sampled texts differ between runs). With drafts, the prompt and the seed "
        "determine the text: see --acceptance.",
    )
    add_flags(parser, ("--mtp", "--no-mtp", "--copy-drafts", "--num-draft-tokens"))
    add(
        "--draft-p-min",
        type=float,
        help="Stop drafting when the head's best token has a lower probability (default: from the tuned settings, or 0.0).",
    )
    add(
        "--show-drafts",
        action="store_true",
        help="Color tokens by the source of their drafts, in a terminal.",
    )
    for name, more in (
        ("--acceptance", " Without a head, defaults to match."),
        ("--prompt-cache-dir", " Requires a head or --copy-drafts."),
    ):
        add(name, **FLAGS[name] | {"help": FLAGS[name]["help"] + more})
    add_flags(parser, (*LOADING, "--pipeline"))


def add_sampling(parser: argparse.ArgumentParser, are_advised: bool = True) -> None:
    """Add the sampling flags, whose defaults are those of the model's generation_config.json if ``are_advised``."""
    for name, parameter in PARAMETERS.items():
        default = parameter.default
        file = "the model's generation_config.json"
        told = f"from {file}, or {default}" if are_advised else f"{default}, whatever {file} says"
        parser.add_argument(
            flag_of(name),
            type=parameter.type,
            default=None if are_advised else default,
            help=f"{parameter.metadata['text']} (default: {told}).",
        )
