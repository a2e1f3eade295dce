"""``mlx_mtp convert``: mlx-lm's conversion that keeps the MTP head and the vision encoder."""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.convert import MODEL_CONVERSION_DTYPES, mixed_quant_predicate_builder
from mlx_lm.utils import dequantize_model, get_total_parameters, make_shards, quantize_model, save_config
from tqdm import tqdm

from ..checkpoint import output
from ..checkpoint.adapters import check_adapter
from ..checkpoint.config import EXTRA_TENSORS, Config, check_config, family_in, read_json, text_config_of, with_ends
from ..checkpoint.heads.formats import head_bits
from ..checkpoint.heads.originals import check_method
from ..checkpoint.hub import HEAD_FILE, fetch, first_line
from ..checkpoint.load import find_vision, load
from ..checkpoint.reader import CheckpointReader
from ..core.models.head_weights import in_files, is_head
from ..core.models.mixin import MTPModel
from ..core.models.ngrams import NgramTable, Quantized, floats
from ..errors import MTPError, MTPOSError, as_mtp_error
from ..files import writing
from ..images.tower import CONFIG_FILES
from .graft import graft, named_tower

GENERATION = "generation_config.json"
GROUP_SIZES = (128, 64, 32)  # of MLX, for affine quantization
TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "*.tiktoken", "added_tokens.json", "special_tokens_map.json", "chat_template*",
    "additional_chat_templates/*",
)  # fmt: skip
# A row has 160 numbers, which larger groups do not divide.
FOUR_BITS: Quantized = {"group_size": 32, "bits": 4, "mode": "affine"}
NAME = "language_model.model.layers.{}.ple.ple_embedding.ngram_embedding.shards.{}"
Written = dict[str, tuple[str, int]]  # the file of each tensor, and its bytes
Decision = bool | dict[str, Any]  # whether to quantize a module, or how
QuantPredicate = Callable[[str, nn.Module], Decision]


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
    quant_predicate: QuantPredicate | str | None = None,
    trust_remote_code: bool = False,
    *,
    adapter_path: str | None = None,
    mtp: bool = True,
    graft_mtp_from: str | None = None,
    graft_vision_from: str | None = None,
    graft_revision: str | None = None,
    skip_check: bool = False,
    vision: bool = True,
) -> None:
    """Convert a checkpoint as ``mlx_lm.convert`` does, and keep its MTP head and its vision encoder in the original dtype.

    Other arguments are those of ``mlx_lm.convert``. The output folder appears when it is complete.

    Args:
        adapter_path (str, optional): Fuse a trained adapter into the weights, as ``mlx_lm.fuse`` does. Default: ``None``.
        mtp (bool): ``False`` drops the head; with ``True`` the checkpoint must have one. Default: ``True``.
        graft_mtp_from (str, optional): Instead of a conversion, add the head of this path or repository to ``hf_path``, a
          conversion without a head. Default: ``None``.
        graft_vision_from (str, optional): The same for its vision encoder; both can be added at once. Default: ``None``.
        graft_revision (str, optional): The revision of these repositories. Default: ``None``.
        skip_check (bool): Do not measure the acceptance rate of a grafted head. Default: ``False``.
        vision (bool): ``False`` drops the vision encoder and the settings of its images. Default: ``True``, keep it if there is
          one.

    Raises:
        FileNotFoundError: The checkpoint or one of its files is missing.
        MTPError: The target exists, the head or the tower is missing, damaged or from another model, or arguments contradict
          each other.
    """
    target = Path(mlx_path)
    output.check_new(target)
    how = Quantization(quantize, dequantize, q_group_size, q_bits, q_mode, quant_predicate)
    if graft_mtp_from is not None or graft_vision_from is not None:
        if how.quantize or how.dequantize or how.flags or adapter_path is not None or not mtp or not vision:
            raise MTPError(
                "A graft converts nothing: omit the flags of a conversion, or --graft-mtp-from and --graft-vision-from."
            )
        graft(
            hf_path, target, mtp_from=graft_mtp_from, vision_from=graft_vision_from, original_revision=graft_revision,
            revision=revision, dtype=dtype, skip_check=skip_check, name=upload_repo,
        )  # fmt: skip
    else:
        how.check()
        if adapter_path is not None:
            check_adapter(adapter_path, "--adapter-path")
        checkpoint = CheckpointReader(hf_path, revision)
        check_method(checkpoint)
        print("[INFO] Loading")
        own = check_config(checkpoint.config, hf_path)
        if (family := family_in(own)) is not None and family.pack_of is not None:
            raise MTPError(
                f"{hf_path} is packed, and nothing in a model of type {own['model_type']} can be converted: load it as it "
                "is, or add its base model's head with --graft-mtp-from or vision encoder with --graft-vision-from."
            )
        commit = checkpoint.revision
        model, tokenizer, config = load(
            hf_path, revision=commit or revision, return_config=True, adapter_path=adapter_path, lazy=True, mtp=mtp,
            tokenizer_config={"trust_remote_code": trust_remote_code}, trust_remote_code=trust_remote_code,
            draft_vocab=0 if mtp else None,
        )  # fmt: skip
        source = fetch(hf_path, commit or revision, weights=())
        if adapter_path is not None:
            print("[INFO] Fusing the adapter")
            fused = [(name, m.fuse()) for name, m in model.named_modules() if hasattr(m, "fuse")]
            model.update_modules(tree_unflatten(fused))
        chosen = dtype or config.get("torch_dtype") or config.get("text_config", {}).get("dtype")
        kind = getattr(mx, chosen) if chosen in MODEL_CONVERSION_DTYPES else None
        if kind is not None:
            cast(model, kind, config, with_head=dtype is not None)
        model, config = how.apply(model, config)
        images = find_vision(CheckpointReader(hf_path, folder=source), config) if vision else None
        sees = images is not None and getattr(model, "no_images", None) is None
        _record_head(config, model if mtp else None, hf_path, commit)
        config = with_ends(config, tokenizer.eos_token_ids)
        usage = (output.USAGE + output.IMAGES * sees).format(name=upload_repo or target) if mtp else ""
        with output.atomic_directory(target) as folder:
            tables = write_tables(folder, model, config, quantize, kind)
            write_model(folder, model, config, {} if images is None else named_tower(images.lazy_tower()), tables)
            _write_files(folder, source, tokenizer.eos_token_ids, () if images is None else CONFIG_FILES)
            base_model = None if Path(hf_path).exists() else hf_path
            output.write_card(folder, source / "README.md", base_model, usage, takes_images=sees)
    if upload_repo is not None:
        upload(target, upload_repo)


def _record_head(config: Config, model: MTPModel | None, hf_path: str, commit: str | None) -> None:
    if model is None:
        for key in ("mtp_num_hidden_layers", "mlx_mtp", EXTRA_TENSORS):
            config.pop(key, None)
        if "mtp_num_hidden_layers" in (text_config := text_config_of(config)):
            text_config["mtp_num_hidden_layers"] = 0
        return
    separate = config.get(EXTRA_TENSORS) is not None or model.family.separates_head
    origin = config.get("mlx_mtp") or {"source": hf_path, "revision": commit}
    output.describe_head(config, origin, model.mtp.pre_fc_norm_hidden.weight.dtype, head_bits(model.mtp), separate)


def _write_files(folder: Path, source: Path, ends: set[int], others: Iterable[str]) -> None:
    """Copy the tokenizer, the model's code and these files as they are. A generation config names all of the ends of text."""
    for pattern in (*TOKENIZER_FILES, "*.py", GENERATION, *others):
        for file in filter(Path.is_file, source.glob(pattern)):
            copy = folder / file.relative_to(source)
            with writing(copy):
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(file, copy)
    with suppress(FileNotFoundError, MTPError):  # none, or no JSON
        if (complete := with_ends(own := read_json(folder / GENERATION), ends)) != own:
            (folder / GENERATION).write_text(json.dumps(complete, indent=4) + "\n")


def write_model(folder: Path, model: nn.Module, config: Config, tower: dict[str, mx.array], tables: Written) -> None:
    """Write a model, which has no weights afterwards, and a vision encoder, with an index and config.json. Read both back."""
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    head = {name: parameters.pop(name) for name in [*parameters] if is_head(name)}
    if isinstance(model, MTPModel):
        head = in_files(model, {name.removeprefix(model.head_prefix): w for name, w in head.items()})
    weights = parameters | head | tower
    n_parameters = get_total_parameters(model) + sum(w.size for w in tower.values())
    n_bytes = sum(w.nbytes for w in weights.values()) + sum(n for _, n in tables.values())
    metadata = {"total_size": n_bytes, "total_parameters": n_parameters}
    separate = config.get(EXTRA_TENSORS) is not None
    shards = make_shards({n: w for n, w in weights.items() if not (separate and n in head)})
    # Now only the shards hold the tensors, so each tensor is freed once written.
    weights.clear()
    parameters.clear()
    model.update(tree_map_with_path(lambda *_: mx.array([]), model.parameters()))

    weight_map = {name: file for name, (file, _) in tables.items()}
    for i in tqdm(range(len(shards)), desc="Writing", unit="shard", disable=None):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        shard = shards[i]
        shards[i] = {}
        output.save(folder / name, shard)
        weight_map |= dict.fromkeys(shard, name)
        del shard
        mx.clear_cache()
    if separate:
        output.save(folder / HEAD_FILE, head)
        weight_map |= dict.fromkeys(head, HEAD_FILE)
    output.write_index(folder, weight_map, metadata)
    save_config(config, folder / "config.json", keep_vision_config=bool(tower))
    output.check_written(folder, head | tower, weight_map)


def write_tables(folder: Path, model: Any, config: Config, quantize: bool, dtype: mx.Dtype | None) -> Written:
    """Write the tables of a model, if any, quantized if asked, or in ``dtype``, and record their quantization in the config."""
    written: Written = {}
    ngrams = getattr(model, "ngrams", None)  # mlx-lm's own models have none
    for i, table in (ngrams.tables if ngrams is not None else {}).items():
        of_rows = table.quantized or (FOUR_BITS if quantize else None)
        size, others = divmod(len(table.rows), n := model.text_args.split_ngram_parts)
        ends = [*accumulate((size + (j < others) for j in range(n)), initial=0)]  # parts as mlx-vlm reads them
        for j in tqdm(range(n), desc="Writing the n-gram table", unit="part", disable=None):
            name = NAME.format(i, j)
            file = f"model-ngrams-{i}-{j + 1:05d}-of-{n:05d}.safetensors"
            part = _part(table, ends[j], ends[j + 1], of_rows, dtype)
            output.save(folder / file, {f"{name}.{kind}": x for kind, x in part.items()})
            written |= {f"{name}.{kind}": (file, x.nbytes) for kind, x in part.items()}
            for key in ("quantization", "quantization_config"):
                if of_rows is not None and key in config:
                    config[key][name] = {**of_rows}
            del part
            mx.clear_cache()
    return written


def _part(
    table: NgramTable, begin: int, end: int, of_rows: Quantized | None, dtype: mx.Dtype | None
) -> dict[str, mx.array]:
    blocks = []
    for i, k in table.blocks(begin, end):
        rows = {name: floats(mx.array(x)) for name, x in table.rows.read_range(i, k).items()}
        if table.quantized is None:
            w = rows["weight"] if dtype is None else rows["weight"].astype(dtype)
            arrays = (w,) if of_rows is None else mx.quantize(w, **of_rows)
            rows = dict(zip(("weight", "scales", "biases"), arrays))
        mx.eval(rows)
        blocks.append(rows)
    return {name: mx.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def upload(folder: Path, repo: str) -> None:
    """Upload a folder. mlx-lm's own function replaces the model card, and uses an API that huggingface_hub 2 lacks."""
    api = HfApi()
    try:
        api.create_repo(repo_id=repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder)
    except (HTTPError, OSError, ValueError) as e:
        raise MTPOSError(
            f"{folder} is complete, but could not be uploaded to {repo} ({first_line(e)}): `hf upload {repo} {folder}` does it."
        ) from e
    print(f"Upload successful, go to https://huggingface.co/{repo} for details.")


def cast(model: nn.Module, dtype: mx.Dtype, config: Config, with_head: bool) -> None:
    """Cast the weights that are not quantized, as mlx-lm does."""
    name = output.dtype_name(dtype)
    print("[INFO] Using dtype:", name)
    for part in (config, text_config_of(config)):  # for the next conversion
        part.update({key: name for key in ("dtype", "torch_dtype") if key in part})
    text_config_of(config)["dtype"] = name
    may_cast = getattr(model, "cast_predicate", lambda _: True)

    def cast_one(path: str, p: mx.array) -> mx.array:
        keep = not may_cast(path) or not mx.issubdtype(p.dtype, mx.floating) or (is_head(path) and not with_head)
        return p if keep else p.astype(dtype)

    model.update(tree_map_with_path(cast_one, model.parameters()))


class Quantization(NamedTuple):
    quantize: bool
    dequantize: bool
    group_size: int | None
    bits: int | None
    mode: str
    predicate: QuantPredicate | str | None

    @property
    def flags(self) -> dict[str, Any]:
        mode = None if self.mode == "affine" else self.mode
        flags = {"--q-bits": self.bits, "--q-group-size": self.group_size, "--q-mode": mode}
        return {flag: x for flag, x in {**flags, "--quant-predicate": self.predicate}.items() if x is not None}

    def check(self) -> None:
        if self.quantize and self.dequantize:
            raise MTPError("Choose either quantize or dequantize, not both.")
        if not self.quantize and self.flags:
            raise MTPError(f"{next(iter(self.flags))} requires --quantize.")
        if isinstance(self.predicate, str):
            if self.mode != "affine":
                raise MTPError("Quant predicates only support 'affine' quantization.")
            low = int(self.predicate.split("_")[1])  # of mixed_LOW_HIGH
            if self.bits not in (None, low):
                raise MTPError(
                    f"--quant-predicate {self.predicate} has {low} bits or more, not --q-bits {self.bits}: omit one."
                )
        if self.group_size is not None and self.group_size < 1:
            raise MTPError(f"--q-group-size must be 1 or more, not {self.group_size}.")
        given = " ".join(f"{flag} {value}" for flag, value in self.flags.items())
        with as_mtp_error(f"MLX cannot quantize with {given}", ValueError):
            mx.quantize(mx.zeros((1, self.group_size or 128)), self.group_size, self.bits, self.mode)

    def apply(self, model: Any, config: Config) -> tuple[Any, Config]:
        """Quantize or dequantize a model, and record it in the config. An MTPError if mlx-lm would quantize no layer."""
        if self.quantize:
            print("[INFO] Quantizing")
            user = self.predicate
            before = _quantized(model)
            if isinstance(user, str):
                user = mixed_quant_predicate_builder(user, model, self.group_size or 64)
            predicate = backbone_predicate(model, user)
            sizes = self.group_size, self.bits
            model, config = quantize_model(model, config, *sizes, mode=self.mode, quant_predicate=predicate)
            if len(_quantized(model)) == len(before):
                reason = f"no layer's width is a multiple of --q-group-size {self.group_size or 'of this mode'}"
                if any(predicate(path, module) for path, module in before.items()):
                    reason = "it is quantized already, so give the base model, or --dequantize first"
                raise MTPError(f"Nothing would be quantized: {reason}.")
            size = config["quantization"]["group_size"]
            left = {
                re.sub(r"\d+", "*", path): module.weight.shape[-1]
                for path, module in model.named_modules()
                if hasattr(module, "to_quantized") and module.weight.shape[-1] % size and predicate(path, module)
            }
            if left:
                fitting = [
                    n for n in GROUP_SIZES if self.mode == "affine" and not any(width % n for width in left.values())
                ]
                other = f"--q-group-size {fitting[0]} would quantize them" if fitting else "nor does another group size"
                print(f"[INFO] Not quantized, since {size} does not divide their widths: {', '.join(left)}; {other}")
        if self.dequantize:
            print("[INFO] Dequantizing")
            config.pop("quantization", None)
            config.pop("quantization_config", None)
            model = dequantize_model(model)
        return model, config


def _quantized(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if hasattr(module, "scales")}


def backbone_predicate(model: nn.Module, user: QuantPredicate | None = None) -> QuantPredicate:
    """Combine the user's predicate for the backbone with the model's predicate for its routers. The head is not quantized."""
    own = getattr(model, "quant_predicate", None) or (lambda path, module: True)

    def predicate(path: str, module: nn.Module) -> Decision:
        if is_head(path):
            return False
        by_model: Decision = own(path, module)
        by_user = by_model if user is None else user(path, module)
        return by_model if isinstance(by_model, dict) and by_user else by_user

    return predicate
