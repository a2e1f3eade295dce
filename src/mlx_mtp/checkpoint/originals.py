"""Parts that a conversion lacks of its base model: find the base model, and fetch only the part.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from huggingface_hub import RepoCard, constants
from huggingface_hub.utils import TensorInfo, WeakFileLock
from tqdm import tqdm
from yaml import YAMLError

from ..errors import MTPError, MTPFileNotFoundError
from ..files import write_atomic, writing
from ..models import MODEL_TYPES
from ..models.head_weights import split_head
from .catalog import Published, originals_like, published
from .config import Config, check_config, first_difference, read_json, text_config_of
from .kept import read_own, update_own
from .reader import CheckpointReader, n_bytes

BASE_MODEL = "BASE_MODEL"  # in commands, where none is known
MAX_STEPS = 4  # from a checkpoint to its base model
CARD = "README.md"
HEADS, TOWERS = "heads", "towers"
PARTS = {HEADS: "MTP head", TOWERS: "vision encoder"}
WEIGHTS, CONFIG, OF = "model.safetensors", "config.json", "of.json"
CHUNK_BYTES = 16 << 20  # in a range request, which is repeated if it fails

Tensors = dict[str, TensorInfo]
Describe = Callable[[CheckpointReader, CheckpointReader], Tensors]  # of an original, for a checkpoint


def find_original(kind: str, checkpoint: CheckpointReader, describe: Describe) -> tuple[CheckpointReader, Tensors]:
    """The base model of a checkpoint that lacks a part, and what ``describe`` says of the part. No weights are downloaded."""
    tried: dict[str, str] = {}
    for original in _candidates(checkpoint):
        try:
            reader = CheckpointReader(original)
            return reader, describe(reader, checkpoint)
        except MTPError as e:
            tried[original] = str(e)
    reasons = " ".join(tried.values()) or "No model card, config or published model of this size names it."
    raise MTPFileNotFoundError(f"{checkpoint.name} has no {PARTS[kind]}, and its base model was not found. {reasons}")


def check_sizes(original: CheckpointReader, checkpoint: CheckpointReader) -> Config:
    """Return the config of an original, or raise an MTPError if a size differs from a checkpoint's."""
    own, config = (check_config(reader.config, reader.name) for reader in (original, checkpoint))
    ties = [bool(c.get("tie_word_embeddings", text_config_of(c).get("tie_word_embeddings"))) for c in (own, config)]
    difference = first_difference(own, config)
    if not difference and ties[0] != ties[1]:
        difference = f"tie_word_embeddings is {ties[0]}, not {ties[1]}"
    if difference:
        raise MTPError(f"{original.name} does not fit {checkpoint.name}: {difference}.")
    return own


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
    for other in _named(checkpoint):
        if other not in seen:
            seen.add(other)
            yield other


def _named(checkpoint: CheckpointReader) -> list[str]:
    """Repositories and folders in a checkpoint's config, and the originals of published models like its name."""
    config = checkpoint.config or {}
    own_name = config.get("_name_or_path") or text_config_of(config).get("_name_or_path")
    return [
        *([own_name] if isinstance(own_name, str) and own_name else []),
        *originals_like(f"{checkpoint.name} {own_name}", config),
    ]


def published_base(checkpoint: CheckpointReader) -> Published | None:
    """The published model that a checkpoint's own card, config or name says it was made from, without the hub."""
    by_original = {m.original: m for m in published().values() if m.has_sizes_of(checkpoint.config or {})}
    likely = [*base_models(checkpoint), *_named(checkpoint)]
    return next((by_original[original] for original in likely if original in by_original), None)


def base_models(checkpoint: CheckpointReader) -> list[str]:
    """The ``base_model`` of a checkpoint's card: the checkpoints that its model was made from."""
    if CARD not in checkpoint.files:
        return []
    card = checkpoint.read(CARD).decode("utf-8", errors="replace")
    if not card.lstrip().startswith("---"):
        return []  # no metadata: huggingface_hub would warn
    try:
        bases = RepoCard(card, ignore_metadata_errors=True).data.get("base_model")
    except (ValueError, YAMLError):
        return []  # written by hand
    return [base for base in (bases if isinstance(bases, list) else [bases]) if isinstance(base, str) and base]


def check_not_fp8(checkpoint: CheckpointReader) -> None:
    """Raise an MTPError for a model of this family in FP8 that mlx-lm does not load, with the model's 16-bit checkpoint."""
    config, names = checkpoint.config or {}, dict[str, str]()
    quantization = config.get("quantization_config")
    if config.get("model_type") not in MODEL_TYPES or not isinstance(quantization, dict):
        return
    if quantization.get("quant_method") != "fp8" or quantization.get("scale_fmt") == "ue8m0":
        return
    with suppress(MTPError, OSError):  # the error is raised when the model is loaded
        names = split_head(checkpoint.model_map)[0]
    if any(name.endswith("_scale_inv") and "ngram_embedding" not in name for name in names):
        base = base_in_16_bits(checkpoint)
        other = "its 16-bit base model" if base == BASE_MODEL else f"{base}, which has 16 bits"
        raise MTPError(f"{checkpoint.name} is in FP8, which mlx-lm does not load: use {other}, or a conversion of it.")


def base_in_16_bits(checkpoint: CheckpointReader) -> str:
    """The 16-bit checkpoint of a model by its card, config or name, or ``BASE_MODEL``."""
    name = re.sub("[-_]fp8", "", checkpoint.name, flags=re.IGNORECASE)
    named = [*base_models(checkpoint), *([name] if name != checkpoint.name else []), *_named(checkpoint)]
    return next((base for base in named if "fp8" not in base.lower()), BASE_MODEL)


# Fetching


def folder_of(kind: str) -> Path:
    """In ``HF_HOME``, beside the hub's cache."""
    return Path(constants.HF_HOME) / "mlx_mtp" / kind


def fetch_from_original(
    kind: str,
    checkpoint: CheckpointReader,
    describe: Describe,
    write: Callable[[CheckpointReader, Tensors, Path], Config],
    advice: str,
) -> Path:
    """Fetch a part of a checkpoint's original, once. Return its folder.

    ``describe`` returns the tensors of the part in an original, or raises an MTPError. ``write`` writes them to a folder and
    returns its config.json, which is written last. ``advice`` ends the FileNotFoundError if there is no original.
    """
    if (known := fetched_before(kind, checkpoint)) is not None:
        return known
    try:
        original, tensors = find_original(kind, checkpoint, describe)
    except FileNotFoundError as e:
        raise MTPFileNotFoundError(f"{e} {advice}") from e
    root = folder_of(kind)
    target = root / original.name.strip("/").replace("/", "--") / (original.revision or _revision_of(original))
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(target / ".lock"):  # another process may fetch it as well
            if not (target / CONFIG).exists():
                write_atomic(target / CONFIG, json.dumps(write(original, tensors, target), indent=4) + "\n")
        update_own(root / OF, _key_of(checkpoint), str(target.relative_to(root)))
    return target


def fetched_before(kind: str, checkpoint: CheckpointReader) -> Path | None:
    """The part that was fetched for a checkpoint, if it still fits: the folder may have another checkpoint now."""
    root = folder_of(kind)
    known = read_own(root / OF).get(_key_of(checkpoint))
    if known is None or not (root / known / CONFIG).exists():
        return None
    own = read_json(root / known / CONFIG).get("text_config", {})
    return None if first_difference(own, text_config_of(checkpoint.config or {})) else root / known


def forget(kind: str, checkpoint: CheckpointReader) -> None:
    update_own(folder_of(kind) / OF, _key_of(checkpoint), None)


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
    order = sorted(tensors, key=lambda name: (original.weight_map[name], tensors[name].data_offsets))
    header, n = {}, 0
    for name in order:
        t = tensors[name]
        stop = n + n_bytes(t)
        header[names[name] if names else name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [n, stop]}
        n = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head, part = struct.pack("<Q", len(text)) + text, file.with_name(file.name + ".part")
    done = _resume(part, head, n)
    bar = tqdm(total=n, initial=done, desc="Reading", unit="B", unit_scale=True, disable=None)
    with writing(file), part.open("ab") as f, bar:
        for source, start, stop in _runs(original, order, tensors):
            for begin in range(start + (skipped := min(done, stop - start)), stop, CHUNK_BYTES):
                f.write(data := original.read(source, begin, min(begin + CHUNK_BYTES, stop)))
                bar.update(len(data))
            done -= skipped
    part.replace(file)


def _runs(original: CheckpointReader, order: list[str], tensors: Tensors) -> list[tuple[str, int, int]]:
    """The ranges to read, (file, start, stop). Adjacent tensors are joined into one range."""
    runs: list[tuple[str, int, int]] = []
    for name in order:
        file = original.weight_map[name]
        start, stop = (original.header(file).start + offset for offset in tensors[name].data_offsets)
        if runs and (runs[-1][0], runs[-1][2]) == (file, start):
            runs[-1] = (file, runs[-1][1], stop)
        else:
            runs.append((file, start, stop))
    return runs


def _resume(part: Path, head: bytes, n: int) -> int:
    """Begin a file with these bytes, or keep up to n bytes that another call has written after them. Return their number."""
    if part.exists() and (done := part.stat().st_size - len(head)) <= n:
        with part.open("rb") as f:
            if f.read(len(head)) == head:
                return done
    part.write_bytes(head)
    return 0
