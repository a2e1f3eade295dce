"""``mlx_mtp.convert``: mlx-lm's conversion, with the MTP head kept as it is."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.convert import MODEL_CONVERSION_DTYPES, mixed_quant_predicate_builder
from mlx_lm.utils import (
    dequantize_model,
    get_total_parameters,
    quantize_model,
    save_config,
)
from tqdm import tqdm

from ..checkpoint.hub import HEAD_FILE, INDEX_FILE, commit_of, fetch
from ..checkpoint.load import EXTRA_TENSORS, head_bits, is_head, load
from .graft import graft, measure_acceptance
from .output import (
    USAGE,
    atomic_directory,
    check_written,
    describe_head,
    describe_no_head,
    refuse_existing,
    save,
    upload,
    write_card,
)

COST_TOKENS = 128  # after each built-in prompt, to measure what a quantized head costs


def convert(
    hf_path: str,
    mlx_path: str = "mlx_model",
    quantize: bool = False,
    q_group_size: int | None = None,
    q_bits: int | None = None,
    q_mode: str = "affine",
    dtype: str | None = None,
    upload_repo: str | None = None,
    revision: str | None = None,
    dequantize: bool = False,
    quant_predicate: Callable[[str, nn.Module], bool | dict] | str | None = None,
    trust_remote_code: bool = False,
    *,
    mtp: bool = True,
    mtp_bits: int | None = None,
    mtp_group_size: int = 64,
    graft_mtp_from: str | None = None,
    graft_revision: str | None = None,
    skip_check: bool = False,
) -> None:
    """
    Convert a checkpoint as ``mlx_lm.convert`` does, and keep its MTP head in the dtype that it came in.

    Tensors are read when they are written, a few shards at a time. The output folder appears whole or not at all.

    Args:
        mtp (bool): With ``False``, convert without a head. Default: ``True``, and a checkpoint without one is an error.
        mtp_bits (int, optional): Quantize the head's decoder layer to this many bits (``fc`` and a router never are). It
          costs drafts, in a mixture of experts nearly all of them: how many is measured and printed. Default: ``None``.
        mtp_group_size (int): Group size of that quantization. Default: ``64``.
        graft_mtp_from (str, optional): Convert nothing, but add the head of this path or repository to ``hf_path``, a
          conversion that has lost it. Default: ``None``.
        graft_revision (str, optional): A revision of that repository. Default: ``None``.
        skip_check (bool): Do not run the model to see whether the grafted head is its own, or what ``mtp_bits`` costs.
          Default: ``False``.

    The other arguments are those of ``mlx_lm.convert``.

    Raises:
        FileNotFoundError: The checkpoint or one of its files is not there.
        ValueError: The target exists, the checkpoint has no head or is damaged, the grafted head is not of this model, or
          the arguments contradict each other.
    """
    target = Path(mlx_path)
    if graft_mtp_from is not None:
        if quantize or dequantize or quant_predicate or mtp_bits is not None or not mtp:
            raise ValueError(
                "A graft adds a head in 16 bits and converts nothing: leave out the other flags, or convert."
            )
        graft(
            graft_mtp_from,
            hf_path,
            target,
            mtp_revision=graft_revision,
            revision=revision,
            dtype=dtype,
            skip_check=skip_check,
            name=upload_repo,
        )
        if upload_repo is not None:
            upload(target, upload_repo)
        return
    refuse_existing(target)
    if quantize and dequantize:
        raise ValueError("Choose either quantize or dequantize, not both.")
    if mtp_bits is not None and not mtp:
        raise ValueError("Choose either --mtp-bits or --no-mtp, not both.")

    print("[INFO] Loading")
    source = fetch(hf_path, revision)
    commit = commit_of(source)
    model, tokenizer, config = load(
        hf_path,
        revision=commit or revision,
        return_config=True,
        tokenizer_config={"trust_remote_code": trust_remote_code},
        lazy=True,
        trust_remote_code=trust_remote_code,
        mtp=mtp,
        draft_vocab=0 if mtp else None,
    )
    by_user: Any = quant_predicate
    if isinstance(quant_predicate, str):
        if q_mode != "affine":
            raise ValueError("Quant predicates only support 'affine' quantization.")
        by_user = mixed_quant_predicate_builder(quant_predicate, model, q_group_size or 64)

    _cast(model, dtype, config)
    head = copy.deepcopy(model.mtp) if mtp_bits is not None else None
    if quantize or mtp_bits is not None:
        print("[INFO] Quantizing")
        predicate = _compose(model, by_user if quantize else lambda *_: False, mtp_bits, mtp_group_size)
        model, config = quantize_model(model, config, q_group_size, q_bits, mode=q_mode, quant_predicate=predicate)
    if dequantize:
        print("[INFO] Dequantizing")
        config.pop("quantization", None)
        config.pop("quantization_config", None)
        model = dequantize_model(model)

    if mtp:
        apart = config.get(EXTRA_TENSORS) is not None or config["model_type"] == "qwen3_next"
        origin = config.get("mlx_mtp") or {"source": hf_path, "revision": commit}
        describe_head(config, origin, model.mtp.norm.weight.dtype, head_bits(model), apart)
    else:
        describe_no_head(config)
    with atomic_directory(target) as folder:
        write(folder, model, config, max_shard_bytes(source))
        try:
            tokenizer.save_pretrained(folder)
        except Exception as e:  # tokenizers raises nothing more exact
            raise OSError(f"The tokenizer could not be written: {e}") from e
        for pattern in ("*.py", "generation_config.json"):
            for file in source.glob(pattern):
                shutil.copy(file, folder)
        usage = USAGE.format(name=upload_repo or target) if mtp else ""
        write_card(folder, source / "README.md", None if Path(hf_path).exists() else hf_path, usage)
    if head is not None and mtp_bits is not None and not skip_check:
        _print_cost(target, head, mtp_bits)
    if upload_repo is not None:
        upload(target, upload_repo)


def _cast(model: nn.Module, dtype: str | None, config: dict[str, Any]) -> None:
    """mlx-lm's cast of all that is not quantized. The head is cast only where ``dtype`` asks for it."""
    head_dtype = dtype
    dtype = dtype or config.get("torch_dtype") or config.get("text_config", {}).get("dtype")
    if dtype in MODEL_CONVERSION_DTYPES:
        print("[INFO] Using dtype:", dtype)
        cast_predicate = getattr(model, "cast_predicate", lambda _: True)

        def cast(path, p):
            if not cast_predicate(path) or not mx.issubdtype(p.dtype, mx.floating):
                return p
            if is_head(path) and head_dtype is None:
                return p
            return p.astype(getattr(mx, dtype))

        model.update(tree_map_with_path(cast, model.parameters()))


def _compose(
    model: nn.Module,
    user: Callable[[str, nn.Module], bool | dict] | None,
    mtp_bits: int | None,
    mtp_group_size: int,
) -> Callable[[str, nn.Module], bool | dict]:
    """The user's predicate for the backbone, under the model's own for its routers; the head's apart from both."""
    own = getattr(model, "quant_predicate", None) or (lambda path, module: True)

    def predicate(path: str, module: nn.Module) -> bool | dict:
        by_model = own(path, module)
        is_router = isinstance(by_model, dict)
        if is_head(path):
            if mtp_bits is None or is_router or ".layers." not in path:
                return False
            return {"group_size": mtp_group_size, "bits": mtp_bits, "mode": "affine"}
        if user is None:
            return by_model
        by_user = user(path, module)
        return by_model if is_router and by_user else by_user

    return predicate


def _print_cost(target: Path, head: nn.Module, bits: int) -> None:
    """What the quantization of a head costs: the acceptance with it, and with the head as it was."""
    print("[INFO] Measuring what the quantization of the head costs, on built-in text")
    try:
        model, tokenizer = load(str(target))
        quantized = measure_acceptance(model, tokenizer, COST_TOKENS)
        getattr(model, "language_model", model).mtp = head
        whole = measure_acceptance(model, tokenizer, COST_TOKENS)
    except RuntimeError as e:
        print(f"[INFO] It cannot be measured here: {e}")
        return
    dtype = str(head.fc.weight.dtype).removeprefix("mlx.core.")
    print(f"[INFO] Drafts accepted: {quantized:.0%} with the head at {bits} bits, {whole:.0%} with it in {dtype}")


def max_shard_bytes(source: Path) -> int:
    """The size of a checkpoint's largest file: what is written in files no larger needs memory for a few of them."""
    return max(f.stat().st_size for f in source.glob("model*.safetensors"))


def write(folder: Path, model: nn.Module, config: dict[str, Any], shard_bytes: int) -> None:
    """Write a model's tensors, shard by shard, the index and config.json, and read the head back.

    Raises:
        OSError: A file could not be written, or the head was not read back as it was.
    """
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    head = {name: w for name, w in weights.items() if is_head(name)}
    n_bytes, n_parameters = sum(w.nbytes for w in weights.values()), get_total_parameters(model)
    # mlx-lm's Qwen3-Next leaves tensors that it does not know in a converted checkpoint, and then fails: a file apart.
    apart = config.get(EXTRA_TENSORS) is not None
    inside = {name: w for name, w in weights.items() if not (apart and is_head(name))}
    shards = make_shards_of(inside, shard_bytes)
    # From here on the shards alone hold the tensors, so that each goes when it is written.
    weights.clear()
    inside.clear()
    model.update(tree_map_with_path(lambda *_: mx.array([]), model.parameters()))

    weight_map = {}
    for i in tqdm(range(len(shards)), desc="Writing", unit="shard", disable=None):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        shard, shards[i] = shards[i], {}
        save(folder / name, shard)
        weight_map.update(dict.fromkeys(shard, name))
        del shard
        mx.clear_cache()
    if apart:
        save(folder / HEAD_FILE, head)
        weight_map.update(dict.fromkeys(head, HEAD_FILE))
    index = {
        "metadata": {"total_size": n_bytes, "total_parameters": n_parameters},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=4))
    save_config(config, folder / "config.json")

    check_written(folder, head, weight_map)


def make_shards_of(weights: dict[str, mx.array], shard_bytes: int) -> list[dict[str, mx.array]]:
    """mlx-lm's ``make_shards``, of any number of bytes."""
    shards: list[dict[str, mx.array]] = [{}]
    size = 0
    for name, w in weights.items():
        if shards[-1] and size + w.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = w
        size += w.nbytes
    return shards
