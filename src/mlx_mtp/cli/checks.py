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
from ..files import check_source, make_folder
from ..images.open import size_of
from .arguments import asks_for_drafts
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

    Without ``--mtp``, an absent ``num_draft_tokens`` becomes mlx-lm's default.

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
    draft_model = getattr(args, "draft_model", None)
    if args.mtp and draft_model is not None:
        raise ValueError("--mtp and --draft-model cannot be combined.")
    n = args.num_draft_tokens
    if args.copy_drafts is not None:
        check_copy_drafts(args.copy_drafts, "--copy-drafts")
    if asks_for_copies(args.copy_drafts) and draft_model is not None:
        raise ValueError("--copy-drafts and --draft-model cannot be combined.")
    if asks_for_copies(args.copy_drafts) and not args.mtp and n is not None:
        raise ValueError(
            "--num-draft-tokens requires --mtp or --draft-model: with only --copy-drafts there is no head."
        )
    if n is None and not args.mtp:
        args.num_draft_tokens = n = 3
    if n == "auto" and not args.mtp:
        raise ValueError("--num-draft-tokens auto requires --mtp.")
    if args.mtp and n is not None:
        check_num_draft_tokens(n, "--num-draft-tokens")
    if not args.mtp and n < 1:
        raise ValueError(f"--num-draft-tokens must be 1 or more, not {n}.")
    acceptance = getattr(args, "acceptance", None)
    if acceptance == "rejection" and not args.mtp:
        raise ValueError("--acceptance rejection requires --mtp.")
    if acceptance == "coupled" and draft_model is not None:
        raise ValueError("--acceptance coupled cannot be combined with --draft-model.")
    if getattr(args, "show_drafts", False) and not asks_for_drafts(args):
        raise ValueError("--show-drafts requires --mtp or --copy-drafts.")
    for name in ("check", "draft_p_min"):
        if getattr(args, name, None) and not args.mtp:
            raise ValueError(f"{flag_of(name)} requires --mtp.")
    images = getattr(args, "images", False)
    if (asks_for_drafts(args) or images) and getattr(args, "max_kv_size", None) is not None:
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


def check_prompt_cache_dir(args: argparse.Namespace, *flags: str, requires_drafts: bool = True) -> None:
    """
    Args:
        flags (str): Flags that cannot be combined with it.
        requires_drafts (bool): Whether it needs ``--mtp`` or ``--copy-drafts``. Default: ``True``.

    Raises:
        OSError: ``--prompt-cache-dir`` cannot be written to.
        ValueError: It requires drafts and the model does not draft, or it is combined with one of the flags.
    """
    if args.prompt_cache_dir is None:
        return
    if requires_drafts and not asks_for_drafts(args):
        raise ValueError("--prompt-cache-dir requires --mtp or --copy-drafts.")
    for name in flags:
        if getattr(args, name):
            raise ValueError(f"--prompt-cache-dir and {flag_of(name)} cannot be combined.")
    make_folder(Path(args.prompt_cache_dir), "--prompt-cache-dir")


def check_images(args: argparse.Namespace) -> None:
    """
    Raises:
        FileNotFoundError: A file of ``--image`` is missing.
        ValueError: It is not an image.
    """
    for file in args.image or ():
        if file.startswith("data:") or asks_for_drafts(args):
            size_of(file)
        else:  # in other families of models, mlx-lm opens images
            check_source(Path(file), "--image")


def check_alone(args: argparse.Namespace, *flags: str) -> None:
    """Raise a ValueError if there are several processes and one of the flags, which are for one process, is given."""
    if (n := mx.distributed.init().size()) > 1:
        for name in flags:
            if getattr(args, name):
                raise ValueError(f"{flag_of(name)} runs in one process, not in {n}: leave it out.")
