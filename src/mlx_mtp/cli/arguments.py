"""Conversion of flags to arguments of the library's functions."""

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import Sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.prompt_cache import has_head
from ..checkpoint.fetched import head_to_fetch
from ..checkpoint.generation_config import Sampling, sampling_defaults
from ..checkpoint.load import DEMO, DEMO_NOTE, check_family
from ..distributed.ranks import Ranks
from ..drafts.options import asks_for_copies
from ..prompt_store import PromptStore
from ..sampling.sampler import AcceptanceName, make_sampler
from .flags import SAMPLING
from .parser import flag_of


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
