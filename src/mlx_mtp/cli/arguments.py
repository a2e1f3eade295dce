"""The values of flags: their checks, and their conversion to arguments of the library."""

import argparse
import math
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.sample_utils import Sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint import DEMO, DEMO_NOTE
from ..checkpoint.config import family_in
from ..checkpoint.heads.originals import head_to_fetch
from ..checkpoint.load import load
from ..checkpoint.resolve import check_family
from ..core.caches.validation import BITS, GROUP_SIZES
from ..core.drafts.options import TextOptions, asks_for_copies
from ..core.layers.mtp import has_head
from ..core.sampling import PARAMETERS, AcceptanceName
from ..core.sampling.sampler import make_sampler
from ..errors import MTPError
from ..files import make_folder
from ..prompt_store import PromptStore
from .flags import LOADING
from .parser import check_limits, flag_of

# The lowest and the highest value of flags for which no library has an error.
LIMITS: dict[str, tuple[float, float]] = {
    "prefill_step_size": (1, math.inf),
    "max_kv_size": (1, math.inf),
    "quantized_kv_start": (0, math.inf),
    "port": (0, 65535),
    "decode_concurrency": (1, 1 << 16),
    "prompt_concurrency": (1, 1 << 16),
    "prompt_cache_size": (0, 1 << 31),
    "max_queue": (1, 1 << 31),
    "unload_after": (0.01, math.inf),
    "keep_warm": (0, math.inf),
}


# Their conversion


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``mlx_mtp.load`` for ``LOADING``, the head, and the processes of ``mlx.launch``."""
    options = {name: getattr(args, name) for name in (flag[2:].replace("-", "_") for flag in LOADING)}
    options["mtp"] = {None: "cached", True: "auto"}.get(args.mtp, args.mtp)  # without a flag, nothing is downloaded
    if (group := mx.distributed.init()).size() > 1:
        options["pipeline_group" if args.pipeline else "tensor_group"] = group
    return options


def load_model(args: argparse.Namespace, needs_ours: bool, **options: Any) -> Any:
    """Seed MLX, and load the model of ``generate`` and ``chat``, ours also without a head if ``needs_ours``."""
    if args.mtp is True:
        check_family(args.model)
    if args.seed is not None:
        mx.random.seed(args.seed)
    trust: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    options["tokenizer_config"] = {**options.get("tokenizer_config", {}), **trust}
    return load(
        args.model,
        adapter_path=args.adapter_path,
        copy_drafts=needs_ours or asks_for_copies(args.copy_drafts) or args.prompt_cache_dir is not None,
        return_config=True,
        **trust,
        **{**load_options(args), **options},
    )


def text_options(args: argparse.Namespace) -> TextOptions:
    return TextOptions(**{field.name: getattr(args, field.name, None) for field in fields(TextOptions)})


def given_sampling(args: argparse.Namespace) -> dict[str, float]:
    return {p.name: value for name, p in PARAMETERS.items() if (value := getattr(args, name)) is not None}


def sampler_of(args: argparse.Namespace, tokenizer: TokenizerWrapper, turn: int = 0) -> Sampler:
    """Make the sampler for the flags. With a seed, each turn of a conversation has a seed of its own."""
    acceptance: AcceptanceName | None = args.acceptance or ("match" if args.mtp is False else None)
    is_seeded = args.seed is not None and acceptance in (None, "coupled")  # others use MLX's random state
    return make_sampler(
        **_sampling(args),
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
        acceptance=acceptance,
        seed=(args.seed + turn) % 2**64 if is_seeded else None,
    )


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    return {
        name: value for name in (*PARAMETERS, "min_tokens_to_keep") if (value := getattr(args, name, None)) is not None
    }


def open_prompt_store(args: argparse.Namespace, model: Any) -> AbstractContextManager[PromptStore | None]:
    return nullcontext() if args.prompt_cache_dir is None else PromptStore(model, folder=args.prompt_cache_dir)


def missing_head_note(name: str) -> str | None:
    """A line about the head that ``--mtp`` would download for a model that was loaded without one, if there is one."""
    with suppress(MTPError, OSError):  # other families of models
        if (found := head_to_fetch(name)) is not None:
            source, n_bytes = found
            return f"Generating without drafts: --mtp downloads the MTP head of {source} once, {n_bytes / 1e9:.2f} GB."
    return None


def settle_drafts(args: argparse.Namespace, model: Any) -> None:
    """Set ``mtp`` to whether the loaded model has a head, or raise an MTPError if a flag requires one. Print notes."""
    if not has_head(model):
        check_without_head(args, f"{args.model} has none here: --mtp downloads one, or takes one with --mtp HEAD.")
        if args.mtp is None and (note := missing_head_note(args.model)) is not None:
            print(note, file=sys.stderr)
    args.mtp = has_head(model)
    if args.model == str(DEMO):
        print(f"{DEMO_NOTE}. `mlx_mtp models` lists real models.", file=sys.stderr)
    if args.mtp and (fetched := model.fetched_head) is not None:
        print(f"MTP head: of {fetched.source}, {fetched.nbytes / 1e6:.1f} MB, in {fetched.folder}", file=sys.stderr)
        if model.head_acceptance_rate is not None:
            print(f"Drafts accepted on built-in text: {model.head_acceptance_rate:.0%}", file=sys.stderr)
    if args.mtp and model.draft_settings.are_tuned:
        given = {name: getattr(args, name) for name in ("num_draft_tokens", "draft_p_min")}
        used = replace(
            model.draft_settings.tuned, **{name: value for name, value in given.items() if value is not None}
        )
        print(f"Using tuned settings: {used} (--settings off ignores them)", file=sys.stderr)


# Their checks. Others are the library's, whose errors name the argument.


def check_generation_flags(args: argparse.Namespace) -> None:
    """Raise an MTPError if a flag is out of range or contradicts another. ``--max-kv-size`` turns off the head."""
    check_limits(vars(args), LIMITS)
    if args.max_tokens < 1 and args.max_tokens != -1:
        raise MTPError(f"--max-tokens must be 1 or more, or -1 for no limit, not {args.max_tokens}.")
    for name, values in (("kv_bits", BITS), ("kv_group_size", GROUP_SIZES)):
        value = getattr(args, name, None)
        if value is not None and value not in values:
            raise MTPError(f"{flag_of(name)} must be one of {', '.join(map(str, values))}, not {value}.")
    make_sampler(**_sampling(args), seed=getattr(args, "seed", None))
    check_head(args)
    text_options(args).check()
    copies = asks_for_copies(args.copy_drafts)
    max_kv_size = getattr(args, "max_kv_size", None)
    if args.mtp is None and max_kv_size is not None:
        args.mtp = False
    if args.mtp is False:
        check_without_head(args, "remove --no-mtp or --max-kv-size.")
    if max_kv_size is not None and (args.mtp is not False or copies or getattr(args, "images", False)):
        flag = "--mtp" if args.mtp else "--copy-drafts" if copies else "--images"
        raise MTPError(f"{flag} cannot be combined with --max-kv-size: the caches of these models do not rotate.")


def check_without_head(args: argparse.Namespace, advice: str) -> None:
    needs = [name for name in ("check", "draft_p_min") if getattr(args, name, None)]
    if args.num_draft_tokens is not None:
        needs.append("num_draft_tokens")
    if args.acceptance == "rejection":
        needs.append("acceptance")
    if not asks_for_copies(args.copy_drafts):
        needs += [name for name in ("show_drafts", "prompt_cache_dir") if getattr(args, name, None)]
    if needs:
        raise MTPError(f"{flag_of(needs[0])} requires an MTP head: {advice}")


def check_head(args: argparse.Namespace) -> None:
    """Raise an MTPError if the value of ``--mtp`` cannot be a head, such as a prompt."""
    if not isinstance(args.mtp, str) or os.path.isdir(args.mtp):
        return
    with suppress(HFValidationError):
        validate_repo_id(args.mtp)
        if "/" in args.mtp:  # a repository name has a user
            return
    text = args.mtp[:60] + "..." * (len(args.mtp) > 60)
    prompt = " Pass the prompt with --prompt." if hasattr(args, "prompt") else ""
    raise MTPError(f"--mtp takes a head, and {text!r} is neither a folder nor the name of a repository.{prompt}")


def check_model_flags(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    """Raise an MTPError if a flag does not fit the model of this config; mlx-lm would in the middle of a text."""
    text_config = config.get("text_config", config)
    size = text_config.get("vocab_size")
    head_dim = text_config.get("head_dim")
    kv_bits = getattr(args, "kv_bits", None)
    if size is not None:
        check_limits(vars(args), {"top_k": (0, size - 1), "min_tokens_to_keep": (1, size)})
    family = family_in(dict(config))
    if kv_bits is not None and family is not None and family.no_kv_bits is not None:
        raise MTPError(f"--kv-bits {kv_bits} is refused: {family.no_kv_bits}. Omit it.")
    if kv_bits is not None and head_dim is not None:
        row = mx.zeros((1, 1, 1, head_dim))
        try:
            mx.eval(QuantizedKVCache(args.kv_group_size, kv_bits).update_and_fetch(row, row))
        except ValueError as e:
            raise MTPError(
                f"--kv-bits {kv_bits} with --kv-group-size {args.kv_group_size} does not fit the model, whose attention "
                f"heads have {head_dim} values: use --kv-bits 4 or 8 and --kv-group-size 32 or 64."
            ) from e


def check_prompt_cache_dir(args: argparse.Namespace, *flags: str) -> None:
    """Raise an error if ``--prompt-cache-dir`` cannot be written to, or is combined with one of the flags."""
    if args.prompt_cache_dir is None:
        return
    for name in flags:
        if getattr(args, name):
            raise MTPError(f"--prompt-cache-dir and {flag_of(name)} cannot be combined.")
    make_folder(Path(args.prompt_cache_dir), "--prompt-cache-dir")


def check_alone(args: argparse.Namespace, *flags: str) -> None:
    """Raise an MTPError if one of the flags, which are for one process, is given to several."""
    if (n := mx.distributed.init().size()) > 1:
        for name in flags:
            if getattr(args, name):
                raise MTPError(f"{flag_of(name)} runs in one process, not in {n}: leave it out.")
