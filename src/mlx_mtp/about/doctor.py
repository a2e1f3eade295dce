"""The command line of ``mlx_mtp doctor``: this machine, and whether a model drafts on it."""

import argparse
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from .._version import __version__
from ..caches.prompt_cache import has_head
from ..checkpoint.config import check_config
from ..checkpoint.fetched import FLOOR, fetched_heads, head_to_fetch, measure_acceptance
from ..checkpoint.hub import WEIGHTS, cached_repositories, sizes_to_download
from ..checkpoint.load import DEMO, DEMO_NOTE, load
from ..checkpoint.memory_check import needs_of as checkpoint_needs
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.self_test import ensure_tested
from ..cli.display import one_line_errors
from ..cli.flags import MODEL_HELP
from ..cli.parser import finish, parse
from ..memory import CONTEXT, GB, Account, needs_of, size, total_memory
from ..models.mixin import MTPModel
from .cache import cache_folders

Line = tuple[str, str]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx_mtp doctor",
        description="Check this machine and a model: chip, memory, versions, tuned settings, caches, and whether the model has "
        "an MTP head whose drafts it accepts. The last line is the verdict.",
    )
    parser.add_argument("--model", help=MODEL_HELP)
    return finish(parser, {})


def main() -> None:
    parser = make_parser()
    with one_line_errors(parser.prog):
        args = parse(parser)
        lines = [*_machine(), *_caches()]
        print("\n".join(f"{name + ':':<12}{value}" for name, value in lines), flush=True)
        for name, value in _model(args.model or str(DEMO)):
            print(f"{name + ':':<12}{value}", flush=True)


def _machine() -> Iterator[Line]:
    info = mx.device_info()
    yield "Chip", f"{info.get('device_name')} ({info.get('architecture')}), {mx.default_device()}"
    account = Account()
    held = f"this process holds {size(account.held)}"
    yield "Memory", f"{size(total_memory())}, of which MLX may use {size(account.limit)}; {held}"
    packages = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "transformers"))
    yield "Versions", f"mlx-mtp {__version__}, {packages}, Python {platform.python_version()}"


def _caches() -> Iterator[Line]:
    for name, folder in cache_folders():
        sizes = [*cached_repositories().values()] if name == "Models" else [head.nbytes for head in fetched_heads()]
        yield name, f"{len(sizes)} in {folder}, {sum(sizes) / GB:.2f} GB"


def _model(name: str) -> Iterator[Line]:
    """The model's head and settings, and the verdict. Nothing but configs and headers is downloaded."""
    yield "Model", name if Path(name) != DEMO else DEMO_NOTE
    try:
        missing = sizes_to_download(name, None, [WEIGHTS])
        yield from _remote(name, sum(missing.values())) if missing else _local(name)
    except (OSError, ValueError) as e:
        yield "Verdict", f"no drafts: {' '.join(str(e).split())}"


def _remote(name: str, n_bytes: int) -> Iterator[Line]:
    """A model whose weights would be downloaded."""
    checkpoint, account = CheckpointReader(name), Account()
    config, tensors = check_config(checkpoint.config, name), checkpoint.tensors(checkpoint.weight_map)
    needs, _ = checkpoint_needs(tensors, config, name, CONTEXT, True, False)
    yield "Needs", f"{needs} with a text of {CONTEXT} tokens"
    yield "Head", "its own" if checkpoint.head() else _to_fetch(name)
    fits = "fits" if needs.total <= account.left else "does not fit"
    yield (
        "Verdict",
        f"{fits} in memory, and is not downloaded: `mlx_mtp generate --model {name}` downloads {size(n_bytes)}",
    )


def _local(name: str) -> Iterator[Line]:
    """A model that can be loaded as it is."""
    model, tokenizer = load(name, mtp="cached")
    if isinstance(model, MTPModel):
        yield "Self-test", str(ensure_tested(model, name))
    if not has_head(model):
        yield "Head", (head := _to_fetch(name))
        yield "Verdict", f"no drafts: its head is {head}"
        return
    yield "Needs", f"{needs_of(model, CONTEXT)} with a text of {CONTEXT} tokens"
    if (fetched := model.fetched_head) is None:
        yield "Head", "its own"
        accepted = measure_acceptance(model, tokenizer)
    else:
        yield "Head", f"of {fetched.source}, {fetched.nbytes / 1e6:.1f} MB"
        accepted = fetched.acceptance(model.fingerprint()) or 0.0
    tuned = model.drafting.tuned
    yield "Settings", "none: `mlx_mtp benchmark --tune` finds the fastest" if tuned is None else str(tuned)
    yield "Accepted", f"{accepted:.0%} of first drafts on built-in text"
    yield "Verdict", verdict(accepted)


def _to_fetch(name: str) -> str:
    """The head of a checkpoint without one."""
    if (found := head_to_fetch(name)) is None:
        return "missing, and its base model was not found: name a head with --mtp HEAD"
    return f"that of {found[0]}, {size(found[1])}: --mtp fetches it"


def verdict(accepted: float) -> str:
    if accepted < FLOOR:
        return "the model rejects most drafts: `mlx_mtp fit` trains the head, `--copy-drafts auto` drafts without it"
    return "ready; `mlx_mtp benchmark` measures the speed"
