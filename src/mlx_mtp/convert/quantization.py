"""The weights of a conversion: cast, quantize or dequantize the backbone, and keep the head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.convert import MODEL_CONVERSION_DTYPES, mixed_quant_predicate_builder
from mlx_lm.utils import dequantize_model, quantize_model

from ..checkpoint.config import Config
from ..checkpoint.head_formats import is_head

Decision = bool | dict[str, Any]  # whether to quantize a module, or how
QuantPredicate = Callable[[str, nn.Module], Decision]

MTP_GROUP_SIZE = 64


def cast(model: nn.Module, dtype: str | None, config: Config) -> None:
    """Cast the weights that are not quantized, as mlx-lm does. The head is cast only if ``dtype`` is given."""
    chosen = dtype or config.get("torch_dtype") or config.get("text_config", {}).get("dtype")
    if chosen not in MODEL_CONVERSION_DTYPES:
        return
    print("[INFO] Using dtype:", chosen)
    target = getattr(mx, chosen)
    may_cast = getattr(model, "cast_predicate", lambda _: True)

    def cast_one(path: str, p: mx.array) -> mx.array:
        keep = not may_cast(path) or not mx.issubdtype(p.dtype, mx.floating) or (is_head(path) and dtype is None)
        return p if keep else p.astype(target)

    model.update(tree_map_with_path(cast_one, model.parameters()))


@dataclass(frozen=True)
class Quantization:
    """The arguments of ``mlx_mtp.convert`` that change weights."""

    quantize: bool
    dequantize: bool
    group_size: int | None
    bits: int | None
    mode: str
    predicate: QuantPredicate | str | None
    mtp_bits: int | None
    mtp_group_size: int

    @property
    def changes_weights(self) -> bool:
        return bool(self.quantize or self.dequantize or self._of_quantize() or self.mtp_bits is not None)

    def _of_quantize(self) -> list[str]:
        """The given flags that require quantization."""
        given = {
            "--q-bits": self.bits is not None,
            "--q-group-size": self.group_size is not None,
            "--q-mode": self.mode != "affine",
            "--quant-predicate": self.predicate is not None,
        }
        return [flag for flag in given if given[flag]]

    def check(self, mtp: bool) -> None:
        """Raise a ValueError if arguments contradict each other, or MLX does not support the quantization."""
        if self.quantize and self.dequantize:
            raise ValueError("Choose either quantize or dequantize, not both.")
        if not self.quantize and (flags := self._of_quantize()):
            raise ValueError(f"{flags[0]} requires --quantize.")
        if self.mtp_bits is None and self.mtp_group_size != MTP_GROUP_SIZE:
            raise ValueError("--mtp-group-size requires --mtp-bits.")
        if self.mtp_bits is not None and not mtp:
            raise ValueError("Choose either --mtp-bits or --no-mtp, not both.")
        if isinstance(self.predicate, str):
            if self.mode != "affine":
                raise ValueError("Quant predicates only support 'affine' quantization.")
            low = int(self.predicate.split("_")[1])  # of mixed_LOW_HIGH
            if self.bits not in (None, low):
                raise ValueError(
                    f"--quant-predicate {self.predicate} has {low} bits or more, not --q-bits {self.bits}: omit one."
                )
        check_format("--q-group-size", self.group_size, "--q-bits", self.bits, self.mode)
        if self.mtp_bits is not None:
            check_format("--mtp-group-size", self.mtp_group_size, "--mtp-bits", self.mtp_bits, "affine")

    def apply(self, model: Any, config: Config) -> tuple[Any, Config]:
        """Quantize or dequantize a model, and record this in its config.

        Raises:
            ValueError: There is nothing to quantize.
        """
        if self.quantize:
            print("[INFO] Quantizing")
            predicate = backbone_predicate(model, self._user_predicate(model))
            model, config = quantize(model, config, "--q-group-size", self.group_size, self.bits, self.mode, predicate)
        if self.mtp_bits is not None:
            print("[INFO] Quantizing the head")
            model, config = quantize(
                model, config, "--mtp-group-size", self.mtp_group_size, self.mtp_bits, "affine", head_predicate(model)
            )
        if self.dequantize:
            print("[INFO] Dequantizing")
            config.pop("quantization", None)
            config.pop("quantization_config", None)
            model = dequantize_model(model)
        return model, config

    def _user_predicate(self, model: nn.Module) -> QuantPredicate | None:
        if not isinstance(self.predicate, str):
            return self.predicate
        built: QuantPredicate = mixed_quant_predicate_builder(self.predicate, model, self.group_size or 64)
        return built


def check_format(size_flag: str, group_size: int | None, bits_flag: str, bits: int | None, mode: str) -> None:
    """Raise a ValueError if MLX has no such quantization; ``None`` is the default of the mode."""
    if group_size is not None and group_size < 1:
        raise ValueError(f"{size_flag} must be 1 or more, not {group_size}.")
    try:
        mx.quantize(mx.zeros((1, group_size or 128)), group_size, bits, mode)
    except ValueError as e:
        given = " ".join(f"{flag} {n}" for flag, n in ((size_flag, group_size), (bits_flag, bits)) if n is not None)
        raise ValueError(f"MLX cannot quantize with {given or f'--q-mode {mode}'}: {e}") from e


def quantize(
    model: Any,
    config: Config,
    size_flag: str,
    group_size: int | None,
    bits: int | None,
    mode: str,
    predicate: QuantPredicate,
) -> tuple[Any, Config]:
    """Quantize with mlx-lm's ``quantize_model``, which skips layers whose width is not a multiple of the group size.

    Raises:
        ValueError: It skips all layers.
    """
    before = _quantized(model)
    model, config = quantize_model(model, config, group_size, bits, mode=mode, quant_predicate=predicate)
    if len(_quantized(model)) == len(before):
        reason = f"no layer's width is a multiple of {size_flag} {group_size or 'of this mode'}"
        if any(predicate(path, module) for path, module in before.items()):
            reason = "it is quantized already, so give the base model, or --dequantize first"
        raise ValueError(f"Nothing would be quantized: {reason}.")
    return model, config


def _quantized(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if hasattr(module, "scales")}


def backbone_predicate(model: nn.Module, user: QuantPredicate | None = None) -> QuantPredicate:
    """Combine the user's predicate for the backbone with the model's predicate for its routers. The head is not quantized."""
    own = _own_predicate(model)

    def predicate(path: str, module: nn.Module) -> Decision:
        if is_head(path):
            return False
        by_model = own(path, module)
        if user is None:
            return by_model
        by_user = user(path, module)
        return by_model if isinstance(by_model, dict) and by_user else by_user

    return predicate


def head_predicate(model: nn.Module) -> QuantPredicate:
    """A predicate for the head's decoder layer without its routers."""
    own = _own_predicate(model)
    return lambda path, module: is_head(path) and ".layers." in path and not isinstance(own(path, module), dict)


def _own_predicate(model: nn.Module) -> QuantPredicate:
    """The model's own predicate, which quantizes its routers."""
    return getattr(model, "quant_predicate", None) or (lambda path, module: True)
