"""The common part of models with a head: construction, forward pass, caches, weights, and the output layer for drafts."""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from ..caches.positions import add_mrope, rope_at
from ..caches.prompt_cache import positions_of
from ..caches.recurrent import ArraysCache, open_windows
from ..caches.validation import fingerprint
from ..distributed.ranks import Ranks
from ..layers.compiled import Compiler
from ..layers.drafting import DraftConfig
from ..layers.mtp import MTPModule, is_raw, sanitize_head, split_head
from ..layers.passes import in_pass, pass_over
from .draft_model import DraftModel


class MTPMixin:
    """List it before mlx-lm's model among the bases."""

    head_prefix = "mtp."  # of the names of the head's parameters
    can_shard = True  # whether ranks can have a part of each layer
    mtp: Any
    model: Any
    layers: Any
    logits: Any
    ranks: Ranks | None = None  # the ranks that run the model, set by ``mlx_mtp.load``
    vision: Any = None  # the checkpoint's ``images.vision.Vision``, set by ``mlx_mtp.load``
    fetched_head: Any = None  # the ``checkpoint.fetched.FetchedHead`` that it drafts with, set by ``mlx_mtp.load``
    _fingerprint: bytes | None = None  # computed on the first call

    def __init__(self, args: Any):
        super().__init__(args)  # type: ignore[call-arg]
        self.drafting = DraftConfig()

    def make_cache(self) -> list[Any]:
        """An empty cache for each layer."""
        return [ArraysCache(size=2) if l.is_linear else KVCache() for l in self.layers]

    def fingerprint(self) -> bytes:
        """The digest that identifies this model's prompt caches, see ``caches/validation.py``. It is computed once."""
        self._fingerprint = self._fingerprint or fingerprint(self)
        return self._fingerprint

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self._fingerprint = None  # new weights, such as those of an adapter
        return super().update(*args, **kwargs)  # type: ignore[misc]

    def update_modules(self, *args: Any, **kwargs: Any) -> Any:
        self._fingerprint = None
        return super().update_modules(*args, **kwargs)  # type: ignore[misc]

    def make_draft_model(self) -> DraftModel:
        """The head as a draft model for mlx-lm's own speculative loop, see ``draft_model.py``.

        Raises:
            ValueError: The model has no head.
        """
        if getattr(self, "mtp", None) is None:
            raise ValueError("The model has no MTP head: load it with mlx_mtp.load, or generate without MTP.")
        return DraftModel(self)

    def sanitize(
        self, weights: dict[str, mx.array], head: Mapping[str, mx.array] | None = None, raw: bool = False
    ) -> dict[str, mx.array]:
        """mlx-lm's ``sanitize``, which drops the head, and then the head's.

        Args:
            weights (Dict[str, mx.array]): The tensors of a checkpoint.
            head (Dict[str, mx.array], optional): The head's tensors, under names without ``mtp.``, if they are not in
              ``weights``.
            raw (bool): Whether ``head`` is in the Hugging Face layout.
        """
        weights, inside = split_head(weights)
        if head is None:
            head, raw = inside, is_raw(weights)
        weights = super().sanitize(weights)  # type: ignore[misc]
        if (mtp := getattr(self, "mtp", None)) is not None:
            weights.update({self.head_prefix + name: w for name, w in sanitize_head(mtp, head, raw).items()})
        return weights

    @property
    def text_args(self) -> Any:
        """The arguments of the whole language model, also on a rank with a part of it."""
        text: Any = getattr(self, "language_model", self)
        return text.args

    @property
    def vocab_size(self) -> int:
        """The number of token ids. On several ranks ``output_layer`` may have only some of their weights."""
        size: int = self.text_args.vocab_size
        return size

    @property
    def output_layer(self) -> nn.Module:
        """``lm_head``, or the embedding if they are tied."""
        text: Any = getattr(self, "language_model", self)
        return text.model.embed_tokens if text.args.tie_word_embeddings else text.lm_head

    @property
    def head_attention(self) -> nn.Module:
        """The attention of the head's decoder layer."""
        text: Any = getattr(self, "language_model", self)
        return text.mtp.layers[0].self_attn

    def draft_logits(self, hidden: mx.array) -> mx.array:
        """The output layer of drafts: the head's hidden states [B, T, H] -> logits of ``lm_head.ids``, or of all [B, T, n]."""
        return self.logits(hidden) if self.drafting.lm_head is None else self.drafting.lm_head(hidden)

    def mtp_forward(self, hidden: mx.array, next_tokens: mx.array, cache: Any = None) -> tuple[mx.array, mx.array]:
        """One pass of the head.

        Args:
            hidden (mx.array): The backbone's output after its final norm or, for a further draft, the head's output, [B, T, H].
            next_tokens (mx.array): The token after each of these positions, [B, T].
            cache (KVCache, optional): The head's keys and values, to which T positions are appended.

        Returns:
            Tuple[mx.array, mx.array]: Logits of the token after ``next_tokens``, [B, T, V], and hidden states, [B, T, H].
        """
        out = self.mtp(self.model.embed_tokens(next_tokens), hidden, cache)
        return self.logits(out), out


def add_head(model: Any, args: Any, decoder_layer: Callable[..., nn.Module]) -> None:
    """Replace a model's layers by layers that can roll back, and add the head if its arguments have one.

    Args:
        args: The text arguments.
        decoder_layer: Makes a decoder layer of ``args`` and ``layer_idx``, which is recurrent or not by its index.
    """
    model.model.layers = [decoder_layer(args, layer_idx=i) for i in range(args.num_hidden_layers)]
    attention = [layer.self_attn for layer in model.model.layers if not layer.is_linear]
    if args.mtp_num_hidden_layers > 0:
        model.mtp = MTPModule(args, decoder_layer(args, layer_idx=args.full_attention_interval - 1))
        attention.append(model.mtp.layers[0].self_attn)
    for own in attention:
        add_mrope(own, getattr(args, "rope_parameters", None))


def forward(
    model: Any,
    inputs: mx.array,
    cache: list[Any] | None,
    *,
    drafting: DraftConfig,
    return_hidden: bool = False,
    n_confirmed: int = 0,
    compiler: Compiler | None = None,
    **kwargs: Any,
) -> mx.array | tuple[mx.array, mx.array]:
    """The call of ``mlx_mtp.models.qwen3_5.Model``, with the backbone as ``model.model`` and its options as ``kwargs``.

    Args:
        drafting (DraftConfig): How to run passes.
    """
    if n_confirmed > 0:
        open_windows(cache, len(model.layers), n_confirmed)
    with (
        in_pass(pass_over(inputs.shape[1], drafting, n_confirmed, compiler)),
        rope_at(positions_of(cache, len(model.layers))),
    ):
        # Only the layers' caches: in a pipeline, mlx-lm's backbone writes to the last cache.
        hidden = model.model(inputs, None if cache is None else cache[: len(model.layers)], **kwargs)
        logits = model.logits(hidden)
    return (logits, hidden) if return_hidden else logits
