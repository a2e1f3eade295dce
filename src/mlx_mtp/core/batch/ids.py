"""The token ids and the numbers that callers pass."""

from collections import UserDict
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from ...errors import MTPError, as_mtp_error
from ..models.mixin import check_ids, n_ids

TokenIds = Sequence[int] | mx.array | NDArray[Any] | UserDict[str, Any]  # of one text, see ``token_ids``


def token_ids(prompt: TokenIds, model: nn.Module, name: str = "The prompt") -> list[int]:
    """The token ids of one text: a sequence or an array of integers, [T] or [1, T], or a ``BatchEncoding`` of transformers.

    Raises an MTPError for anything else, and for ids that the model does not have.
    """
    given: Any = _ids_of(prompt)
    array = np.asarray(given.tolist() if isinstance(given, mx.array) else given, object)
    ids = array[0] if array.ndim == 2 and len(array) == 1 else array
    wrong = [x for x in array.ravel() if not isinstance(x, Integral) or isinstance(x, bool)]
    if ids.ndim != 1 or wrong or isinstance(given, bytes | bytearray | memoryview):
        kinds = " of ".join(type(x).__name__ for x in (given, *wrong[: min(array.ndim, 1)]))
        shape = f" of shape {list(array.shape)}" if array.ndim > 1 else ""
        raise MTPError(
            f"{name} must be the token ids of one text, a list or an array of integers, not {kinds}{shape}: encode a text with "
            "tokenizer.encode, messages with tokenizer.apply_chat_template(..., add_generation_prompt=True), and give several "
            "texts to batch_generate."
        )
    check_ids(ids, n_ids(model), name)
    return [int(i) for i in ids]


def check_count(name: str, value: Any) -> int:
    """Return the value, or raise an MTPError if it is not an integer of 1 or more."""
    if not isinstance(value, Integral) or value < 1:
        raise MTPError(f"{name} must be an integer of 1 or more, not {value}.")
    return int(value)


def each_prompt(prompts: Any) -> list[Any]:
    """The prompts of a list, an array [B, T] or a ``BatchEncoding``."""
    with as_mtp_error("The prompts must be a list, with the token ids of each text", TypeError):
        return [*_ids_of(prompts)]


def _ids_of(given: Any) -> Any:
    """The token ids of a ``BatchEncoding``; anything else as it is."""
    if not isinstance(given, UserDict) or "input_ids" not in given:
        return given
    mask = given.get("attention_mask")
    if mask is not None and not all(np.asarray(row).all() for row in mask):
        raise MTPError("The token ids must have no padding: tokenize without it.")
    return given["input_ids"]
