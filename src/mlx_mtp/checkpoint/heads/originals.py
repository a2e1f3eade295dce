"""The MTP head and the vision encoder that conversions lack: find the base model, and fetch only the part.

A model card names the checkpoint that its model was made from (``base_model``), whose card may name another one. If the cards
do not lead to the base model, the config's ``_name_or_path`` is tried, then the published models with a fitting name and size.

One folder for each base model and revision is shared by all of its conversions:

HF_HOME/mlx_mtp/heads/Qwen--Qwen3.6-27B/<commit>/config.json
                                                 model.safetensors   only the part
                      of.json                                        the folder of each checkpoint's part
"""

import hashlib
import json
import re
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import RepoCard, constants
from huggingface_hub.utils import WeakFileLock
from tqdm import tqdm
from yaml import YAMLError

from ...errors import MTPError, MTPFileNotFoundError
from ...files import read_own, update_own, write_atomic, writing
from ...images.tower import CONFIG_FILES, Vision, settings_of
from ...memory import GB
from ..catalog import originals_like, published
from ..config import Config, check_config, family_in, first_difference, read_json, text_config_of
from ..hub import CARD
from ..reader import CHUNK_BYTES, FLOATS, CheckpointReader, Tensor, Tensors, model_tensors, n_bytes, tower_tensors
from .formats import check_head, check_shapes, has_raw_head

BASE_MODEL = "BASE_MODEL"  # in commands, where none is known
MAX_STEPS = 4  # from a checkpoint to its base model
PATIENCE = 5  # seconds to wait for the hub's answer about a head that the user has not asked for
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
OF = "of.json"
# The ends of the names of tensors that are not quantized, or quantized by MLX
ENDINGS = (".weight", ".bias", ".A_log", ".dt_bias", "_proj", ".scales", ".biases", ".signs")
QUANTIZED = re.compile(  # in the name of a checkpoint
    r"[-_](?:fp8|nvfp4|mxfp[48]|awq|gptq|bnb|int[48]|w\d+a\d+|[48]-?bit|quantized)(?![^-_])", re.IGNORECASE
)


def find_original(part: "Part", checkpoint: CheckpointReader) -> tuple[CheckpointReader, Tensors]:
    """The base model of a checkpoint that lacks a part, and the part's tensors. No weights are downloaded."""
    tried: dict[str, str] = {}
    for original in _candidates(checkpoint):
        try:
            reader = CheckpointReader(original)
            return reader, part.fitting(reader, checkpoint)
        except MTPError as e:
            tried[original] = str(e)
    lacks = "" if CARD in checkpoint.files else f"It has no {CARD} here. "  # which mlx-lm does not download
    reasons = " ".join(tried.values()) or f"{lacks}No model card, config or published model of this size names it."
    raise MTPFileNotFoundError(f"{checkpoint.name} has no {part.name}, and its base model was not found. {reasons}")


def _candidates(checkpoint: CheckpointReader) -> Iterator[str]:
    """Repositories and folders that may be the original, the nearest first, without repetition."""
    seen = {checkpoint.name, str(checkpoint.folder)}
    bases = base_models(checkpoint)
    for _ in range(MAX_STEPS):
        found: list[str] = []
        for base in bases:
            if base not in seen:
                seen.add(base)
                yield base
                with suppress(FileNotFoundError, MTPError):  # reported when its part is tried
                    found += base_models(CheckpointReader(base))
        bases = found
    yield from (other for other in dict.fromkeys(_named(checkpoint)) if other not in seen)


def _named(checkpoint: CheckpointReader) -> list[str]:
    """Repositories and folders in a checkpoint's config, and the originals of published models like its name."""
    config = checkpoint.config or {}
    own_name = config.get("_name_or_path") or text_config_of(config).get("_name_or_path")
    return [
        *([own_name] if isinstance(own_name, str) and own_name else []),
        *originals_like(f"{checkpoint.name} {own_name}", config),
    ]


def base_models(checkpoint: CheckpointReader) -> list[str]:
    """The ``base_model`` of a checkpoint's card: the checkpoints that its model was made from."""
    if CARD not in checkpoint.files:
        return []
    card = checkpoint.read(CARD).decode("utf-8-sig", errors="replace")
    if not card.lstrip().startswith("---"):
        return []  # no metadata: huggingface_hub would warn
    try:
        bases = RepoCard(card, ignore_metadata_errors=True).data.get("base_model")
    except (ValueError, YAMLError):
        return []  # written by hand
    return [base for base in (bases if isinstance(bases, list) else [bases]) if isinstance(base, str) and base]


def check_method(checkpoint: CheckpointReader) -> None:
    """Raise an MTPError for a model of this family in another program's quantization, with the model's 16-bit checkpoint."""
    config = checkpoint.config or {}
    names = dict[str, str]()
    if family_in(config) is None or (method := _quantization_of(checkpoint)) is None:
        return
    with suppress(MTPError, OSError):  # the error is raised when the model is loaded
        names = {} if awq_of(checkpoint) else checkpoint.names.split(checkpoint.model_map)[0]
    if any(not name.endswith(ENDINGS) and "ngram_embedding" not in name for name in names):
        base = base_in_16_bits(checkpoint)
        other = "its 16-bit base model" if base == BASE_MODEL else f"{base}, which has 16 bits"
        raise MTPError(
            f"{checkpoint.name} is in {method}, which mlx-lm does not load: use {other}, or a conversion of it."
        )


def awq_of(checkpoint: CheckpointReader) -> Config | None:
    """The settings of a model in AWQ if mlx-lm converts it: matrices of 4 bits, [K, N / 8] with scales [K / group, N]."""
    told = _told_method(checkpoint)
    if not isinstance(told, dict) or told.get("quant_method") not in ("awq", "gptq"):
        return None
    tensors = checkpoint.names.split(model_tensors(checkpoint))[0]
    packed = [name for name in tensors if name.endswith((".qweight", ".g_idx"))]  # the latter of GPTQ

    def is_awq(name: str) -> bool:
        scales = tensors.get(name.replace(".qweight", ".scales"))
        return scales is not None and scales.shape[-1] == 8 * tensors[name].shape[-1] and ".experts." not in name

    return told if packed and all(map(is_awq, packed)) else None


def _told_method(checkpoint: CheckpointReader) -> Any:
    config = checkpoint.config or {}
    parts = [part for part in (config, text_config_of(config)) if isinstance(part, dict)]
    return next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)


def _quantization_of(checkpoint: CheckpointReader) -> str | None:
    """The method by which another program quantized a model, and its format, by the config or a file beside it."""
    found = _told_method(checkpoint)
    for file in ("hf_quant_config.json", "quantize_config.json"):  # of ModelOpt and GPTQ
        if not found and file in checkpoint.files:
            own = checkpoint.read_json(file)
            found = {"quant_method": "modelopt" if file[0] == "h" else "gptq", **(own.get("quantization") or own)}
    if not isinstance(found, dict) or not (method := found.get("quant_method")):
        return None
    kind = next((found[key] for key in ("format", "quant_algo", "bnb_4bit_quant_type") if found.get(key)), None)
    return "FP8" if method == "fp8" else f"{method} ({kind})" if kind else str(method)


def base_in_16_bits(checkpoint: CheckpointReader) -> str:
    """The 16-bit checkpoint of a model by its card, config or name, or ``BASE_MODEL``."""
    name = QUANTIZED.sub("", checkpoint.name)
    is_there = Path(name).exists() or not Path(checkpoint.name).exists()
    named = [*base_models(checkpoint), *([name] if is_there else []), *_named(checkpoint)]
    return next((base for base in named if base != checkpoint.name and not QUANTIZED.search(base)), BASE_MODEL)


class Part(NamedTuple):
    name: str
    folder: str  # in HF_HOME, beside the hub's cache
    advice: str  # where there is no base model
    fitting: Callable[[CheckpointReader, CheckpointReader], Tensors]  # of an original, for a checkpoint; or an MTPError
    write: Callable[[CheckpointReader, Tensors, Path], Config]  # an original's to a folder, whose config it returns

    @property
    def root(self) -> Path:
        return Path(constants.HF_HOME) / "mlx_mtp" / self.folder


@dataclass(frozen=True)  # a tuple would be a parameter of the model
class FetchedHead:
    folder: Path  # a drafter for load(..., mtp=str(folder))

    @property
    def record(self) -> Config:
        """Its source, as recorded in the config.json of conversions."""
        return read_json(self.folder / CONFIG)["mlx_mtp"]

    @property
    def source(self) -> str:
        return str(self.record.get("source", ""))

    @property
    def nbytes(self) -> int:
        return (self.folder / WEIGHTS).stat().st_size


def fetch_missing_head(checkpoint: CheckpointReader) -> FetchedHead | None:
    """Fetch the head of a checkpoint's original, once. ``None`` if the checkpoint has its own head."""
    return None if checkpoint.head_map else FetchedHead(_fetch(HEAD, checkpoint))


def head_to_fetch(path_or_hf_repo: str, revision: str | None = None) -> tuple[str, int] | None:
    """The original of a checkpoint without a head and the bytes of its head, by the catalog or the hub; ``None`` if unknown."""
    checkpoint = CheckpointReader(path_or_hf_repo, revision)
    check_config(checkpoint.config, path_or_hf_repo)
    if checkpoint.head_map:
        return None  # which cannot be used
    by_original = {m.original: m for m in published().values() if m.has_sizes_of(checkpoint.config or {})}
    for named in (*base_models(checkpoint), *_named(checkpoint)):
        if named in by_original:
            return named, int(by_original[named].head_gb * GB)
    found: list[tuple[str, int]] = []

    def ask() -> None:
        with suppress(MTPError, OSError):
            original, tensors = find_original(HEAD, checkpoint)
            found.append((original.name, n_bytes(tensors)))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return next(iter(found), None)


def fetched_heads() -> Iterator[FetchedHead]:
    for file in sorted(HEAD.root.glob(f"*/*/{CONFIG}")):
        yield FetchedHead(file.parent)


def fitting_head(original: CheckpointReader, checkpoint: CheckpointReader) -> Tensors:
    """Describe the tensors of an original's head. Raises MTPError if there is none, or it does not fit or is quantized."""
    _check_sizes(original, checkpoint)
    if not (tensors := original.head()):
        raise MTPError(f"{original.name} has no MTP head: the base model of {checkpoint.name} has.")
    check_head(original)
    if original.name != checkpoint.name and any(t.dtype not in FLOATS for t in tensors.values()):
        raise MTPError(f"The MTP head of {original.name} is quantized: the base model's is in bfloat16.")
    check_shapes(checkpoint, tensors)
    return tensors


def _write_head(original: CheckpointReader, tensors: Tensors, target: Path) -> Config:
    own = original.config or {}
    family = family_in(own)
    assert family is not None  # otherwise it has no head
    prefix = "mtp." if has_raw_head(original) else ""  # the names of a drafter's tensors imply its layout
    heads = original.names
    names = {old: heads.in_files(new, prefix) for new, old in heads.split({n: n for n in tensors})[1].items()}
    copy_tensors(original, tensors, target / WEIGHTS, names)
    record = own.get("mlx_mtp") or {"source": original.name, "revision": original.revision}
    return {"model_type": family.drafter, "text_config": text_config_of(own), "mlx_mtp": record}


def fetch_tower(checkpoint: CheckpointReader, config: Config) -> Vision:
    tower = _fetch(TOWER, checkpoint)
    return Vision(tower, config | settings_of(read_json(tower / CONFIG)), [WEIGHTS])


def fitting_tower(original: CheckpointReader, checkpoint: CheckpointReader) -> Tensors:
    """Describe the tensors of a base model's tower. Raises MTPError if there is none, or the sizes of the models differ."""
    own = _check_sizes(original, checkpoint)
    tensors = tower_tensors(original)
    if not tensors or not isinstance(own.get("vision_config"), dict):
        raise MTPError(f"{original.name} has no vision encoder: the base model of {checkpoint.name} has.")
    return tensors


def _write_tower(original: CheckpointReader, tensors: Tensors, target: Path) -> Config:
    own = original.config or {}
    copy_image_settings(original, target)
    copy_tensors(original, tensors, target / WEIGHTS)
    record = {"source": original.name, "revision": original.revision}
    return {"text_config": text_config_of(own), **settings_of(own), "mlx_mtp": record}


def copy_image_settings(original: CheckpointReader, target: Path) -> None:
    for file in CONFIG_FILES:
        if file in original.files:
            (target / file).write_bytes(original.read(file))


def _check_sizes(original: CheckpointReader, checkpoint: CheckpointReader) -> Config:
    """Return the config of an original, or raise an MTPError if a size differs from a checkpoint's."""
    own, config = (check_config(reader.config, reader.name) for reader in (original, checkpoint))
    ties = [bool(c.get("tie_word_embeddings", text_config_of(c).get("tie_word_embeddings"))) for c in (own, config)]
    difference = first_difference(own, config)
    if not difference and ties[0] != ties[1]:
        difference = f"tie_word_embeddings is {ties[0]}, not {ties[1]}"
    if difference:
        raise MTPError(f"{original.name} does not fit {checkpoint.name}: {difference}.")
    return own


HEAD = Part(
    "MTP head",
    "heads",
    "Name a head with --mtp HEAD, add one with `mlx_mtp convert --graft-mtp-from BASE_MODEL --model {} --mlx-path NEW`, or "
    "generate without a head (--no-mtp, in Python mtp=False).",
    fitting_head,
    _write_head,
)
TOWER = Part(
    "vision encoder",
    "towers",
    "Add one with `mlx_mtp convert --graft-vision-from BASE_MODEL --model {} --mlx-path NEW`.",
    fitting_tower,
    _write_tower,
)


# Fetching


def _fetch(part: Part, checkpoint: CheckpointReader) -> Path:
    """Fetch a part of a checkpoint's original, once. Return its folder, whose config.json is written last."""
    if (known := fetched_before(checkpoint, part)) is not None:
        return known
    try:
        original, tensors = find_original(part, checkpoint)
    except FileNotFoundError as e:
        raise MTPFileNotFoundError(f"{e} {part.advice.format(checkpoint.name)}") from e
    target = part.root / original.name.strip("/").replace("/", "--") / (original.revision or _revision_of(original))
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(target / ".lock"):  # another process may fetch it as well
            if not (target / CONFIG).exists():
                write_atomic(target / CONFIG, json.dumps(part.write(original, tensors, target), indent=4) + "\n")
        update_own(part.root / OF, _key_of(checkpoint), str(target.relative_to(part.root)))
    return target


def fetched_before(checkpoint: CheckpointReader, part: Part = HEAD) -> Path | None:
    """The part that was fetched for a checkpoint, if it still fits: the folder may have another checkpoint now."""
    known = read_own(part.root / OF).get(_key_of(checkpoint))
    if known is None or not (part.root / known / CONFIG).exists():
        return None
    own = read_json(part.root / known / CONFIG).get("text_config", {})
    return None if first_difference(own, text_config_of(checkpoint.config or {})) else part.root / known


def forget(checkpoint: CheckpointReader) -> None:
    """Let the head that was fetched for a checkpoint be used no more."""
    update_own(HEAD.root / OF, _key_of(checkpoint), None)


def _key_of(checkpoint: CheckpointReader) -> str:
    return str(checkpoint.path.resolve())


def _revision_of(original: CheckpointReader) -> str:
    """The revision of a folder, which has no commit: its path and the times of its files."""
    files = sorted(original.path.glob("*.safetensors"))
    state = [_key_of(original), *((f.name, f.stat().st_mtime_ns) for f in files)]
    return hashlib.sha1(json.dumps(state).encode()).hexdigest()


def copy_tensors(
    original: CheckpointReader, tensors: Tensors, file: Path, names: Mapping[str, str] | None = None
) -> None:
    """Copy tensors to a new file, under ``names`` or their own. An incomplete file has the suffix ``.part``, and is resumed."""
    header = {}
    runs = list[Tensor]()
    n = 0
    for name, t in sorted(tensors.items(), key=lambda item: (item[1].file, item[1].start)):
        stop = n + t.stop - t.start
        header[names[name] if names else name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [n, stop]}
        n = stop
        is_next = runs and (runs[-1].file, runs[-1].stop) == (t.file, t.start)  # they are read in one range
        runs.append(runs.pop()._replace(stop=t.stop) if is_next else t)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    part = file.with_name(file.name + ".part")
    done = _resume(part, head, n)
    bar = tqdm(total=n, initial=done, desc="Reading", unit="B", unit_scale=True, disable=None)
    with writing(file), part.open("ab") as f, bar:
        for source, *_, start, stop in runs:
            for begin in range(start + (skipped := min(done, stop - start)), stop, CHUNK_BYTES):
                f.write(data := original.read(source, begin, min(begin + CHUNK_BYTES, stop)))
                bar.update(len(data))
            done -= skipped
    part.replace(file)


def _resume(part: Path, head: bytes, n: int) -> int:
    """Begin a file with these bytes, or keep up to n bytes that another call has written after them. Return their number."""
    if part.exists() and (done := part.stat().st_size - len(head)) <= n:
        with part.open("rb") as f:
            if f.read(len(head)) == head:
                return done
    part.write_bytes(head)
    return 0
