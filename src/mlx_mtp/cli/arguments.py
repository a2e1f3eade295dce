"""Checks of the flags of several commands, whose errors name the flag, and their conversion to arguments of the library."""

import argparse
import math
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.sample_utils import Sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.prompt_cache import has_head
from ..caches.validation import BITS, GROUP_SIZES
from ..checkpoint.fetched import head_to_fetch
from ..checkpoint.load import DEMO, DEMO_NOTE, check_family
from ..checkpoint.settings import RANGES, Sampling, sampling_defaults
from ..distributed.ranks import Ranks
from ..drafts.options import asks_for_copies, check_copy_drafts, check_num_draft_tokens
from ..files import make_folder
from ..prompt_store import PromptStore
from ..sampling.sampler import AcceptanceName, make_sampler
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


def head_of(args: argparse.Namespace) -> bool | str:
    """The ``mtp`` of ``mlx_mtp.load``. Without a flag, nothing is downloaded for drafts."""
    if args.mtp is None:
        return "cached"
    return "auto" if args.mtp is True else args.mtp


def check_drafts_possible(args: argparse.Namespace) -> None:
    """Raise a ValueError for ``--mtp`` with a model of a family that only mlx-lm supports, before the download."""
    if args.mtp is True:
        check_family(args.model)


def may_draft(args: argparse.Namespace) -> bool:
    """Whether the flags allow drafts of the model's head, or request copies."""
    return args.mtp is not False or asks_for_copies(args.copy_drafts)


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``mlx_mtp.load`` for the flags of ``LOADING``."""
    return {
        name: getattr(args, name) for name in ("draft_vocab", "mtp_bits", "draft_head_bits", "settings", "max_memory")
    }


def rank_groups(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``mlx_mtp.load`` that divide a model among the processes of ``mlx.launch``."""
    group = mx.distributed.init()
    if group.size() == 1:
        return {}
    return {"pipeline_group" if args.pipeline else "tensor_group": group}


def given_sampling(args: argparse.Namespace) -> dict[str, float]:
    """The sampling parameters on the command line, by the names of ``Sampling``."""
    return {field: getattr(args, flag) for flag, field in SAMPLING.items() if getattr(args, f"has_{flag}")}


def set_sampling(args: argparse.Namespace, ranks: Ranks | None) -> Sampling:
    """Set sampling flags that are not on the command line to the model's defaults. Return all sampling parameters."""
    sampling = sampling_defaults(args.model, given_sampling(args), ranks)
    for flag, field in SAMPLING.items():
        setattr(args, flag, getattr(sampling, field))
    return sampling


def sampler_of(args: argparse.Namespace, tokenizer: TokenizerWrapper, turn: int = 0) -> Sampler:
    """Make the sampler for the flags. With a seed, each turn of a conversation has a seed of its own."""
    acceptance: AcceptanceName | None = args.acceptance or ("match" if args.mtp is False else None)
    is_seeded = args.seed is not None and acceptance in (None, "coupled")  # others use MLX's random state
    return make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        args.top_k,
        args.xtc_probability,
        args.xtc_threshold,
        tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
        acceptance=acceptance,
        seed=(args.seed + turn) % 2**64 if is_seeded else None,
    )


def open_prompt_store(args: argparse.Namespace, model: Any) -> AbstractContextManager[PromptStore | None]:
    """The prompt store for the flags, if any."""
    return nullcontext() if args.prompt_cache_dir is None else PromptStore(model, folder=args.prompt_cache_dir)


def missing_head_note(name: str) -> str | None:
    """A line about the head that ``--mtp`` would download for a model that was loaded without one, if there is one."""
    with suppress(OSError, ValueError):  # other families of models
        if (found := head_to_fetch(name)) is not None:
            source, n_bytes = found
            return f"Generating without drafts: --mtp downloads the MTP head of {source} once, {n_bytes / 1e9:.2f} GB."
    return None


def check_without_head(args: argparse.Namespace, advice: str) -> None:
    """Raise a ValueError with this advice if a flag requires a head."""
    needs = [name for name in ("check", "draft_p_min") if getattr(args, name, None)]
    if getattr(args, "draft_model", None) is None and args.num_draft_tokens is not None:
        needs.append("num_draft_tokens")
    if args.acceptance == "rejection":
        needs.append("acceptance")
    if not asks_for_copies(args.copy_drafts):
        needs += [name for name in ("show_drafts", "prompt_cache_dir") if getattr(args, name, None)]
    if needs:
        raise ValueError(f"{flag_of(needs[0])} requires an MTP head: {advice}")


def settle_drafts(args: argparse.Namespace, model: Any) -> None:
    """Set ``mtp`` to whether the loaded model has a head, and print notes: the demo, its head, and tuned settings.

    Raises:
        ValueError: There is no head, and a flag requires it.
    """
    has_none = not has_head(model)
    if has_none:
        check_without_head(args, f"{args.model} has none here: --mtp downloads one, or takes one with --mtp HEAD.")
    if has_none and args.mtp is None and (note := missing_head_note(args.model)) is not None:
        print(note, file=sys.stderr)
    args.mtp = not has_none
    if args.model == str(DEMO):
        print(f"{DEMO_NOTE}. `mlx_mtp models` lists real models.", file=sys.stderr)
    if args.mtp and (fetched := model.fetched_head) is not None:
        when = "fetched to" if fetched.is_new else "fetched before to"
        print(f"MTP head: of {fetched.source}, {fetched.nbytes / 1e6:.1f} MB, {when} {fetched.folder}", file=sys.stderr)
        accepted = fetched.acceptance(model.fingerprint())
        print(f"Drafts accepted on built-in text: {accepted or 0:.0%}", file=sys.stderr)
    if args.mtp and model.drafting.tuned is not None:
        given = {name: getattr(args, name) for name in ("num_draft_tokens", "draft_p_min")}
        used = replace(model.drafting.tuned, **{name: value for name, value in given.items() if value is not None})
        print(f"Using tuned settings: {used} (--settings off ignores them)", file=sys.stderr)


# Checks


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
