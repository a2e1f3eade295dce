"""Checks of the flags of several commands. Errors name the flag."""

import argparse
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from mlx_lm.models.cache import QuantizedKVCache

from ..caches.validation import BITS, GROUP_SIZES
from ..checkpoint.generation_config import RANGES
from ..drafts.options import asks_for_copies, check_copy_drafts, check_num_draft_tokens
from ..files import make_folder
from .arguments import check_without_head, may_draft
from .flags import SAMPLING
from .parser import flag_of

# The lowest and the highest value of each flag.
LIMITS: dict[str, tuple[float, float]] = {
    **{flag: RANGES[field] for flag, field in SAMPLING.items()},
    "min_tokens_to_keep": (1, math.inf),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "seed": (0, 2**64 - 1),
    "prefill_step_size": (1, math.inf),
    "max_kv_size": (1, math.inf),
    "quantized_kv_start": (0, math.inf),
    "draft_p_min": (0, 1),
}
LONGEST_NAME = 60  # characters of a wrong name in an error


def check_limits(values: Mapping[str, Any], limits: Mapping[str, tuple[float, float]]) -> None:
    """Raise a ValueError if the value of a flag is not within its limits. Missing flags and ``None`` are not checked."""
    for name, (low, high) in limits.items():
        value = values.get(name)
        if value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"{low} or more" if high == math.inf else f"from {low} to {high}"
            raise ValueError(f"{flag_of(name)} must be {allowed}, not {value}.")


def check_generation_flags(args: argparse.Namespace) -> None:
    """Check the flags of sampling, sizes and drafts before anything is loaded.

    ``--draft-model`` and ``--max-kv-size`` turn off the head, and an absent ``num_draft_tokens`` of a draft model becomes
    mlx-lm's default.

    Raises:
        ValueError: A flag is out of range or cannot be combined with another.
    """
    check_limits(vars(args), LIMITS)
    if args.max_tokens < 1 and args.max_tokens != -1:
        raise ValueError(f"--max-tokens must be 1 or more, or -1 for no limit, not {args.max_tokens}.")
    for name, values in (("kv_bits", BITS), ("kv_group_size", GROUP_SIZES)):
        value = getattr(args, name, None)
        if value is not None and value not in values:
            raise ValueError(f"{flag_of(name)} must be one of {', '.join(map(str, values))}, not {value}.")
    _check_drafting(args)


def _check_drafting(args: argparse.Namespace) -> None:
    check_head(args)
    draft_model, max_kv_size = getattr(args, "draft_model", None), getattr(args, "max_kv_size", None)
    if args.mtp is None and (draft_model is not None or max_kv_size is not None):
        args.mtp = False
    if args.mtp and draft_model is not None:
        raise ValueError("--mtp and --draft-model cannot be combined.")
    if args.copy_drafts is not None:
        check_copy_drafts(args.copy_drafts, "--copy-drafts")
    if asks_for_copies(args.copy_drafts) and draft_model is not None:
        raise ValueError("--copy-drafts and --draft-model cannot be combined.")
    if args.acceptance == "coupled" and draft_model is not None:
        raise ValueError("--acceptance coupled cannot be combined with --draft-model.")
    if draft_model is not None:
        args.num_draft_tokens = 3 if args.num_draft_tokens is None else args.num_draft_tokens  # mlx-lm's default
        if args.num_draft_tokens == "auto" or args.num_draft_tokens < 1:
            raise ValueError(f"--num-draft-tokens must be 1 or more, not {args.num_draft_tokens}.")
    elif args.num_draft_tokens is not None:
        check_num_draft_tokens(args.num_draft_tokens, "--num-draft-tokens")
    if args.mtp is False:
        check_without_head(args, "remove --no-mtp, --draft-model or --max-kv-size.")
    if (may_draft(args) or getattr(args, "images", False)) and max_kv_size is not None:
        flag = "--mtp" if args.mtp else "--copy-drafts" if asks_for_copies(args.copy_drafts) else "--images"
        raise ValueError(f"{flag} cannot be combined with --max-kv-size: the caches of these models do not rotate.")


def check_head(args: argparse.Namespace) -> None:
    """Raise a ValueError if the value of ``--mtp`` cannot be a head, such as a prompt."""
    if not isinstance(args.mtp, str) or os.path.isdir(args.mtp):
        return
    try:
        validate_repo_id(args.mtp)
        is_name = "/" in args.mtp  # a repository name has a user
    except HFValidationError:
        is_name = False
    if not is_name:
        prompt = " Pass the prompt with --prompt." if hasattr(args, "prompt") else ""
        text = args.mtp if len(args.mtp) <= LONGEST_NAME else f"{args.mtp[:LONGEST_NAME]}..."
        raise ValueError(f"--mtp takes a head, and {text!r} is neither a folder nor the name of a repository.{prompt}")


def check_model_flags(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    """Raise a ValueError if a flag does not fit the model of this config."""
    text_config = config.get("text_config", config)
    vocab_size, head_dim = text_config.get("vocab_size"), text_config.get("head_dim")
    if vocab_size is not None:
        for name, high in (("top_k", vocab_size - 1), ("min_tokens_to_keep", vocab_size)):
            if getattr(args, name, 0) > high:
                raise ValueError(
                    f"{flag_of(name)} must be at most {high} for a vocabulary of {vocab_size} tokens, "
                    f"not {getattr(args, name)}."
                )
    if getattr(args, "kv_bits", None) is not None and head_dim is not None:
        row = mx.zeros((1, 1, 1, head_dim))
        try:
            mx.eval(QuantizedKVCache(args.kv_group_size, args.kv_bits).update_and_fetch(row, row))
        except ValueError as e:
            raise ValueError(
                f"--kv-bits {args.kv_bits} with --kv-group-size {args.kv_group_size} does not fit the model, whose "
                f"attention heads have {head_dim} values: use --kv-bits 4 or 8 and --kv-group-size 32 or 64."
            ) from e


def check_prompt_cache_dir(args: argparse.Namespace, *flags: str) -> None:
    """
    Args:
        flags (str): Flags that cannot be combined with it.

    Raises:
        OSError: ``--prompt-cache-dir`` cannot be written to.
        ValueError: It is combined with one of the flags.
    """
    if args.prompt_cache_dir is None:
        return
    for name in flags:
        if getattr(args, name):
            raise ValueError(f"--prompt-cache-dir and {flag_of(name)} cannot be combined.")
    make_folder(Path(args.prompt_cache_dir), "--prompt-cache-dir")


def check_alone(args: argparse.Namespace, *flags: str) -> None:
    """Raise a ValueError if there are several processes and one of the flags, which are for one process, is given."""
    if (n := mx.distributed.init().size()) > 1:
        for name in flags:
            if getattr(args, name):
                raise ValueError(f"{flag_of(name)} runs in one process, not in {n}: leave it out.")
