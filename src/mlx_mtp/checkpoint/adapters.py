"""Adapters of mlx-lm, which loads them itself, and of peft (LoRA), which become mlx-lm's layers.

peft names layers as transformers does. The update of a weight [outputs, inputs] is ``alpha / r * B @ A``, of A [r, inputs] and
B [outputs, r]; that of an embedding is transposed. Experts are adapted one by one, or as one fused tensor: then A is
[E * r, inputs], and B [outputs, r * E] has its ranks outside, its experts inside.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear
from mlx_lm.utils import load_adapters

from ..core.models.mixin import MTPModel
from ..errors import MTPError, MTPFileNotFoundError, as_mtp_error
from ..files import check_folder
from .config import Config, read_json
from .hub import warn_once
from .reader import PREFIX

CONFIG = "adapter_config.json"
WEIGHTS, OWN_WEIGHTS = "adapter_model.safetensors", "adapters.safetensors"  # of peft, and of mlx-lm
SHOWN = 6  # names in an error
# Initializations that leave the base model as it is
INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
VARIANTS = (
    "lora_bias", "layer_replication", "alora_invocation_tokens", "trainable_token_indices", "arrow_config", "kasa_config",
    "monteclora_config",
)  # fmt: skip
OTHER_PARTS = re.compile(r"base_model\.model\.(?:model\.)?(?:language_model\.)?(?:visual|vision_tower|mtp)\.")
MATRIX = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
EXPERT = re.compile(r"(.+\.mlp)\.experts\.(\d+)\.(\w+)")
FUSED_INTO = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
FUSED = re.compile(r".+\.mlp\.experts(\.base_layer)?")
LAYERS: dict[Any, tuple[type[nn.Module], ...]] = {
    LoRALinear: (nn.Linear, nn.QuantizedLinear),
    LoRASwitchLinear: (SwitchLinear, QuantizedSwitchLinear),
    LoRAEmbedding: (nn.Embedding, nn.QuantizedEmbedding),
}
Layers = dict[str, tuple[str, nn.Module]]  # by ``_place``: the path in the model, and the layer


class Update(NamedTuple):
    """The update ``scale * b @ a`` of a weight, or of those of all experts [E, outputs, inputs]."""

    a: mx.array  # [(E,) r, inputs]
    b: mx.array  # [(E,) outputs, r]
    scale: float


def check_adapter(path: str, name: str = "The adapter") -> None:
    """Raise an error that begins with a name, such as a flag's, for no folder, or an adapter of peft that is not supported."""
    check_folder(folder := Path(path), name)
    config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    if "peft_type" not in config:
        if not (folder / OWN_WEIGHTS).exists():
            raise MTPFileNotFoundError(f"The adapter {path} has no {OWN_WEIGHTS}, nor is it one of peft.")
        return
    given = [key for key, value in config.items() if value and (key.startswith("use_") or key in VARIANTS)]
    other = [key for key in given if key != "use_rslora"]
    if config["peft_type"] != "LORA":
        other.append(f"peft_type {config['peft_type']}")
    if (start := config.get("init_lora_weights")) not in INITIALIZATIONS:
        other.append(f"init_lora_weights {start}")  # the adapter is for a base model that this changes
    if other:
        raise MTPError(f"The adapter {path} has {other[0]}, which is not supported: merge it into its model with peft.")
    if not (folder / WEIGHTS).exists():
        raise MTPFileNotFoundError(f"The adapter {path} has no {WEIGHTS}: save it with peft's safe_serialization.")


def with_adapter(model: Any, path: str) -> Any:
    """Apply an adapter of ``mlx_lm.lora``, ``mlx_mtp fit`` or peft. Raises an MTPError if it does not fit the model."""
    folder = Path(path)
    try:
        config = read_json(folder / CONFIG)
        file, apply = (WEIGHTS, _apply) if "peft_type" in config else (OWN_WEIGHTS, _apply_own)
        weights: Any = mx.load(str(folder / file))
        if left_out := [name for name in weights if OTHER_PARTS.match(name) and file == WEIGHTS]:
            weights = {name: w for name, w in weights.items() if name not in left_out}
            warn_once(f"The adapter {path} changes the language model alone: {_some(left_out)} are left out.")
        is_changed = apply(model, config, weights, path)
        adapted = (m for m in model.modules() if "lora_a" in m)
        if not is_changed and not any(m.scale and mx.any(m.lora_a) and mx.any(m.lora_b) for m in adapted):
            raise MTPError(
                "it changes nothing: " + (f"{_some(weights)} are zero." if weights else "it has no tensors.")
            )
        return model.eval()
    except (AttributeError, KeyError, RuntimeError, TypeError) as e:  # mlx-lm checks only names and shapes
        raise MTPError(f"The adapter {path} could not be loaded ({e!r}): was it trained for this model?") from e
    except ValueError as e:
        raise MTPError(f"The adapter {path} could not be loaded: {' '.join(str(e).split())}") from e


def _apply_own(model: Any, config: Config, weights: Mapping[str, mx.array], path: str) -> bool:
    """Apply an adapter of mlx-lm, which draws numbers for tensors that it lacks. Return whether it changes whole weights."""
    before: Any = dict(tree_flatten(model.parameters()))
    model.freeze()  # as it was trained: the adapter has what is trainable
    load_adapters(model, path)
    is_full = config.get("fine_tune_type") == "full"
    for layer in model.layers[-max(config["num_layers"], 0) :] if is_full else ():
        layer.unfreeze()
    trained: Any = dict(tree_flatten(model.trainable_parameters()))
    if lacks := trained.keys() - weights.keys():
        raise MTPError(f"it lacks {_some(lacks)}, of layers that its config names.")
    model.unfreeze()
    return is_full and any(not mx.array_equal(w, before[name]) for name, w in weights.items())


def _some(names: Iterable[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:SHOWN]) + f" and {len(first) - SHOWN} more" * (len(first) > SHOWN)


def _apply(model: Any, config: Config, weights: Mapping[str, mx.array], path: str) -> bool:
    """Apply an adapter of peft. Return whether it changes whole weights."""
    if isinstance(model, MTPModel) and model.family.pack_of is not None:
        raise MTPError("the model is packed. Use its base model.")
    layers: Layers = {_place(path): (path, layer) for path, layer in model.named_modules() if "mtp." not in path}
    changed: Layers = {}
    matrices: dict[str, dict[str, mx.array]] = {}
    seen = set[str]()
    for name, w in weights.items():
        name = name.removeprefix("base_model.model.").replace(".modules_to_save", "").replace(".default", "")
        if (place := _place(name.removesuffix(".weight"))) in seen:
            raise MTPError(f"it has {name} twice.")
        seen.add(place)
        if found := MATRIX.fullmatch(name):
            matrices.setdefault(found[1], {})[found[2]] = w
        else:
            base = name.removesuffix(".weight").removesuffix(".base_layer")
            path, layer = _layer(layers, base)
            changed[_place(base)] = path, _replaced(layer, w, name)
    is_changed = any(not mx.array_equal(new.weight, layers[p][1].weight) for p, (_, new) in changed.items())
    updates = _updates(matrices, config, layers)
    given = {*changed, *map(_place, [*updates, *matrices])}
    if lacks := {*_targets(layers, config, [*matrices])} - given:
        raise MTPError(f"it has no tensors for {_some(lacks)}, which its config names.")
    for base, update in updates.items():
        path, layer = _layer(layers | changed, base)
        changed[_place(base)] = path, _adapted(layer, update, base)
    if "embed_tokens" in changed and "lm_head" not in layers:
        raise MTPError("it changes the embedding, which is also the output layer of this model.")
    model.update_modules(tree_unflatten([*changed.values()]))
    return is_changed


def _targets(layers: Layers, config: Config, names: Sequence[str]) -> Iterator[str]:
    """The places of the layers that a config names, given the names of an adapter's updates: experts may be numbered."""
    prefix = names[0].removesuffix(_place(names[0])) if names else ""
    only = config.get("layers_to_transform")
    has_numbers = any(map(EXPERT.fullmatch, names))
    for place, (_, layer) in layers.items():
        number = re.match(r"layers\.(\d+)\.", place)
        if only is not None and number and int(number[1]) not in ([only] if isinstance(only, int) else only):
            continue
        candidates = [place] if isinstance(layer, LAYERS[LoRALinear] + LAYERS[LoRAEmbedding]) else []
        if isinstance(layer, LAYERS[LoRASwitchLinear]):
            mlp, _, projection = place.partition("switch_mlp.")
            if _matches(config, "target_parameters", f"{mlp}experts.{FUSED_INTO.get(projection, projection)}"):
                yield place
            candidates = [f"{mlp}experts.{e}.{projection}" for e in range(layer.num_experts * has_numbers)]
        for candidate in candidates:
            name = candidate if candidate == "lm_head" else prefix + candidate
            is_target = _matches(config, "target_modules", name) and not _matches(config, "exclude_modules", name)
            if is_target or _matches(config, "modules_to_save", name):
                yield candidate


def _matches(config: Config, key: str, name: str) -> bool:
    """Whether a config has a name under a key: as a regular expression, or in a list by its end."""
    rule = config.get(key) or ()
    if isinstance(rule, str):
        return _match(rule, name, key) is not None
    return any(f".{name}".endswith(f".{end}") for end in rule)


def _match(pattern: str, name: str, key: str, before: str = "") -> re.Match[str] | None:
    with as_mtp_error(f"the {key} {pattern!r} of its config is not a regular expression", re.error):
        return re.fullmatch(f"{before}(?:{pattern})", name)


def _place(name: str) -> str:
    """The part of a layer's name that is the same in transformers and here."""
    return PREFIX.sub("", name, 1)


def _layer(layers: Layers, name: str) -> tuple[str, nn.Module]:
    if _place(name) not in layers:
        raise MTPError(f"it changes {name}, which is not a layer of the language model.")
    return layers[_place(name)]


def _updates(matrices: Mapping[str, Mapping[str, mx.array]], config: Config, layers: Layers) -> dict[str, Update]:
    """The updates of an adapter by the names of layers. Those of experts are stacked."""
    updates: dict[str, Update] = {}
    experts: dict[str, dict[int, Update]] = {}
    for name, pair in matrices.items():
        if pair.keys() != {"A", "B"} or any(w.ndim != 2 for w in pair.values()):
            wrong = [n for n, own in matrices.items() if own.keys() != {"A", "B"}] or [name]
            raise MTPError(f"it does not have two matrices for {_some(wrong)}.")
        if FUSED.fullmatch(name):
            updates |= _of_fused_experts(name, matrices, config, layers)
        elif found := EXPERT.fullmatch(name):
            of_layer = experts.setdefault(f"{found[1]}.switch_mlp.{found[3]}", {})
            of_layer[int(found[2])] = _update(pair["A"], pair["B"], name, config)
        else:
            updates[name] = _update(pair["A"], pair["B"], name, config)
    return updates | {name: _stacked(each, _layer(layers, name)[1].num_experts) for name, each in experts.items()}


def _update(a: mx.array, b: mx.array, name: str, config: Config) -> Update:
    """An update with the scale of the config, where the first pattern that matches the name comes before the default."""

    def setting(key: str, patterns: str) -> float:
        own = (config.get(patterns) or {}).items()
        found = (n for pattern, n in own if _match(pattern, name, patterns, r"(?:.*\.)?"))
        return float(next(found, config.get(key, 8)))

    r = setting("r", "rank_pattern")
    alpha = setting("lora_alpha", "alpha_pattern")
    if (a.shape[-2], b.shape[-1]) != (r, r) or not r:
        raise MTPError(f"its matrices for {name} have rank {a.shape[-2]}, and its config says {r:.0f}.")
    return Update(a, b, alpha / (math.sqrt(r) if config.get("use_rslora") else r))


def _of_fused_experts(
    name: str, matrices: Mapping[str, Mapping[str, mx.array]], config: Config, layers: Layers
) -> dict[str, Update]:
    """The updates of ``switch_mlp`` that an update of a fused tensor [E, outputs, inputs] consists of."""
    named = {target.rpartition(".")[2] for target in config.get("target_parameters") or ()}
    if name.endswith(".base_layer"):  # peft wraps the second fused tensor of a layer around the first
        named = {"gate_up_proj"}
    elif f"{name}.base_layer" in matrices:
        named = {"down_proj"}
    if len(parameters := [*named & {"gate_up_proj", "down_proj"}]) != 1:
        raise MTPError(f"its target_parameters do not say what its matrices for {name} change.")
    pair = matrices[name]
    mlp = name.removesuffix(".base_layer").removesuffix(".experts")
    projections = ("gate_proj", "up_proj") if parameters == ["gate_up_proj"] else ("down_proj",)
    names = [f"{mlp}.switch_mlp.{p}" for p in projections]
    layer: Any = _layer(layers, names[0])[1]
    E = layer.num_experts
    a = pair["A"].reshape(E, -1, pair["A"].shape[1])
    b = pair["B"].reshape(pair["B"].shape[0], -1, E).transpose(2, 0, 1)
    if a.shape[-1] != layer.input_dims:  # earlier versions of peft take [E, outputs, inputs] for [E, inputs, outputs]
        a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
    a, b, scale = _update(a, b, f"{mlp}.experts.{parameters[0]}", config)
    return {name: Update(a, part, scale) for name, part in zip(names, mx.split(b, len(names), axis=1))}


def _stacked(each: Mapping[int, Update], n_experts: int) -> Update:
    """The updates of single experts as one, with zeros for the others."""
    if (last := max(each)) >= n_experts:
        raise MTPError(f"it changes expert {last}, and the model's are 0 to {n_experts - 1}.")
    r = max(update.a.shape[0] for update in each.values())
    first = next(iter(each.values()))
    none = Update(mx.zeros_like(first.a), mx.zeros_like(first.b), 0.0)
    all_ = [each.get(e, none) for e in range(n_experts)]
    a = mx.stack([mx.pad(u.a, [(0, r - u.a.shape[0]), (0, 0)]) for u in all_])
    return Update(a, mx.stack([u.scale * mx.pad(u.b, [(0, 0), (0, r - u.b.shape[1])]) for u in all_]), 1.0)


def _adapted(layer: nn.Module, update: Update, name: str) -> nn.Module:
    kind = next((kind for kind, bases in LAYERS.items() if isinstance(layer, bases)), None)
    if kind is None:
        raise MTPError(f"it changes {name}, which is neither a linear layer nor an embedding.")
    a, b = (update.a, update.b) if kind is LoRASwitchLinear else (update.a.T, update.b.T)
    adapted = kind.from_base(layer, r=update.a.shape[-2], scale=update.scale)
    if (adapted.lora_a.shape, adapted.lora_b.shape) != (a.shape, b.shape):
        shapes = [list(w.shape) for w in (update.a, update.b)]
        raise MTPError(f"its matrices for {name}, {shapes[0]} and {shapes[1]}, do not fit the model.")
    adapted.lora_a = a
    adapted.lora_b = b
    return adapted


def _replaced(layer: Any, w: mx.array, name: str) -> nn.Module:
    """A linear layer or an embedding with another weight, quantized like its own."""
    is_quantized = isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding)
    if not name.endswith(".weight") or not (is_quantized or isinstance(layer, nn.Linear | nn.Embedding)):
        raise MTPError(f"its tensor {name} is neither an update nor the weight of a linear layer or an embedding.")
    own = layer.scales if is_quantized else layer.weight
    shape = (own.shape[0], own.shape[1] * (layer.group_size if is_quantized else 1))
    if w.shape != shape:
        raise MTPError(f"its tensor {name} is {list(w.shape)}, not {list(shape)}.")
    new = nn.Linear(1, 1, bias=False) if isinstance(layer, nn.Linear | nn.QuantizedLinear) else nn.Embedding(1, 1)
    new.weight = w.astype(own.dtype) if mx.issubdtype(own.dtype, mx.floating) else w
    return new.to_quantized(layer.group_size, layer.bits, mode=layer.mode) if is_quantized else new
