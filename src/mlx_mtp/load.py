"""Load a checkpoint with its MTP head, or say what is wrong with it."""

import json
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, _download, load_adapters, load_model, load_tokenizer
from safetensors import SafetensorError, safe_open

from .models.mtp import split_head

DEMO = Path(__file__).parent / "demo"
EXTRA_TENSORS = "mlx_lm_extra_tensors"  # the config's key for files beside those of the model
HEAD_FILE = "mtp.safetensors"
SUPPORTED = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


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
    mtp: bool = True,
) -> Any:
    """
    Load the model, its MTP head and the tokenizer from a given path or a huggingface repository.

    Args:
        path_or_hf_repo (str): The path or the huggingface repository to load the model from.
        mtp (bool): With ``False`` this is ``mlx_lm.load``: no head, any model. Default: ``True``.

    The other arguments are those of ``mlx_lm.load``.

    Returns:
        Tuple[nn.Module, TokenizerWrapper]: The model and the tokenizer, and with ``return_config`` the config, a dictionary.

    Raises:
        FileNotFoundError: The model or one of its files is not there.
        ValueError: The model type is not supported, the head is not there or not whole, or a file is damaged.
    """
    if not mtp:
        return mlx_lm.load(
            path_or_hf_repo,
            tokenizer_config=tokenizer_config,
            model_config=model_config,
            adapter_path=adapter_path,
            lazy=lazy,
            return_config=return_config,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
    path = fetch(path_or_hf_repo, revision)
    config = _read_config(path, path_or_hf_repo)
    model_module = import_module(f".models.{config['model_type']}", __package__)
    check_head(path_or_hf_repo, config, tensor_names(path))
    head_file = config.get(EXTRA_TENSORS, {}).get("mtp_file")

    class Model(model_module.Model):  # type: ignore[name-defined]
        def sanitize(self, weights):
            return super().sanitize(weights if head_file is None else {**weights, **mx.load(str(path / head_file))})

    model, config = load_model(
        path,
        lazy=lazy,
        model_config={**(model_config or {}), "mtp_num_hidden_layers": 1},
        get_model_classes=lambda config: (Model, model_module.ModelArgs),
        trust_remote_code=trust_remote_code,
    )
    if adapter_path is not None:
        model = load_adapters(model, adapter_path)
        model.eval()
    tokenizer = load_tokenizer(path, tokenizer_config, eos_token_ids=config.get("eos_token_id", None))
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def tensor_names(path: Path) -> list[str]:
    """The names of a checkpoint's tensors, from the headers of its files.

    Raises:
        FileNotFoundError: There is no file of weights, or one that the index names is missing.
        ValueError: A file is cut short or damaged.
    """
    files = sorted(path.glob("model*.safetensors")) + sorted(path.glob(HEAD_FILE))
    names: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="numpy") as f:
                names.update(f.keys())
        except SafetensorError as e:
            raise ValueError(f"{file} is cut short or damaged ({e}): download or convert it again.") from e
    if (index := path / "model.safetensors.index.json").exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map: download it again.")
        if missing := sorted(set(weight_map.values()) - {file.name for file in files}):
            raise FileNotFoundError(f"{path} lacks {missing[0]}, which its index names: download it again.")
        if missing := sorted(set(weight_map) - names):
            raise ValueError(f"{path} lacks the tensor {missing[0]}, which its index names: download it again.")
    if not names:
        raise FileNotFoundError(f"No safetensors found in {path}")
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
    mend = "convert the original with `mlx_mtp.convert --hf-path ORIGINAL -q`, which keeps the head, or generate without --mtp."
    if text_config.get("mtp_num_hidden_layers"):
        raise ValueError(f"The config of {name} claims an MTP head, but its weights have none: {mend}")
    raise ValueError(f"{name} has no MTP head: {mend}")


def fetch(path_or_hf_repo: str, revision: str | None) -> Path:
    try:
        return _download(path_or_hf_repo, revision, allow_patterns=[*DEFAULT_ALLOW_PATTERNS, HEAD_FILE])
    except (OSError, ValueError) as e:
        reason = str(e).strip().partition("\n")[0]
        raise FileNotFoundError(f"{path_or_hf_repo} is no folder, and could not be downloaded: {reason}") from e


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:  # text that is not UTF-8, too
        raise ValueError(f"{file} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{file} is not a JSON object.")
    return value


def _read_config(path: Path, name: str) -> dict[str, Any]:
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{name} is not a model: it has no config.json.")
    config = read_json(path / "config.json")
    if not isinstance(config.get("text_config", {}), dict):
        raise ValueError(f"The text_config of {path / 'config.json'} is not an object.")
    model_type = config.get("model_type")
    if model_type == "qwen4_exp":
        raise ValueError(
            "Model type qwen4_exp (Qwen3.8-Flash-Next) has a head of another kind, with hyper-connections, "
            "which is not supported: generate without --mtp."
        )
    if model_type not in SUPPORTED:
        raise ValueError(
            f"Model type {model_type} is not supported with an MTP head (these are: {', '.join(SUPPORTED)}): "
            "generate without --mtp."
        )
    return config
