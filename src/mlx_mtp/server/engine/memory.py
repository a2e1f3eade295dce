"""Whether a prompt fits in the memory that a model leaves, before it is prefilled."""

from typing import Any

import mlx.core as mx

from ...caches.prompt_cache import has_head
from ..request import ApiError


def cache_bytes(model: Any, n_tokens: int, kv_bits: int | None = None, kv_group_size: int = 64) -> int:
    """The bytes of the caches of a text of so many tokens.

    Args:
        model (nn.Module): The model.
        n_tokens (int): The length of the text.
        kv_bits (int, optional): Of the backbone's quantized keys and values. Default: ``None``, they are not quantized.
        kv_group_size (int): Of these. Default: ``64``.
    """
    size = model.layers[0].input_layernorm.weight.dtype.size
    own = size if kv_bits is None else kv_bits / 8 + 2 * size / kv_group_size  # a scale and a bias for each group
    states, of_token = 0, 0.0
    for layer in model.layers:
        if layer.is_linear:
            a = layer.linear_attn
            states += (a.conv_kernel_size - 1) * a.conv_dim * size
            states += a.num_v_heads * a.head_v_dim * a.head_k_dim * mx.float32.size
        else:
            of_token += _values(layer.self_attn) * own
    if has_head(model):
        of_token += _values(model.head_attention) * size
    return states + int(n_tokens * of_token)


def _values(attention: Any) -> int:
    """Of a token's keys and values."""
    n: int = 2 * attention.num_key_value_heads * attention.head_dim
    return n


def check_fits(n_tokens: int, n_bytes: int, left: int, param: str) -> None:
    """
    Raises:
        ApiError: A prompt of so many tokens takes more bytes than are left.
    """
    if n_bytes > left:
        message = (
            f"The prompt of {n_tokens} tokens takes {n_bytes} bytes, and the model leaves {max(left, 0)}: shorten it."
        )
        raise ApiError(507, message, param=param, code="insufficient_memory")
