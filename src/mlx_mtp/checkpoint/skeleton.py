"""A model of a config, without weights; and the errors of loading one, in a line."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.utils import TensorInfo
from mlx.utils import tree_flatten

from ..layers.mtp import sanitize_head
from ..models import model_module
from ..models.protocol import MTPModel
from .config import Config


@contextmanager
def loading_errors(name: str) -> Iterator[None]:
    """Turn MLX's error for an unreadable file, and mlx-lm's for a bad config, into a ValueError that names the checkpoint."""
    try:
        yield
    except ValueError as e:
        if name in str(e):
            raise
        raise ValueError(f"{name} could not be loaded: {e}") from e
    except RuntimeError as e:
        raise ValueError(f"{name} could not be loaded: {e}") from e
    except (AttributeError, KeyError, TypeError) as e:
        raise ValueError(f"{name} could not be loaded ({e!r}): is its config.json as it was published?") from e


def skeleton(config: Config, name: str, has_head: bool = True) -> MTPModel:
    """A model of this config, with a head or without; its weights are never evaluated and take no memory."""
    module = model_module(config["model_type"])
    with loading_errors(name):
        model: MTPModel = module.Model(module.ModelArgs.from_dict({**config, "mtp_num_hidden_layers": int(has_head)}))
    return model


def check_shapes(model: MTPModel, head: Mapping[str, TensorInfo]) -> int | None:
    """Check that a head's tensors, named without ``mtp.``, fit a model -> the fewest bits of a quantized one.

    Raises:
        ValueError: Tensors are missing, unknown or of the wrong shape.
    """
    # Zeros that are never evaluated take no memory.
    weights = sanitize_head(model.mtp, {name: mx.zeros(t.shape) for name, t in head.items()}, False)
    mtp: nn.Module = model.mtp
    parameters = dict(tree_flatten(mtp.parameters()))
    bits = [
        32 * weights[name].shape[-1] // p.shape[-1]
        for name, p in parameters.items()
        if name.removesuffix("weight") + "scales" in weights
    ]
    return min(bits, default=None)
