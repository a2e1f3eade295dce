"""Load a checkpoint with its MTP head, or say what is wrong with it."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.utils import load_adapters, load_model, load_tokenizer
from safetensors import SafetensorError, safe_open

from ..models import model_module
from ..models.draft_lm_head import BITS, DraftLMHead, quantize_head
from ..models.mtp import is_raw, split_head
from .hub import INDEX_FILE, WEIGHTS, fetch, parse_json, weight_map_of
from .settings import find
from .vocabulary import DraftVocab, choose_ids

DEMO = Path(__file__).parents[1] / "demo"
DRAFTER = "qwen3_5_mtp"  # model type of a folder with a head alone, as mlx-vlm writes it
EXTRA_TENSORS = "mlx_lm_extra_tensors"  # the config's key for files beside those of the model
SUPPORTED = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
FEW_BITS = 4
SIZES = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "rms_norm_eps",
)  # fmt: skip

log = logging.getLogger(__name__)


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    mtp: bool | str = True,
    draft_vocab: DraftVocab | None = None,
    mtp_bits: int | None = None,
    draft_head_bits: int | None = None,
    settings: bool | str | Path = True,
) -> Any:
    """
    Load the model, its MTP head and the tokenizer from a given path or a huggingface repository.

    The head may be among the model's tensors, in a file of its own that config.json names under
    ``mlx_lm_extra_tensors.mtp_file``, or in a drafter apart, each in 16 bits or quantized.

    Args:
        path_or_hf_repo (str): The path or the huggingface repository to load the model from.
        mtp (Union[bool, str]): ``True`` for the head that the model has, or the path or repository of a drafter with a
          head alone (``model_type: qwen3_5_mtp``, mlx-vlm's layout). With ``False`` this is ``mlx_lm.load``: no head, any
          model. Default: ``True``.
        draft_vocab (Union[int, str, Path, Sequence[int]], optional): The token ids that drafts are chosen from: the first
          so many, those in a file of ``mlx_mtp.draft_vocab``, or these. Special and stop tokens are always in, and those of
          the text join as it grows. ``0`` is all. Default: ``None``, which is the list beside the checkpoint,
          ``draft_vocab.json``, or all where there is none.
        mtp_bits (int, optional): Quantize the head's decoder layer to this many bits, in memory alone (``fc`` and a router
          never are). Default: ``None``.
        draft_head_bits (int, optional): Quantize a copy of ``lm_head`` to this many bits, for the drafts alone.
          Default: ``None``.
        settings (Union[bool, str, Path]): ``True`` for what ``python -m mlx_mtp.benchmark --tune`` has found best for this
          checkpoint on this machine, if it has run: the three arguments above, unless one of them is given, and what
          ``num_draft_tokens`` and ``draft_p_min`` are where they are not given. A path for what it has written elsewhere,
          ``False`` for neither. Default: ``True``.

    The other arguments are those of ``mlx_lm.load``.

    Returns:
        Tuple[nn.Module, TokenizerWrapper]: The model and the tokenizer, and with ``return_config`` the config, a dictionary.

    Raises:
        FileNotFoundError: The model or one of its files is not there.
        ValueError: The model type is not supported, the head is not there or not whole, or a file is damaged.
    """
    by_user = any(x is not None for x in (draft_vocab, mtp_bits, draft_head_bits))
    path = fetch(path_or_hf_repo, revision)
    if not mtp:
        if by_user or not isinstance(settings, bool):
            raise ValueError(
                "draft_vocab, mtp_bits, draft_head_bits and settings are of the MTP head: leave them out, or load it."
            )
        with _loading(path_or_hf_repo):
            return mlx_lm.load(
                str(path),
                tokenizer_config=tokenizer_config,
                model_config=model_config,
                adapter_path=adapter_path,
                lazy=lazy,
                return_config=return_config,
                trust_remote_code=trust_remote_code,
            )
    config = read_config(path, path_or_hf_repo)
    module = model_module(config["model_type"])
    head: dict[str, mx.array] | None = None
    if isinstance(mtp, str):
        tensor_names(path)
        head, raw = load_drafter(mtp, path_or_hf_repo, config)
    else:
        head_file = own_head_file(path_or_hf_repo, config)
        if head_file is not None and not (path / head_file).exists():
            path = fetch(path_or_hf_repo, revision, head_file)
        check_head(path_or_hf_repo, config, tensor_names(path, head_file))
        if head_file is not None:
            weights: Any
            weights, metadata = mx.load(str(path / head_file), return_metadata=True)
            head, raw = split_head(weights)[1], None

    class Model(module.Model):  # type: ignore[name-defined]
        def sanitize(self, weights):
            if head is None:
                return super().sanitize(weights)
            head_is_raw = raw
            if head_is_raw is None:
                head_is_raw = is_raw_file(path_or_hf_repo, config, is_raw(weights), head, metadata)
            return super().sanitize(weights, head, head_is_raw)

    model_config = {**(model_config or {}), "mtp_num_hidden_layers": 1}
    if head is not None:
        model_config.update(quantization_beside(config, head))
    with _loading(path_or_hf_repo):
        model, config = load_model(
            path,
            lazy=lazy,
            model_config=model_config,
            get_model_classes=lambda config: (Model, module.ModelArgs),
            trust_remote_code=trust_remote_code,
        )
    if (bits := head_bits(model)) is not None and bits <= FEW_BITS:
        log.warning("[WARNING] " + few_bits(mtp if isinstance(mtp, str) else path_or_hf_repo, bits, path_or_hf_repo))
    if adapter_path is not None:
        model = load_adapters(model, adapter_path)
        model.eval()
    try:
        tokenizer = load_tokenizer(path, tokenizer_config, eos_token_ids=config.get("eos_token_id", None))
        if not tokenizer.encode("a", add_special_tokens=False):
            raise ValueError("it knows no text")
    except Exception as e:  # tokenizers raises nothing more exact
        raise ValueError(
            f"The tokenizer of {path_or_hf_repo} is missing or damaged ({e}): download its files again."
        ) from e
    folders = [path, *(Path(more) for more in (mtp, adapter_path) if isinstance(more, str))]
    if not by_user and (tuned := find(settings, folders)) is not None:
        model.drafting.tuned = tuned
        draft_vocab, mtp_bits, draft_head_bits = tuned.draft_vocab, tuned.mtp_bits, tuned.draft_head_bits
    cheapen_drafts(model, tokenizer, path, draft_vocab, mtp_bits, draft_head_bits)
    if not lazy:
        mx.eval(
            model.parameters(), [] if model.drafting.lm_head is None else model.drafting.lm_head.layers[0].parameters()
        )
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def cheapen_drafts(
    model: nn.Module,
    tokenizer,
    path: Path,
    draft_vocab: DraftVocab | None,
    mtp_bits: int | None,
    draft_head_bits: int | None,
) -> None:
    """What ``mlx_mtp.load`` does with these arguments; ``path`` is the checkpoint's folder."""
    for name, bits in (("mtp_bits", mtp_bits), ("draft_head_bits", draft_head_bits)):
        if bits is not None and bits not in BITS:
            raise ValueError(f"{name} is {bits}; MLX quantizes to {', '.join(map(str, BITS))} bits.")
    if mtp_bits is not None:
        quantize_head(model.mtp, mtp_bits)
    ids = choose_ids(draft_vocab, path, model.output_layer.weight.shape[0], tokenizer)
    if ids is not None or draft_head_bits is not None:
        model.drafting.lm_head = DraftLMHead(model.output_layer, ids, draft_head_bits)


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """MLX's error of a file that it cannot read is of the system, and this one of the user; mlx-lm takes a config as it is."""
    try:
        yield
    except RuntimeError as e:
        raise ValueError(f"{name} could not be loaded: {e}") from e
    except (AttributeError, KeyError, TypeError) as e:
        raise ValueError(f"{name} could not be loaded ({e!r}): is its config.json as it was published?") from e


def skeleton(config: dict[str, Any], name: str) -> nn.Module:
    """The model of a config, with a head; weights that are never evaluated take no memory."""
    module = model_module(config["model_type"])
    with _loading(name):
        return module.Model(module.ModelArgs.from_dict({**config, "mtp_num_hidden_layers": 1}))


def tensor_names(path: Path, head_file: str | None = None) -> list[str]:
    """The names of a checkpoint's tensors, from the headers of its files.

    Raises:
        FileNotFoundError: There is no file of weights, or one that the index or the config names is missing.
        ValueError: A file is cut short or damaged.
    """
    files = {file.name: file for file in sorted(path.glob(WEIGHTS))}
    if not files:
        raise FileNotFoundError(f"No safetensors found in {path}")
    if head_file is not None:
        if not (path / head_file).exists():
            raise FileNotFoundError(f"{path} lacks {head_file}, which its config names: download it again.")
        files[head_file] = path / head_file
    names: set[str] = set()
    for file in files.values():
        try:
            with safe_open(file, framework="numpy") as f:
                names.update(f.keys())
        except SafetensorError as e:
            raise ValueError(f"{file} is cut short or damaged ({e}): download or convert it again.") from e
    if (index := path / INDEX_FILE).exists():
        weight_map = weight_map_of(read_json(index), str(index))
        if missing := sorted(set(weight_map.values()) - files.keys()):
            raise FileNotFoundError(f"{path} lacks {missing[0]}, which its index names: download it again.")
        if missing := sorted(set(weight_map) - names):
            raise ValueError(f"{path} lacks the tensor {missing[0]}, which its index names: download it again.")
    return sorted(names)


def check_head(name: str, config: dict[str, Any], tensors: Iterable[str]) -> None:
    """Raise a ValueError that says what to do where a checkpoint has no MTP head among its tensors."""
    text_config = config.get("text_config", config)
    if text_config.get("mtp_use_dedicated_embeddings"):
        raise ValueError(
            f"The MTP head of {name} has embeddings of its own, which is not supported: generate without --mtp."
        )
    _, head = split_head(dict.fromkeys(tensors))
    if head:
        return
    mend = (
        "convert the original with `mlx_mtp.convert --hf-path ORIGINAL -q`, which keeps the head, or add the original's head "
        f"with `mlx_mtp.convert --graft-mtp-from ORIGINAL --model {name}`, or generate without --mtp (convert with "
        "--no-mtp)."
    )
    if text_config.get("mtp_num_hidden_layers"):
        raise ValueError(f"The config of {name} claims an MTP head, but its weights have none: {mend}")
    raise ValueError(f"{name} has no MTP head: {mend}")


def own_head_file(name: str, config: dict[str, Any]) -> str | None:
    """The file beside those of the model that holds the head, where the config names one."""
    extra = config.get(EXTRA_TENSORS)
    file = extra.get("mtp_file") if isinstance(extra, dict) else None
    if file is None:
        return None
    if not isinstance(file, str) or PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
        raise ValueError(f"The config of {name} names {file!r} as the file of its MTP head, which is none of its own.")
    return file


def is_raw_file(
    name: str, config: dict[str, Any], beside_raw: bool, head: Iterable[str], metadata: Mapping[str, str]
) -> bool:
    """Whether a head in a file of its own is in the Hugging Face layout, so that its norms are yet to be shifted.

    A conversion of ours has it in its config. Otherwise the file is as the backbone beside it, whose convolutions tell; but
    one that PyTorch wrote, or whose experts are named as in an original, beside a converted backbone, may be either. The
    norms' values tell nothing: right ones can be near 0 or near 1 in both.

    Args:
        beside_raw (bool): Whether the backbone is in the Hugging Face layout.
        head (Iterable[str]): The names of the head's tensors.
        metadata (Mapping[str, str]): Of the file.

    Raises:
        ValueError: It cannot be told.
    """
    record = config.get("mlx_mtp")
    if isinstance(record, dict) and isinstance(record.get("norms_shifted"), bool):
        return not record["norms_shifted"]
    if beside_raw:
        return True
    if metadata.get("format") == "pt" or any(".experts." in tensor for tensor in head):
        raise ValueError(
            f"The MTP head of {name} is in a file of its own that looks like the original's beside converted weights: whether "
            "its norms are shifted cannot be told. Graft the original's: `mlx_mtp.convert --graft-mtp-from ORIGINAL "
            f"--model {name} --mlx-path NEW`."
        )
    return False


def load_drafter(mtp: str, name: str, config: dict[str, Any]) -> tuple[dict[str, mx.array], bool]:
    """The tensors of a drafter in mlx-vlm's layout, and whether they are in the Hugging Face layout.

    That is told by their names, as mlx-vlm does: ``mtp.norm.weight`` is raw, ``norm.weight`` is converted.
    """
    path = fetch(mtp, None)
    own = read_json(path / "config.json") if (path / "config.json").exists() else {}
    if own.get("model_type") != DRAFTER:
        raise ValueError(
            f"{mtp} is not a drafter: its model type is {own.get('model_type')}, not {DRAFTER}. To use its head, graft it: "
            f"`mlx_mtp.convert --graft-mtp-from {mtp} --model {name} --mlx-path NEW`."
        )
    if difference := first_difference(own.get("text_config", {}), config.get("text_config", config)):
        raise ValueError(f"The drafter {mtp} does not fit {name}: {difference}.")
    tensor_names(path)
    weights: dict[str, mx.array] = {}
    for file in path.glob(WEIGHTS):
        weights.update(mx.load(str(file)))  # type: ignore[arg-type]
    raw = any(tensor.startswith("mtp.") for tensor in weights)
    return {tensor.removeprefix("mtp."): w for tensor, w in weights.items()}, raw


def first_difference(config: dict[str, Any], other: dict[str, Any]) -> str:
    """The first size in which two models are known to differ, in words; empty if there is none."""
    a, b = ({**c.get("text_config", {}), **c} for c in (config, other))
    for key in SIZES:
        if key in a and key in b and a[key] != b[key]:
            return f"{key} is {a[key]}, not {b[key]}"
    return ""


def quantization_beside(config: dict[str, Any], head: Iterable[str]) -> dict[str, Any]:
    """What is changed in a config for a head from elsewhere: mlx-lm tells its quantization from its tensors.

    What is said of a head that it replaces goes; where the backbone is not quantized and the head is, mlx-lm needs an
    entry, which is then that of no module.
    """
    if isinstance(quantization := config.get("quantization"), dict):
        kept = {key: value for key, value in quantization.items() if not is_head(key)}
        return {"quantization": kept, "quantization_config": kept}
    if any(name.endswith(".scales") for name in head):
        return {"quantization": {"group_size": 64, "bits": 4}}
    return {}


def is_head(path: str) -> bool:
    """Whether a parameter or module of a model is of its head."""
    return path.startswith(("mtp.", "language_model.mtp."))


def head_bits(model: nn.Module) -> int | None:
    """The fewest bits that a layer of the head is quantized to."""
    return min((m.bits for _, m in model.mtp.named_modules() if hasattr(m, "bits")), default=None)


def few_bits(head_of: str, bits: int, model: str) -> str:
    """A warning, with the command that mends it."""
    return (
        f"the MTP head of {head_of} is quantized to {bits} bits, which can cost most drafts. Give it the original's: "
        f"`mlx_mtp.convert --graft-mtp-from ORIGINAL --model {model} --mlx-path NEW`."
    )


def read_json(file: Path) -> dict[str, Any]:
    return parse_json(file.read_bytes(), str(file))


def read_config(path: Path, name: str) -> dict[str, Any]:
    return check_config(read_json(path / "config.json") if (path / "config.json").exists() else None, name)


def check_config(config: dict[str, Any] | None, name: str) -> dict[str, Any]:
    """The config, or an error if there is none or models of its type are not supported."""
    if config is None:
        raise FileNotFoundError(f"{name} is not a model: it has no config.json.")
    if not isinstance(config.get("text_config", {}), dict):
        raise ValueError(f"The text_config of {name}'s config.json is not an object.")
    model_type = config.get("model_type")
    if model_type == "qwen4_exp":
        raise ValueError(
            "Model type qwen4_exp (Qwen3.8-Flash-Next) has a head of another kind, with hyper-connections, "
            "which is not supported: generate without --mtp."
        )
    if model_type not in SUPPORTED:
        raise ValueError(
            f"Model type {model_type} is not supported with an MTP head (these are: {', '.join(SUPPORTED)}): "
            "generate without --mtp, convert with --no-mtp."
        )
    return config
