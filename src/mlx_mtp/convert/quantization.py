"""What a conversion does to the weights: cast, quantize or dequantize the backbone, and leave the head alone."""

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


def cast(model: nn.Module, dtype: str | None, config: Config) -> None:
    """Cast what is not quantized, as mlx-lm does. The head is cast only if ``dtype`` is given."""
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
        return bool(self.quantize or self.dequantize or self.predicate or self.mtp_bits is not None)

    def check(self, mtp: bool) -> None:
        """Raise a ValueError if arguments contradict each other."""
        if self.quantize and self.dequantize:
            raise ValueError("Choose either quantize or dequantize, not both.")
        if self.mtp_bits is not None and not mtp:
            raise ValueError("Choose either --mtp-bits or --no-mtp, not both.")
        if isinstance(self.predicate, str) and self.mode != "affine":
            raise ValueError("Quant predicates only support 'affine' quantization.")

    def apply(self, model: Any, config: Config) -> tuple[Any, Config]:
        """Quantize or dequantize a model, and say so in its config."""
        if self.quantize or self.mtp_bits is not None:
            print("[INFO] Quantizing")
            user = self._user_predicate(model) if self.quantize else lambda *_: False
            predicate = head_aware_predicate(model, user, self.mtp_bits, self.mtp_group_size)
            model, config = quantize_model(
                model, config, self.group_size, self.bits, mode=self.mode, quant_predicate=predicate
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


def head_aware_predicate(
    model: nn.Module, user: QuantPredicate | None, mtp_bits: int | None = None, mtp_group_size: int = 64
) -> QuantPredicate:
    """Combine the user's predicate for the backbone, the model's for its routers, and ``mtp_bits`` for the head."""
    own: QuantPredicate = getattr(model, "quant_predicate", None) or (lambda path, module: True)

    def predicate(path: str, module: nn.Module) -> Decision:
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
