"""A model of a config, without weights; and the errors of loading one, in a line."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..models import model_module
from ..models.protocol import MTPModel
from .config import Config


@contextmanager
def loading_errors(name: str) -> Iterator[None]:
    """Turn MLX's error for an unreadable file, and mlx-lm's for a bad config, into a ValueError."""
    try:
        yield
    except RuntimeError as e:
        raise ValueError(f"{name} could not be loaded: {e}") from e
    except (AttributeError, KeyError, TypeError) as e:
        raise ValueError(f"{name} could not be loaded ({e!r}): is its config.json as it was published?") from e


def skeleton(config: Config, name: str) -> MTPModel:
    """A model of this config, with a head; its weights are never evaluated and take no memory."""
    module = model_module(config["model_type"])
    with loading_errors(name):
        model: MTPModel = module.Model(module.ModelArgs.from_dict({**config, "mtp_num_hidden_layers": 1}))
    return model
