"""Exact mode: the backbone over a window, with the very operations of plain decoding.

MLX picks its kernels by the number of rows, and they add up in different orders. In MLX 0.32 on Metal: a product of two
or more rows with quantized weights is another kernel than that of one on GPU generation 15 and later (for mxfp4, nvfp4 and
mxfp8 on all), with plain weights it is on all; attention is chosen by rows, heads and length; experts are sorted from 64
(token, expert) pairs on. So here each layer is called on the tokens of the window one by one, as plain decoding calls it.
Whatever the kernels are, they are the same ones on the same shapes, and the result is the same bits.

The price: a layer's weights are read once for each token, where an ordinary window reads them once. A window of n tokens
costs up to n plain passes, less what the chip's cache keeps of a layer from one token to the next, since all tokens pass a
layer before the next one begins. As a step of n tokens yields n at most, exact mode can be slower than plain decoding: it
is for knowing, rather than for speed. Little is lost where weights are read once for each token in any case: affine
quantized ones on M1 and M2, and the experts of a mixture. And nothing is gained where an ordinary window has the bits of
plain decoding already, as on MLX's CPU backend; ``--check`` tells.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

from .cache import ArraysCache


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
