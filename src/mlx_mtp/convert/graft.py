"""``mlx_mtp.convert --graft-mtp-from``: an original's MTP head beside the weights of a conversion that has lost it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint.hub import HEAD_FILE, INDEX_FILE, Checkpoint, Tensor, fetch
from ..checkpoint.load import (
    check_config,
    check_head,
    first_difference,
    is_raw_file,
    load,
    own_head_file,
    quantization_beside,
    skeleton,
)
from ..decoding.loop import mtp_generate_step
from ..decoding.pace import DraftCounts
from ..models.mtp import sanitize_head, split_head
from ..prompts import PYTHON
from .output import USAGE, atomic_directory, check_written, describe_head, refuse_existing, save

DTYPES = ("BF16", "F16", "F32")
# On the built-in prompts a model's own head reaches 0.5 to 0.9. One that knows nothing of the model is right no more often
# than the model's most frequent token occurs, 0.1 to 0.15 there; random heads and those of other models have 0 to 0.03.
FLOOR = 0.3
MAX_TOKENS = 32  # of each prompt, to tell a head from another model's; what quantization costs takes more to tell


def graft(
    mtp_from: str,
    model: str,
    target: Path,
    *,
    mtp_revision: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    skip_check: bool = False,
    name: str | None = None,
) -> None:
    """
    Add the MTP head of an original to a conversion of it. Its weights are hard-linked, or else copied, unchanged.

    Of a repository on the hub only the head's bytes are fetched, and the headers that tell where they lie.

    Args:
        mtp_from (str): The path or the huggingface repository of the original.
        model (str): That of the conversion.
        target (Path): The folder to write, which appears whole or not at all.
        dtype (str, optional): What to cast the head to. Default: ``None``, as the original has it.
        skip_check (bool): Do not run the model to see whether the head is its own. Default: ``False``.
        name (str, optional): What the model card calls the new checkpoint. Default: ``None``, its folder.

    Raises:
        FileNotFoundError: A checkpoint or one of its files is not there.
        ValueError: The target exists, or the head does not fit or is not of this model; nothing is written then.
    """
    refuse_existing(target)
    donor, receiver = Checkpoint(mtp_from, mtp_revision), Checkpoint(str(fetch(model, revision)))
    config, donor_config = check_config(receiver.config, model), check_config(donor.config, mtp_from)
    donor_map = donor.weight_map(own_head_file(mtp_from, donor_config))
    receiver_map = receiver.weight_map()
    names = split_head({name: name for name in donor_map})[1].values()
    if not names:
        raise ValueError(f"{mtp_from} has no MTP head to graft: name the original that {model} was converted from.")
    check_head(mtp_from, donor_config, donor_map)
    difference = first_difference(donor_config, config) or _vocabulary_difference(
        donor, donor_map, receiver, receiver_map
    )
    if difference:
        raise ValueError(f"The MTP head of {mtp_from} does not fit {model}: {difference}.")
    tensors = donor.tensors(names, donor_map)
    if any(name.endswith(".scales") or t.dtype not in DTYPES for name, t in tensors.items()):
        raise ValueError(f"The MTP head of {mtp_from} is quantized: graft that of the original in bfloat16.")
    raw = _is_raw(donor, donor_map, tensors)

    with atomic_directory(target) as folder:
        print("[INFO] Reading the head")
        head = _to_parameters(skeleton(config, model), _read(donor, tensors, folder), raw, dtype)
        save(folder / HEAD_FILE, head)
        assert receiver.folder is not None
        _link_files(receiver.folder, folder, own_head_file(model, config))
        weight_map = {name: file for name, file in split_head(receiver_map)[0].items()}
        weight_map.update(dict.fromkeys(head, HEAD_FILE))
        check_written(folder, head, weight_map)
        _write_index(receiver, folder, weight_map, sum(w.nbytes for w in head.values()))
        config.update(quantization_beside(config, head))
        origin = donor_config.get("mlx_mtp") or {"source": mtp_from, "revision": donor.revision}
        describe_head(config, origin, next(iter(head.values())).dtype, None, apart=True)
        (folder / "config.json").write_text(json.dumps(config, indent=4) + "\n")
        with (folder / "README.md").open("a") as f:
            f.write(USAGE.format(name=name or target))
        if not skip_check:
            _check_acceptance(folder, mtp_from, model)


def _vocabulary_difference(
    donor: Checkpoint, donor_map: dict[str, str], receiver: Checkpoint, receiver_map: dict[str, str]
) -> str:
    rows = []
    for checkpoint, weight_map in ((donor, donor_map), (receiver, receiver_map)):
        names = [name for name in weight_map if name.endswith("embed_tokens.weight")][:1]
        rows += [t.shape[0] for t in checkpoint.tensors(names, weight_map).values()]
    return f"its vocabulary has {rows[0]} rows, not {rows[1]}" if len(rows) == 2 and rows[0] != rows[1] else ""


def _is_raw(donor: Checkpoint, weight_map: dict[str, str], head: dict[str, Tensor]) -> bool:
    """Whether the donor's head is in the Hugging Face layout."""
    convolution = [name for name in weight_map if name.endswith("conv1d.weight")][:1]
    raw = any(t.shape[-1] != 1 for t in donor.tensors(convolution, weight_map).values())
    assert donor.config is not None
    if (file := own_head_file(donor.name, donor.config)) is not None:
        return is_raw_file(donor.name, donor.config, raw, head, donor.header(file)[1])
    return raw


def _read(donor: Checkpoint, tensors: dict[str, Tensor], folder: Path) -> dict[str, mx.array]:
    """The head's tensors, which are read when they are used."""
    weights: dict[str, Any] = {}
    if donor.folder is not None:
        for file in {t.file for t in tensors.values()}:
            weights.update(mx.load(str(donor.folder / file)))  # type: ignore[arg-type]
    else:
        donor.save(tensors, part := folder / "part.safetensors")
        weights.update(mx.load(str(part)))  # type: ignore[arg-type]
        mx.eval(weights)
        part.unlink()
    return split_head({name: weights[name] for name in tensors})[1]


def _to_parameters(model: nn.Module, head: dict[str, mx.array], raw: bool, dtype: str | None) -> dict[str, mx.array]:
    """A head's tensors under the names, in the shapes and with the values of the model's parameters."""
    head = sanitize_head(model.mtp, head, raw)
    if dtype is not None:
        head = {name: w.astype(getattr(mx, dtype)) for name, w in head.items()}
    return {model.head_prefix + name: w for name, w in head.items()}


def _link_files(source: Path, folder: Path, old_head: str | None) -> None:
    """The files of a checkpoint but for those of a head: weights are linked, the rest is copied."""
    for file in source.iterdir():
        if not file.is_file() or file.name in (HEAD_FILE, old_head):
            continue
        if file.suffix == ".safetensors":
            try:
                os.link(file.resolve(), folder / file.name)  # the cache's files are links themselves
                continue
            except OSError:
                pass  # another disk, or one that knows no links
        shutil.copy(file, folder / file.name)


def _write_index(receiver: Checkpoint, folder: Path, weight_map: dict[str, str], n_bytes: int) -> None:
    metadata = receiver.read_json(INDEX_FILE).get("metadata", {}) if INDEX_FILE in receiver.files else {}
    if "total_size" in metadata:
        metadata["total_size"] += n_bytes
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_FILE).unlink(missing_ok=True)
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=4))


def _check_acceptance(folder: Path, mtp_from: str, model: str) -> None:
    print("[INFO] Checking the head on built-in text")
    try:
        loaded, tokenizer = load(str(folder))
        acceptance = measure_acceptance(loaded, tokenizer, MAX_TOKENS)
    except RuntimeError as e:
        raise ValueError(f"{model} cannot be run here ({e}): --skip-check leaves out the check of its head.") from e
    if acceptance < FLOOR:
        raise ValueError(
            f"The model accepts {acceptance:.0%} of the drafts of the head of {mtp_from}, on built-in text, where its own "
            f"reaches {FLOOR:.0%} at the least: nothing was written. Graft from the original that {model} was converted from."
        )
    print(f"[INFO] Drafts accepted on built-in text: {acceptance:.0%}")


def measure_acceptance(model: nn.Module, tokenizer, max_tokens: int) -> float:
    """The share of single drafts that the model's own greedy choice confirms, over the tokens after each built-in prompt."""
    counts = DraftCounts()
    for prompt in PYTHON:
        tokens = mx.array(tokenizer.encode(prompt))
        for _ in mtp_generate_step(tokens, model, max_tokens=max_tokens, num_draft_tokens=1, counts=counts):
            pass
    return sum(counts.accepted) / max(sum(counts.drafted), 1)
