"""What a load is asked for, and what is found for it: the checkpoint, its head, and how they are to be read.

No tensor is read here. What is missing is downloaded, once all checks of configs and headers have passed.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..core.distributed import Ranks, any_rank, from_rank_0, raise_on_all
from ..core.models import MODULES
from ..errors import MTPError
from ..memory import Account, gpu_generation
from . import AUTO, DTYPES
from .adapters import check_adapter
from .checks import dtype as dtypes
from .checks.memory import check_memory
from .config import Config, check_config, family_in, mlx_lm_has, read_config, skeleton
from .heads.acceptance import key_of
from .heads.formats import check_head, fetch_drafter
from .heads.originals import FetchedHead, check_method, fetch_missing_head, fetched_before
from .hub import fetch
from .ngram_files import find_tables
from .part import divide, files_of, make_ranks
from .reader import CheckpointReader, files_to_fetch
from .settings import check_bits, machine
from .settings import read as read_settings

Drafting = tuple[int | None, int | None, int | None]  # draft_vocab, mtp_bits, draft_head_bits

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The arguments of ``load``."""

    name: str
    revision: str | None
    trust_remote_code: bool
    tokenizer_config: Config | None
    model_config: Config
    adapter_path: str | None
    lazy: bool
    mtp: bool | str
    copy_drafts: bool
    drafting: Drafting
    vision: bool | str
    ngram_memory: bool | None
    dtype: str
    settings: bool | str | Path
    tensor_group: mx.distributed.Group | None
    pipeline_group: mx.distributed.Group | None
    max_memory: int | None
    context: int


@dataclass(frozen=True)
class Found:
    checkpoint: CheckpointReader  # in its folder
    head: CheckpointReader | None  # the checkpoint of the head to load
    fetched: FetchedHead | None  # the base model's head, if it was fetched
    is_plain: bool  # whether mlx-lm's own model is loaded
    ranks: Ranks | None
    stage: range | None  # the layers of this rank's stage of a pipeline
    check_memory: Callable[..., bool]  # see ``checks.memory``
    prefers_float16: bool
    float16_key: str | None  # for what does not run in float16


def resolve(asked: Asked) -> Found:
    """Raises an error that explains what is missing, or what the arguments exclude."""
    ranks = make_ranks(asked.tensor_group, asked.pipeline_group, asked.adapter_path)
    account = None if asked.lazy or ranks else Account(asked.max_memory)
    limits: Config = {"context": asked.context, "ngram_memory": asked.ngram_memory, "has_tower": asked.vision == "auto"}
    check = partial(check_memory, account=account, dtype=asked.dtype, **limits)
    prefers_float16 = not asked.lazy and any_rank(ranks, gpu_generation()[0] in dtypes.WITHOUT_BFLOAT16)
    with raise_on_all(ranks):  # before the weights are downloaded
        _check_arguments(asked)
        checkpoint = CheckpointReader(asked.name, asked.revision)
        mtp, may_be_plain = _ways(checkpoint, asked.mtp, asked.copy_drafts, ranks is None)
        check_method(checkpoint)
        stage = None if ranks is None else divide(checkpoint, ranks, asked.pipeline_group is not None)
        checkpoint = _download(checkpoint, asked.revision, mtp, may_be_plain and not mtp, stage, check)
    if mtp == "cached":
        mtp = from_rank_0(ranks, lambda: _cached_head(checkpoint))
    elif mtp == "auto" and may_be_plain:
        mtp = _head_if_any(checkpoint)
    _check_drafting(mtp, asked)
    is_float16_tried = prefers_float16 and asked.dtype == AUTO
    key = _float16_key(checkpoint, asked.adapter_path, mtp) if is_float16_tried else None
    dtypes.check_untried(asked.name, key, ranks)
    with raise_on_all(ranks):
        source, fetched = _head_of(checkpoint, mtp)
    return Found(checkpoint, source, fetched, may_be_plain and not mtp, ranks, stage, check, prefers_float16, key)


def check_family(path_or_hf_repo: str, revision: str | None = None) -> None:
    """Raise an MTPError for ``--mtp`` with a model of a family that only mlx-lm supports. Weights are not downloaded."""
    with suppress(OSError):  # load tells why
        read_config(fetch(path_or_hf_repo, revision, weights=()), path_or_hf_repo)


def _ways(checkpoint: CheckpointReader, mtp: bool | str, copy_drafts: bool, is_alone: bool) -> tuple[bool | str, bool]:
    """``mtp``, which is false for a family that only mlx-lm supports, and whether mlx-lm loads the model without a head."""
    model_type = (checkpoint.config or {}).get("model_type")
    runs_here = model_type in MODULES
    in_mlx_lm = mlx_lm_has(model_type)
    if mtp in ("auto", "cached") and not copy_drafts and in_mlx_lm and not runs_here:
        mtp = False
    return mtp, not copy_drafts and is_alone and (in_mlx_lm or not runs_here)


def _download(
    checkpoint: CheckpointReader, revision: str | None, mtp: bool | str, is_plain: bool, stage: range | None, check: Any
) -> CheckpointReader:
    """Check the headers of a checkpoint, and download it or the files of a stage."""
    name = checkpoint.name
    own = list[str]()
    files = None if stage is None else files_of(checkpoint, stage)
    if not is_plain:
        config = check_config(checkpoint.config, name)
        if checkpoint.folder is None:
            find_tables(skeleton(config, name), checkpoint)
    if checkpoint.folder is None:
        check(checkpoint, checkpoint if mtp else None, is_plain=is_plain)
    with suppress(MTPError, OSError):  # the error is raised, or logged, when the head is read
        own = checkpoint.head_files if mtp in (True, "auto", "cached") else []
    folder = fetch(name, revision, *own, weights=files or files_to_fetch(checkpoint))
    checkpoint = CheckpointReader(name, folder=folder, needed=files)
    _ = checkpoint.model_map  # raises here, since nothing is loaded without the model's files
    return checkpoint


def _float16_key(checkpoint: CheckpointReader, adapter_path: str | None, mtp: bool | str) -> str:
    return f"{', '.join(machine().values())}, {key_of(checkpoint, checkpoint, adapter_path)} {mtp}"


def _check_arguments(asked: Asked) -> None:
    _check_drafting(asked.mtp, asked)
    check_bits(*asked.drafting[1:])
    if not isinstance(asked.settings, bool):
        read_settings(Path(asked.settings))
    if asked.adapter_path is not None:
        check_adapter(asked.adapter_path)
    if asked.dtype not in (AUTO, *DTYPES):
        raise MTPError(f"dtype must be one of {', '.join((AUTO, *DTYPES))}, not {asked.dtype!r}.")


def _check_drafting(mtp: bool | str, asked: Asked) -> None:
    """Raise an MTPError if an argument requires the head, and there is none."""
    if not mtp and (any(x is not None for x in asked.drafting) or not isinstance(asked.settings, bool)):
        raise MTPError(
            "draft_vocab, mtp_bits, draft_head_bits and settings require the MTP head: omit them, or load it."
        )


def _cached_head(checkpoint: CheckpointReader) -> bool | str:
    """What ``mtp="cached"`` stands for. A head of its own that cannot be used is no error, since nobody has asked for it."""
    check_config(checkpoint.config, checkpoint.name)
    try:
        if checkpoint.head_map:
            check_head(checkpoint)
            return True
    except (MTPError, OSError) as e:
        log.warning(f"[WARNING] {checkpoint.name} generates without drafts: {e}")
        return False
    return "auto" if fetched_before(checkpoint) is not None else False


def _head_if_any(checkpoint: CheckpointReader) -> bool | str:
    """What ``mtp="auto"`` stands for. Some families' checkpoints may lack a head, and run as in mlx-lm then."""
    family = family_in(checkpoint.config)
    if family is not None and not family.needs_head:
        try:
            fetch_missing_head(checkpoint)
        except FileNotFoundError as e:
            log.warning(f"[WARNING] {checkpoint.name} generates without drafts: {e}")
            return False
    return "auto"


def _head_of(checkpoint: CheckpointReader, mtp: bool | str) -> tuple[CheckpointReader | None, FetchedHead | None]:
    """The checkpoint of the head to load, and the base model's if it was fetched. Raises an error if it cannot be used."""
    fetched = None
    if mtp == "auto":
        fetched = fetch_missing_head(checkpoint)
        mtp = True if fetched is None else str(fetched.folder)
    if isinstance(mtp, str):
        return fetch_drafter(mtp, checkpoint), fetched
    if mtp:
        check_head(checkpoint)
    return checkpoint if mtp else None, None
