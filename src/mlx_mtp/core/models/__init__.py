"""mlx-lm's models, each with its MTP head. A family is one module: see ``family.py``."""

from importlib import import_module
from types import ModuleType
from typing import Any

MODEL_TYPES = (
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "prism_hadamard_qwen35", "glm4_moe", "glm4_moe_lite",
)  # fmt: skip
# The module of each model type, with its ``FAMILY``, ``Model`` and ``ModelArgs``; it is imported when it is used.
MODULES = {model_type: f"{__name__}.{model_type}" for model_type in MODEL_TYPES}


def model_module(model_type: str) -> ModuleType:
    return import_module(MODULES[model_type])


def family_of(model_type: Any) -> Any:
    """The ``Family`` of a model type, also of a drafter's; ``None`` for a type that has no module here."""
    model_type = str(model_type).removesuffix("_mtp")
    return model_module(model_type).FAMILY if model_type in MODULES else None
