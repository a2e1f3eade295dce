"""A decoder layer, around its cache: attention (``attention.py``) or a recurrence (``recurrence.py``), and a feed-forward part.

A layer's parts are pure functions, which can be compiled: see ``compiled.py``. A recurrent layer is one function, of its input
and its states. An attention layer is two, before and after its cache and attention, since the number of tokens changes at every
step. A pass that is not compiled, and has neither drafts nor groups of queries, runs mlx-lm's own layer.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .passes import Pass, current_pass


class Layer:
    """What both kinds of layers have in common. List a kind before mlx-lm's decoder layer in the bases of a family's layer."""

    is_linear: bool  # whether it is recurrent, as mlx-lm names it
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any
    # Each kind makes an empty cache, and tells whether a cache is one of this layer, undamaged.
    make_cache: Callable[[], Any]
    fits: Callable[[Any], bool]
    # It tells whether a pass, with this cache and mask, needs ``run`` in place of mlx-lm's layer.
    is_ours: Callable[[Any, Any, Pass], bool]
    # It runs the layer over x [B, T, H], with this mask and cache, and updates the cache.
    run: Callable[[mx.array, Any, Any, Pass], mx.array]

    @property
    def dtype(self) -> mx.Dtype:
        return self.input_layernorm.weight.dtype

    def enter(self, x: mx.array) -> tuple[mx.array, ...]:
        """The input of the layer's first part, [B, T, H], and what ``join`` takes, given the layer's input x."""
        return (self.input_layernorm(x),)

    def join(self, x: mx.array, out: mx.array, *for_join: mx.array) -> mx.array:
        """Add the output of the first part, [B, T, H]."""
        return x + out

    def feed_forward(self, x: mx.array) -> mx.array:
        """Run the second part, and add its output."""
        return x + self.mlp(self.post_attention_layernorm(x))

    def __call__(self, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
        pass_ = current_pass()
        if cache is not None and self.is_ours(cache, mask, pass_):
            return self.run(x, mask, cache, pass_)
        return super().__call__(x, mask, cache)  # type: ignore[misc]
