"""The tensors of MTP heads: their layouts in checkpoints become those of the parameters of ``MTPModule``."""

from collections.abc import Mapping
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from ...errors import MTPError
from ..drafts.settings import quantized_group_size
from .family import HeadNames

EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
FP8_SCALES = ("_scale_inv", "_scale")  # after the name of a weight in FP8

T = TypeVar("T")
Shape = tuple[int | None, ...]  # None for any size


def is_head(path: str) -> bool:
    """Whether a parameter of a model is the head's."""
    return "mtp" in path.split(".")


def sanitize_head(model: Any, head: Mapping[str, mx.array], raw: bool) -> dict[str, mx.array]:
    """A head's tensors with the names and values of the parameters of ``model.mtp``; if ``raw``, 1 is added to every norm.

    Raises an MTPError that names tensors which are missing or of the wrong shape.
    """
    parameters: Any = tree_flatten(model.mtp.parameters())
    expected: dict[str, Shape] = {name: p.shape for name, p in parameters}
    names = head_names(model)
    weights = _with_stacked_experts(names, model.family.prepared(model.text_args, _dequantized(head)), expected)
    # The shapes of quantized tensors depend on their bits, see ``check_quantized``.
    shapes = {n: None if n.removesuffix("weight") + "scales" in weights else s for n, s in expected.items()}
    _check(names, weights, shapes)
    return weights | {name: w + 1.0 for name, w in norms_of(weights).items() if raw}


def head_names(model: Any) -> HeadNames:
    """The names of a head's tensors in checkpoints of this model."""
    return model.family.names.of_layers(model.text_args.num_hidden_layers)


def in_files(model: Any, head: Mapping[str, T]) -> dict[str, T]:
    """A head by the names with which it is written, given it by those of ``MTPModule``'s parameters."""
    names = head_names(model)
    return {names.in_files(name, model.head_prefix): w for name, w in head.items()}


def norms_of(head: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The norms of a head: the only vectors among its tensors."""
    return {name: w for name, w in head.items() if w.ndim == 1}


def check_quantized(mtp: nn.Module, weights: Mapping[str, mx.array]) -> None:
    """Raise an MTPError if ``sanitize_head``'s tensors do not fit the head of a skeleton, once mlx-lm has quantized it."""

    def predicate(path: str, module: Any) -> Any:
        if f"{path}.scales" not in weights:
            return False
        try:
            how = infer_quant_config(path, module, weights)
            mx.quantize(module.weight, **how)
        except (ValueError, ZeroDivisionError) as e:
            raise MTPError(f"mtp.{path} is quantized otherwise ({e})") from e
        return how

    try:
        nn.quantize(mtp, class_predicate=predicate)
        mtp.load_weights(list(weights.items()))
    except ValueError as e:
        raise MTPError(f"The MTP head does not fit this model: {' '.join(str(e).split())}") from e


def _with_stacked_experts(
    names: HeadNames, weights: dict[str, mx.array], expected: Mapping[str, Shape]
) -> dict[str, mx.array]:
    """Tensors with experts as in MLX, [E, ...] for each projection; those of a dense layer as they are."""
    mlp = next(name for name in expected if name.endswith("gate_proj.weight") and "shared" not in name)
    mlp = mlp.removesuffix("gate_proj.weight")
    shapes = {p: expected[f"{mlp}{p}.weight"] for p in EXPERT_PROJECTIONS}
    *n_experts, size, hidden = shapes["up_proj"]
    shapes["gate_up_proj"] = (*n_experts, 2 * (size or 0), hidden)
    gate_and_up = EXPERT_PROJECTIONS[:2]

    stored: dict[tuple[str, str], tuple[str, ...]] = {}  # names before and after an expert's number, or whole
    for name in weights:
        if (found := names.expert.fullmatch(name)) is not None:
            i, j = max(found.span(1), found.span(3))
            stored[found[2], found[4] or "weight"] = (name,) if i < 0 else (name[:i], name[j:])
    for (projection, part), around in stored.items():
        shape = shapes[projection]
        if part != "weight" or (projection, "scales") in stored:
            shape = (*shape[:-1], None)
        if len(around) == 1:
            _check(names, weights, {around[0]: shape})
            w = weights.pop(around[0])
        else:
            each = [str(e).join(around) for e in range(shape[0] or 0)]
            _check(names, weights, dict.fromkeys(each, shape[1:]))
            w = mx.stack([weights.pop(name) for name in each])
        if projection == "gate_up_proj":
            weights |= {f"{mlp}{p}.{part}": half for p, half in zip(gate_and_up, mx.split(w, 2, axis=-2))}
        else:
            weights[f"{mlp}{projection}.{part}"] = w
    return weights


def _dequantized(head: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """A head's tensors, those in FP8 with their scales of blocks [..., N / n, K / k] in bfloat16."""
    weights = dict(head)
    for name, suffix in ((n, s) for n in head for s in FP8_SCALES if n + s in head):
        w, scale = weights[name], weights.pop(name + suffix)
        for axis in (-2, -1) if scale.ndim > 1 else ():
            n, n_blocks = w.shape[axis], scale.shape[axis]
            # The blocks are the smallest power of two that gives this number of them.
            block = next(1 << i for i in range(n.bit_length() + 1) if n <= n_blocks << i)
            scale = mx.take(mx.repeat(scale, block, axis), mx.arange(n), axis)
        weights[name] = (mx.from_fp8(w, mx.float32) * scale).astype(mx.bfloat16)
    return weights


def _check(names: HeadNames, weights: Mapping[str, mx.array], expected: Mapping[str, Shape | None]) -> None:
    """Raise an MTPError if tensors are missing or of the wrong shape; ``None`` for any. It has their names in checkpoints."""
    if missing := [name for name in expected if name not in weights]:
        more = f" and {len(missing) - 4} more tensors" if len(missing) > 4 else ""
        raise MTPError(f"The MTP head lacks {', '.join(names.in_files(name, 'mtp.') for name in missing[:4])}{more}.")
    wrong = []
    for name, shape in expected.items():
        found = weights[name].shape
        if shape is not None and (len(found) != len(shape) or any(n not in (None, m) for n, m in zip(shape, found))):
            wrong.append(f"{names.in_files(name, 'mtp.')} is {list(found)}, not {list(shape)}")
    if wrong:
        raise MTPError(f"The MTP head does not fit this model: {'; '.join(wrong[:4])}.")


def quantize_head(mtp: nn.Module, bits: int) -> None:
    """Quantize the decoder layer of an MTP head in place, without ``fc`` and routers."""
    if any(hasattr(m, "bits") for _, m in mtp.named_modules()):
        raise MTPError("The MTP head of this checkpoint is already quantized: mtp_bits requires one in 16 bits.")

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not path.startswith("layers.") or path.endswith(ROUTERS) or not hasattr(module, "to_quantized"):
            return False
        size = quantized_group_size(module.weight)
        return module.weight.shape[-1] % size == 0 and {"group_size": size, "bits": bits, "mode": "affine"}

    nn.quantize(mtp, class_predicate=predicate)
    mtp.eval()  # the new modules are in training
