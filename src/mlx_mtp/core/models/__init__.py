"""mlx-lm's models of the Qwen3.5 family, each with its MTP head."""

from importlib import import_module
from types import ModuleType

MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "prism_hadamard_qwen35")
# The model type whose heads and vision encoders fit a model, if not its own
BASES = {"prism_hadamard_qwen35": "qwen3_5"}


def drafter_of(model_type: str) -> str:
    """The model type of a drafter in mlx-vlm's layout: a folder with only a head."""
    return "qwen4_exp_mtp" if model_type == "qwen4_exp" else "qwen3_5_mtp"


def model_module(model_type: str) -> ModuleType:
    """The module of a model type, with its ``Model`` and ``ModelArgs``."""
    return import_module(f".{model_type}", __package__)
