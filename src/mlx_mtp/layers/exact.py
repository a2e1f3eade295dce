"""Exact mode: the backbone over a window, with the same operations as plain decoding.

MLX chooses kernels by the number of rows, and kernels sum in different orders. In MLX 0.32 on Metal, a product of two or more
rows with quantized weights runs another kernel than a product of one row on GPU generation 15 and later (for mxfp4, nvfp4 and
mxfp8 on every generation); with plain weights it does on every generation. Attention is chosen by rows, heads and length, and
experts are sorted from 64 (token, expert) pairs on. So exact mode calls each layer on the tokens of the window one by one, as
plain decoding does: the same kernels on the same shapes give the same bits.

The cost: a layer's weights are read once for each token of a window, not once for all. A window of n tokens costs up to n plain
passes, less if the chip's cache keeps weights of a layer from one token to the next: all tokens run through a layer before the
next layer begins. A step over n tokens yields at most n, so exact mode can be slower than plain decoding. It is for comparison,
not for speed. It costs little if weights are read once for each token anyway: affine quantized weights on M1 and M2, and the
experts of a mixture. It is not needed if an ordinary window has the bits of plain decoding, as on MLX's CPU backend;
``--check`` tells.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

from ..caches.recurrent import ArraysCache


def one_by_one(
    model: Any, inputs: mx.array, cache: list[Any] | None, input_embeddings: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The forward of mlx-lm's Qwen3.5 and Qwen3-Next models, one token after the other in each layer.

    Args:
        model (nn.Module): A model with the backbone as ``model`` and the output layer as ``logits``.
        inputs (mx.array): Token ids, [B, T].
        cache (List[Any]): One entry for each layer.
        input_embeddings (mx.array, optional): Embeddings to use in place of ``inputs``, [B, T, H].

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
        hidden = [backbone.embed_tokens(inputs[:, t : t + 1]) for t in range(inputs.shape[1])]
    else:
        hidden = [input_embeddings[:, t : t + 1] for t in range(input_embeddings.shape[1])]

    last = None
    for layer, c in zip(backbone.layers, cache):
        for t, h in enumerate(hidden):  # [B, 1, H]
            if last is not None:
                # Force this order. In MLX's own, keys and values are written before the previous token has read them, which
                # copies the cache, and each token reads a layer's weights again.
                h = mx.depends(h, last)
            mask = create_ssm_mask(h, c) if layer.is_linear else create_attention_mask(h, c)
            hidden[t] = last = layer(h, mask=mask, cache=c)
            if isinstance(c, ArraysCache):
                c.keep_state()
    hidden = [backbone.norm(h) for h in hidden]
    logits = [model.logits(h) for h in hidden]  # [B, 1, V]
    return mx.concatenate(logits, axis=1), mx.concatenate(hidden, axis=1)
