"""Exact mode: the backbone over a window, with the very operations of plain decoding.

MLX picks its kernels by the number of rows: a product of two rows may add up in another order than a product of one, and
attention, the convolution, the recurrence and the sorting of experts have such switches, too. So each layer is called
here on the tokens of the window one by one, as plain decoding calls it. Whatever MLX's kernels are, they are the same ones
on the same shapes, and the result is the same bits.

The price: a layer's weights are multiplied with once for each token. A window of n tokens costs up to n plain passes, less
what the chip's cache keeps of a layer from one token to the next, since all tokens pass a layer before the next one
begins. Where a pass over several tokens is plain decoding's bit for bit anyway, exact mode has nothing to give: on MLX's
CPU backend, and for affine quantized weights on M1 and M2.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

from ..cache import ArraysCache


def one_by_one(
    model: Any, inputs: mx.array, cache: list[Any] | None, input_embeddings: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The forward of mlx-lm's Qwen3.5 and Qwen3-Next models, one token after the other in each layer.

    Args:
        model (nn.Module): A model with the backbone as ``model`` and the output layer as ``logits``.
        inputs (mx.array): Token ids, [B, T].
        cache (List[Any]): One entry for each layer.
        input_embeddings (mx.array, optional): [B, T, H], in place of ``inputs``.

    Returns:
        Tuple[mx.array, mx.array]: Logits [B, T, V], and hidden states after the final norm, [B, T, H].

    Raises:
        ValueError: There is no cache, or the layers are spread over several machines.
    """
    backbone = model.model
    if cache is None:
        raise ValueError("Exact mode needs a cache.")
    if backbone.pipeline_size > 1:
        raise ValueError("Exact mode does not run in a pipeline of several machines: leave out exact.")
    if input_embeddings is None:
        rows = [backbone.embed_tokens(inputs[:, t : t + 1]) for t in range(inputs.shape[1])]
    else:
        rows = [input_embeddings[:, t : t + 1] for t in range(input_embeddings.shape[1])]

    last = None
    for layer, c in zip(backbone.layers, cache):
        for t, h in enumerate(rows):  # [B, 1, H]
            if last is not None:
                # In this order, and not as MLX would choose: keys and values are else written while the token before is
                # still to read them, which copies the cache, and a layer's weights are read anew for each token.
                h = mx.depends(h, last)
            mask = create_ssm_mask(h, c) if layer.is_linear else create_attention_mask(h, c)
            rows[t] = last = layer(h, mask=mask, cache=c)
            if isinstance(c, ArraysCache):
                c.keep_state()
    rows = [backbone.norm(h) for h in rows]
    logits = [model.logits(h) for h in rows]  # [B, 1, V]
    return mx.concatenate(logits, axis=1), mx.concatenate(rows, axis=1)
