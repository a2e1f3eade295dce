"""The settings of ``mlx_mtp benchmark --tune``, cheaper drafts, and the default sampling parameters."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .._version import __version__
from ..core.caches.validation import BITS
from ..core.distributed import Ranks, from_rank_0
from ..core.drafts.settings import DraftLMHead, Settings
from ..core.models.head_weights import quantize_head
from ..core.models.mixin import MTPModel
from ..core.sampling import PARAMETERS, Sampling, fits, limits_of
from ..errors import MTPError, MTPFileNotFoundError
from ..files import cache_file, check_target, write_atomic
from .config import parse_json, read_json
from .hub import fetch

REMOVED = {"attention_rows", "pieces"}  # settings that an earlier version tuned

log = logging.getLogger(__name__)


def key_of(*folders: Path, n_ranks: int = 1) -> dict[str, str]:
    """The machine, and the checkpoint in these folders (with a drafter, an adapter), on which the best settings depend."""
    digest = hashlib.sha256()
    for folder in dict.fromkeys(folders):
        digest.update(str(folder.resolve()).encode())
        config = folder / "config.json"
        digest.update(config.read_bytes() if config.exists() else b"")
        files = {str(f): f.stat().st_size for pattern in ("**/*.safetensors", "adapter*") for f in folder.glob(pattern)}
        digest.update(json.dumps(sorted(files.items())).encode())
    return {"checkpoint": digest.hexdigest()[:16], **machine(n_ranks)}


def machine(n_ranks: int = 1) -> dict[str, str]:
    """The device, and the versions of the software. Several machines count as another device."""
    device = mx.device_info()
    each = f"{device.get('device_name')}, {device.get('architecture')}, {mx.default_device()}"
    versions = {package: version(package) for package in ("mlx", "mlx-lm")} | {"mlx-mtp": __version__}
    return {"device": each if n_ranks == 1 else f"{n_ranks} times {each}"} | versions


def default_file(key: Mapping[str, str]) -> Path:
    name = hashlib.sha256(f"{key['checkpoint']} {key['device']}".encode()).hexdigest()[:16]
    return cache_file(f"{name}.json")


def find(file: bool | str | Path, folders: Sequence[Path], n_ranks: int = 1) -> Settings | None:
    """The settings of a checkpoint in these folders; ``None`` without any or, with a warning, if their key differs."""
    if file is False:
        return None
    key = key_of(*folders, n_ranks=n_ranks)
    path = default_file(key) if file is True else Path(file)
    if file is True and not path.exists():
        return None
    made_for, settings = read(path)
    names = [name for name in key if made_for.get(name) != key[name]]
    if differs := [f"{name} is {key[name]}, not {made_for.get(name)}" for name in names]:
        log.warning(
            f"[WARNING] The settings in {path} are ignored, because {' and '.join(differs)}: "
            "measure again with `mlx_mtp benchmark --tune`, or delete the file."
        )
        return None
    log.info(f"Settings from {path}: {settings}")
    return settings


def read(file: Path) -> tuple[dict[str, str], Settings]:
    if not file.is_file():
        raise MTPFileNotFoundError(f"There is no settings file {file}: write it with `mlx_mtp benchmark --tune`.")
    try:
        content = parse_json(file.read_bytes(), str(file))
        settings = Settings(**{name: x for name, x in content["settings"].items() if name not in REMOVED})
        settings = replace(settings, seconds={int(k): float(t) for k, t in settings.seconds.items()})
        least = {"mtp_bits": 0, "draft_head_bits": 0, "draft_vocab": 0}
        given = [(getattr(settings, name), n) for name, n in least.items()]
        if not (
            all(value is None or (type(value) is int and value >= n) for value, n in given)
            and all(t > 0 for t in settings.seconds.values())
            and 0 <= settings.draft_p_min <= 1
            and type(settings.compiled) is bool
            and (settings.num_draft_tokens == "auto" or type(settings.num_draft_tokens) is int)
        ):
            raise ValueError
        return dict(content["key"]), settings
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise MTPError(
            f"{file} is not a settings file: write it again with `mlx_mtp benchmark --tune`, or omit it (--settings off)."
        ) from e


def write(file: Path, key: Mapping[str, str], model: str, settings: Settings) -> None:
    content = {"model": model, "key": key, "settings": asdict(settings)}
    write_atomic(file, json.dumps(content, indent=2) + "\n")


def check_writable(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    check_target(file)


def check_bits(mtp_bits: int | None, draft_head_bits: int | None) -> None:
    for name, bits in (("mtp_bits", mtp_bits), ("draft_head_bits", draft_head_bits)):
        if bits is not None and bits not in BITS:
            raise MTPError(f"{name} is {bits}; MLX quantizes to {', '.join(map(str, BITS))} bits.")


def cheapen_drafts(
    model: MTPModel,
    tokenizer: TokenizerWrapper,
    draft_vocab: int | None,
    mtp_bits: int | None,
    draft_head_bits: int | None,
) -> None:
    """Apply these arguments of ``mlx_mtp.load`` to a model that is not sharded yet."""
    check_bits(mtp_bits, draft_head_bits)
    if mtp_bits is not None:
        quantize_head(model.mtp, mtp_bits)
    ids = first_ids(draft_vocab, model.vocab_size, tokenizer) if draft_vocab else None
    if ids is not None or draft_head_bits is not None:
        lm_head = DraftLMHead(model.output_layer, ids, draft_head_bits)
        model.draft_settings = replace(model.draft_settings, lm_head=lm_head)


def first_ids(size: int, vocab_size: int, tokenizer: TokenizerWrapper) -> list[int]:
    """The ids of a draft vocabulary in order: special and stop tokens, which are rare in text, and the first others."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), *tokenizer.eos_token_ids}
    always = {i for i in special if i < vocab_size}
    if type(size) is not int or not max(len(always), 1) <= size <= vocab_size:
        raise MTPError(
            f"A draft vocabulary of {size} token ids is not possible: this model has {vocab_size}, "
            f"and its {len(always)} special and stop tokens are always included."
        )
    others = (i for i in range(vocab_size) if i not in always)
    return sorted(always.union(islice(others, size - len(always))))


def sampling_defaults(name: str, given: Mapping[str, float | None], ranks: Ranks | None = None) -> Sampling:
    """The given values, then those of generation_config.json, which rank 0 reads for all, then mlx-lm's. Checks their range."""
    own = {field: value for field, value in given.items() if value is not None}
    return from_rank_0(ranks, lambda: Sampling(**{**_read_sampling(fetch(name, None, weights=()), own), **own}))


def _read_sampling(folder: Path, own: Mapping[str, float]) -> dict[str, Any]:
    """The values of parameters that the user has not set. As in transformers, ``do_sample`` implies temperature 1."""
    file = folder / "generation_config.json"
    content = read_json(file) if file.exists() else {}
    if content.get("do_sample") is False:
        return {}
    values: dict[str, Any] = {"temperature": 1.0} if content.get("do_sample") else {}
    for argument, parameter in PARAMETERS.items():
        name = parameter.name
        if name in own or content.get(name) is None:
            continue
        values[name] = value = content[name]
        if type(value) not in (int, parameter.type) or not fits(parameter, value):
            flag = f"--{argument.replace('_', '-')}"
            raise MTPError(f"{file}: {name} must be {limits_of(parameter)}, not {value!r}: correct it, or give {flag}.")
    return values
