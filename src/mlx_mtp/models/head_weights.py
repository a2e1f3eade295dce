"""The tensors of MTP heads in checkpoints: the names of the head's, and the layouts that its parameters may have there."""

from collections.abc import Mapping
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..layers.drafting import quantized_group_size
from ..layers.mtp import MTPModule

T = TypeVar("T")

EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")


def split_head(weights: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Split a checkpoint's tensors into (backbone, head). The head's names lose the prefix ``mtp.``."""
    backbone, head = {}, {}
    for name, w in weights.items():
        prefix, dot, rest = name.partition("mtp.")
        if dot and prefix in ("", "model.", "language_model.", "language_model.model.", "model.language_model."):
            head[rest] = w
        else:
            backbone[name] = w
    return backbone, head


def is_raw(weights: Mapping[str, mx.array]) -> bool:
    """Whether tensors are in the Hugging Face layout, with convolutions [C, 1, K] instead of MLX's [C, K, 1]."""
    return any("conv1d.weight" in name and w.shape[-1] != 1 for name, w in weights.items())


def sanitize_head(mtp: MTPModule, head: Mapping[str, mx.array], raw: bool) -> dict[str, mx.array]:
    """Map a head's tensors to the names and values of ``MTPModule``'s parameters.

    Experts may be stacked, separate, fused, or named as in a dense layer. If ``raw``, 1 is added to every norm.

    Raises:
        ValueError: Tensors are missing, unknown or of the wrong shape; the message names them.
    """
    parameters: Any = tree_flatten(mtp.parameters())
    expected = {name: p.shape for name, p in parameters}
    weights = dict(head)

    # The experts' tensors if they are not stacked: {name: shape}
    experts, mlp = {}, "layers.0.mlp"
    stacked = {p: f"{mlp}.switch_mlp.{p}.weight" for p in EXPERT_PROJECTIONS}
    gate_up, down = f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"
    if stacked["up_proj"] in expected:
        n_experts, size, hidden = expected[stacked["up_proj"]]
        for part in ("weight", "scales", "biases"):
            for p in EXPERT_PROJECTIONS:  # the layout of heads published in separate files
                if (name := f"{mlp}.{p}.{part}") in weights:
                    weights[f"{mlp}.switch_mlp.{p}.{part}"] = weights.pop(name)
        if gate_up in weights:
            experts = {gate_up: (n_experts, 2 * size, hidden), down: (n_experts, hidden, size)}
        elif any(name.startswith(f"{mlp}.experts.") for name in weights):
            experts = {
                f"{mlp}.experts.{e}.{p}.weight": expected[name][1:]
                for p, name in stacked.items()
                for e in range(n_experts)
            }
    if experts:
        _check({name: shape for name, shape in expected.items() if name not in stacked.values()} | experts, weights)
    else:
        _check(expected, weights)

    if gate_up in experts:
        gate, up = mx.split(weights.pop(gate_up), 2, axis=-2)  # [E, I, H] each
        weights[stacked["gate_proj"]], weights[stacked["up_proj"]] = gate, up
        weights[stacked["down_proj"]] = weights.pop(down)
    elif experts:
        for p, name in stacked.items():
            weights[name] = mx.stack([weights.pop(n) for n in experts if n.endswith(f".{p}.weight")])  # [E, I, H]
    if raw:
        for name, shape in expected.items():
            if len(shape) == 1:
                weights[name] = weights[name] + 1.0
    return weights


def _check(expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, mx.array]) -> None:
    if missing := [name for name in expected if name not in weights]:
        raise ValueError(f"The MTP head lacks {_listed(missing)}.")
    # mlx-lm checks the shapes of quantized tensors.
    quantized = {name.removesuffix("scales") + "weight" for name in weights if name.endswith(".scales")}
    wrong = [
        f"mtp.{name} is {list(weights[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name not in quantized and weights[name].shape != shape
    ]
    if wrong:
        raise ValueError(f"The MTP head does not fit this model: {'; '.join(wrong[:4])}.")


def _listed(names: list[str], most: int = 4) -> str:
    shown = ", ".join("mtp." + name for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more tensors"


def quantize_head(mtp: nn.Module, bits: int) -> None:
    """Quantize the decoder layer of an MTP head in place, without ``fc`` and routers."""
    if any(hasattr(m, "bits") for _, m in mtp.named_modules()):
        raise ValueError("The MTP head of this checkpoint is already quantized: mtp_bits requires one in 16 bits.")

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not path.startswith("layers.") or path.endswith(ROUTERS) or not hasattr(module, "to_quantized"):
            return False
        return {"group_size": quantized_group_size(module.weight), "bits": bits, "mode": "affine"}

    nn.quantize(mtp, class_predicate=predicate)
    mtp.eval()  # the new modules are in training
