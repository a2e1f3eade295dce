"""The commands about models and this machine: ``mlx_mtp models`` and ``mlx_mtp doctor``."""

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import constants

from ._version import __version__
from .checkpoint import DEMO, DEMO_NOTE
from .checkpoint.catalog import published
from .checkpoint.checks.dtype import dtype_of
from .checkpoint.checks.memory import needs_of_checkpoint
from .checkpoint.checks.self_test import SelfTest, ensure_tested
from .checkpoint.heads.acceptance import FLOOR
from .checkpoint.heads.formats import check_head
from .checkpoint.heads.originals import HEAD, check_method, fetched_heads, head_to_fetch
from .checkpoint.hub import cached_repositories, sizes_to_download
from .checkpoint.load import load
from .checkpoint.output import dtype_name
from .checkpoint.reader import CheckpointReader, files_to_fetch
from .cli.display import one_line_errors, table
from .cli.parser import parse
from .cli.parsers import doctor_parser, models_parser
from .core.layers.mtp import has_head
from .core.models.mixin import MTPModel
from .errors import MTPError
from .memory import CONTEXT, GB, Account, needs_of, size, total_memory

Lines = Iterator[tuple[str, Any]]  # names and values, whose text may have several lines


@one_line_errors("mlx_mtp models")
def models() -> None:
    args = parse(models_parser())
    if args.context < 1:
        raise MTPError(f"--context must be 1 or more, not {args.context}.")
    cached = cached_repositories()
    heads = {head.source for head in fetched_heads()}
    account = Account()
    rows = [["name", "weights", "head", "image", "context", "fits here", "cached"]]
    for model in published().values():
        needs = model.needs(args.context)
        here = [use for use, has in (("weights", model.conversion in cached), ("head", model.original in heads)) if has]
        image = "yes" if model.takes_images else "no"
        fits = "yes" if needs.total <= account.left else f"from {model.memory_gb} GB"
        sizes = [f"{needs.weights / GB:.1f}", f"{needs.head / GB:.2f}", image, f"{needs.caches / GB:.1f}"]
        rows.append([model.base, *sizes, fits, "both" if len(here) == 2 else "".join(here) or "-"])
    print("\n".join(table(rows)))
    print(
        f"\nSizes are in GB: weights in 4 bits (Bonsai 2: in 2), the head and {args.context:,} tokens of context in 16.\n"
        f"MLX may use {account.limit / GB:.0f} GB here. For more bits, add -8bit or -bf16 to a name, where published.\n"
        "`mlx_mtp generate --mtp --model NAME` downloads the weights and the head of the base model, and generates."
    )


@one_line_errors("mlx_mtp doctor")
def doctor() -> None:
    args = parse(doctor_parser())
    found: dict[str, Any] = {}
    for lines in (_machine(), _model(args.model or str(DEMO), args.dtype)):
        for name, value in lines:
            found[name.lower()] = asdict(value) if isinstance(value, SelfTest) else value
            if not args.json:
                print(f"{name + ':':<12}{str(value).replace(chr(10), chr(10) + 12 * ' ')}", flush=True)
    if args.json:
        print(json.dumps(found, indent=2))


def _machine() -> Lines:
    info = mx.device_info()
    yield "Chip", f"{info.get('device_name')} ({info.get('architecture')}), {mx.default_device()}"
    account = Account()
    yield "Memory", f"{size(total_memory())}, of which MLX may use {size(account.limit)}"
    packages = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "transformers"))
    yield "Versions", f"mlx-mtp {__version__}, {packages}, Python {platform.python_version()}"
    models = [x.size_on_disk for x in cached_repositories().values()]
    heads = [x.nbytes for x in fetched_heads()]
    yield "Models", f"{len(models)} in {constants.HF_HUB_CACHE}, {sum(models) / GB:.2f} GB"
    yield "Heads", f"{len(heads)} in {HEAD.root}, {sum(heads) / GB:.2f} GB"


def _model(name: str, dtype: str) -> Lines:
    """The model's head and settings, and the verdict. Nothing but configs and headers is downloaded."""
    yield "Model", name if Path(name) != DEMO else DEMO_NOTE
    try:
        missing = sizes_to_download(name, None, files_to_fetch(CheckpointReader(name)))
        yield from _remote(name, dtype, sum(missing.values())) if missing else _local(name, dtype)
    except (MTPError, OSError) as e:
        yield "Verdict", f"no drafts: {' '.join(str(e).split())}"


def _remote(name: str, dtype: str, n_bytes: int) -> Lines:
    checkpoint = CheckpointReader(name)
    account = Account()
    check_method(checkpoint)
    needs, _ = needs_of_checkpoint(checkpoint, checkpoint, CONTEXT, dtype)
    yield "Needs", f"{needs} with a text of {CONTEXT} tokens"
    yield "Head", "its own" if checkpoint.head() else _to_fetch(name)
    fits = "fits" if needs.total <= account.left else "does not fit"
    command = f"`mlx_mtp generate --model {name}` downloads {size(n_bytes)}"
    yield "Verdict", f"{fits} in memory, and is not downloaded: {command}"


def _local(name: str, dtype: str) -> Lines:
    model, _ = load(name, mtp="cached", dtype=dtype)
    yield "Type", dtype_name(dtype_of(model))
    if isinstance(model, MTPModel):
        yield "Self-test", ensure_tested(model, name) or "could not run"
    if not has_head(model):
        try:
            if (checkpoint := CheckpointReader(name)).head_map:
                check_head(checkpoint)
            head = _to_fetch(name)
        except (MTPError, OSError) as e:
            head = f"not usable: {e}"
        yield "Head", head
        yield "Verdict", f"no drafts: its head is {head}"
        return
    yield "Needs", f"{needs_of(model, CONTEXT)} with a text of {CONTEXT} tokens"
    fetched = model.fetched_head
    accepted = model.head_acceptance_rate
    yield "Head", "its own" if fetched is None else f"of {fetched.source}, {fetched.nbytes / 1e6:.1f} MB"
    settings = model.draft_settings
    yield "Settings", settings.tuned if settings.are_tuned else "none: `mlx_mtp benchmark --tune` finds the fastest"
    verdict = "ready; `mlx_mtp benchmark` measures the speed"
    if accepted is not None:
        yield "Accepted", f"{accepted:.0%} of first drafts on built-in text"
        if model.family.tries_outputs:
            side = "after" if model.mtp.is_fed_normed else "before"
            yield "Fed", f"further drafts get the head's output {side} its norm, as measured on built-in text"
        if accepted < FLOOR:
            verdict = "the model rejects most drafts: `mlx_mtp fit` trains the head, `--copy-drafts auto` needs none"
    yield "Verdict", verdict


def _to_fetch(name: str) -> str:
    if (found := head_to_fetch(name)) is None:
        return "missing, and its base model was not found: name a head with --mtp HEAD"
    return f"that of {found[0]}, {size(found[1])}: --mtp fetches it"
