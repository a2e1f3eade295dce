"""config.json: reading, checking and comparing configs, and making the model of a config."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_lm.utils import MODEL_REMAPPING

from ..core.models import MODULES, family_of, model_module
from ..core.models.family import Family, HeadNames
from ..core.models.mixin import MTPModel
from ..errors import MTPError, MTPFileNotFoundError, as_mtp_error

Config = dict[str, Any]
EXTRA_TENSORS = "mlx_lm_extra_tensors"  # the config's key for files other than the model's
SIZES = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "rms_norm_eps", "n_routed_experts",
    "n_shared_experts", "first_k_dense_replace", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
    "v_head_dim",
)  # fmt: skip


def parse_json(text: bytes, name: str) -> Config:
    with as_mtp_error(f"{name} is not JSON", ValueError):  # also raised for text that is not UTF-8
        value = json.loads(text)
    if not isinstance(value, dict):
        raise MTPError(f"{name} is not a JSON object.")
    return value


def read_json(file: Path) -> Config:
    return parse_json(file.read_bytes(), str(file))


def read_config(folder: Path, name: str) -> Config:
    file = folder / "config.json"
    return check_config(canonical(read_json(file)) if file.exists() else None, name)


def check_config(config: Config | None, name: str) -> Config:
    """Return the config, or raise an error if it is missing or models of its type are not supported."""
    if config is None:
        raise MTPFileNotFoundError(f"{name} is not a model: it has no config.json.")
    if not isinstance(config.get("text_config", {}), dict):
        raise MTPError(f"The text_config of {name}'s config.json is not an object.")
    model_type = config.get("model_type")
    if model_type not in MODULES:
        if not mlx_lm_has(model_type):
            raise MTPError(f"Model type {model_type} is supported neither here nor by mlx-lm {version('mlx-lm')}.")
        raise MTPError(
            f"Model type {model_type} has no MTP head here (supported: {', '.join(MODULES)}). mlx-lm runs it without "
            "drafts: give --no-mtp (in Python mtp=False), and serve with `mlx_lm.server`."
        )
    return config


def mlx_lm_has(model_type: Any) -> bool:
    module = MODEL_REMAPPING.get(model_type, model_type) if isinstance(model_type, str) else ""
    return module.isidentifier() and find_spec(f"mlx_lm.models.{module}") is not None


def canonical(config: Config) -> Config:
    """A config with mlx-lm's model types: Qwen3.8 has those of Qwen3.5, and a text model alone that of the whole model."""
    config = dict(config)
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = dict(config["text_config"])
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get("model_type"), str):
            part["model_type"] = part["model_type"].replace("qwen3_8", "qwen3_5")
    if str(config.get("model_type")).startswith("qwen3_5"):
        config["model_type"] = config["model_type"].removesuffix("_text")
    return config


def text_config_of(config: Config) -> Config:
    """The language model's part of a config. In Qwen3-Next it is the top level."""
    return config.get("text_config", config)


def family_in(config: Config | None) -> Family | None:
    """The family of a config's models; ``None`` if only mlx-lm supports them."""
    family: Family | None = family_of((config or {}).get("model_type"))
    return family


def head_names_in(config: Config | None) -> HeadNames:
    """The names of a head in a checkpoint with this config, which need not be checked yet."""
    family = family_in(config)
    text = text_config_of(config or {})
    if family is None:
        return HeadNames()
    return family.names.of_layers(text.get("num_hidden_layers") if isinstance(text, dict) else None)


def ends_of_text(folder: Path, config: Config) -> set[int]:
    """The ids of the tokens that end a text. A config and each file of a checkpoint may name others, and all of them count."""
    ends = _named_ends(config)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        with suppress(MTPError, OSError):  # missing or no JSON, which those report that need it
            stored = read_json(folder / name)
            ends |= _named_ends(stored) | _named_ends(stored.get("text_config"))
    return ends


def with_ends(config: Config, ends: set[int]) -> Config:
    """A config.json or generation_config.json that names all of these ends of text, for programs that read only this one."""
    return config if _named_ends(config) == ends else config | {"eos_token_id": sorted(ends)}


def _named_ends(config: Any) -> set[int]:
    named = config.get("eos_token_id") if isinstance(config, dict) else None
    return {n for n in (named if isinstance(named, list) else [named]) if type(n) is int and n >= 0}


def context_length_of(config: Config) -> int | None:
    return text_config_of(config).get("max_position_embeddings")


def first_difference(config: Config, other: Config) -> str:
    """Describe the first size in which two models differ; empty if all known sizes agree."""
    a, b = (canonical({**c.get("text_config", {}), **c}) for c in (config, other))
    for c in (a, b):
        if (family := family_in(c)) is not None and family.pack_of is not None:
            c["model_type"] = family.pack_of
    for key in SIZES:
        if key in a and key in b and a[key] != b[key]:
            return f"{key} is {a[key]}, not {b[key]}"
    return ""


@contextmanager
def loading_errors(name: str) -> Iterator[None]:
    """Turn MLX's error for an unreadable file, and mlx-lm's for a bad config, into an MTPError that names the checkpoint."""
    try:
        yield
    except (ValueError, RuntimeError) as e:
        if isinstance(e, OSError) or (isinstance(e, MTPError) and name in str(e)):
            raise
        raise MTPError(f"{name} could not be loaded: {' '.join(str(e).split())[:500]}") from e
    except (AttributeError, KeyError, TypeError) as e:
        raise MTPError(f"{name} could not be loaded ({e!r}): is its config.json as it was published?") from e


def skeleton(config: Config, name: str, has_head: bool = True) -> MTPModel:
    """A model of this config, with a head or without; its weights are never evaluated and take no memory."""
    module = model_module(config["model_type"])
    with loading_errors(name):
        model: MTPModel = module.Model(module.ModelArgs.from_dict({**config, "mtp_num_hidden_layers": int(has_head)}))
    return model
