"""The common part of models with a head: construction, forward pass, caches, weights, and the output layer for drafts."""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import gather_last_axis
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


class MTPModel:
    """A model with its MTP head. List it before mlx-lm's model among the bases."""

    head_prefix = "mtp."  # of the names of the head's parameters
    can_shard = True  # whether ranks can have a part of each layer
    args: Any
    mtp: Any
    model: Any  # the backbone, with ``embed_tokens``
    layers: Any
    parameters: Any
    ranks: Ranks | None = None  # the ranks that run the model, set by ``mlx_mtp.load``
    vision: Any = None  # the checkpoint's ``images.vision.Vision``, set by ``mlx_mtp.load``
    fetched_head: Any = None  # the ``checkpoint.fetched.FetchedHead`` that it drafts with, set by ``mlx_mtp.load``
    _fingerprint: bytes | None = None  # computed on the first call

    def __init__(self, args: Any):
        super().__init__(args)  # type: ignore[call-arg]
        self.drafting = DraftConfig()

    def __call__(
        self,
        inputs: mx.array,
        cache: list[Any] | None = None,
        input_embeddings: mx.array | None = None,
        *,
        return_hidden: bool = False,
        n_confirmed: int = 0,
        compiler: Compiler | None = None,
    ) -> Any:
        """mlx-lm's call, with more options.

        Args:
            inputs (mx.array): Token ids, [B, T].
            cache (List[Any], optional): One entry for each layer; further entries are ignored.
            input_embeddings (mx.array, optional): [B, T, H], in place of ``inputs``.
            return_hidden (bool): Also return the output of the final norm. Default: ``False``.
            n_confirmed (int): The number of leading tokens known to be final. If above 0, the call is recorded, and
              ``mlx_mtp.caches.recurrent.rollback`` can roll back to any token from this one on. Default: ``0``.
            compiler (Compiler, optional): Compiles the pass. Default: ``None``, it runs as in mlx-lm.

        Returns:
            mx.array or Tuple[mx.array, mx.array]: Logits [B, T, V]; with ``return_hidden`` also hidden states [B, T, H].
        """
        n, embeddings = len(self.layers), {} if input_embeddings is None else {"input_embeddings": input_embeddings}
        if n_confirmed > 0:
            open_windows(cache, n, n_confirmed)
        with (
            in_pass(pass_over(inputs.shape[1], self.drafting, n_confirmed, compiler)),
            rope_at(positions_of(cache, n)),
        ):
            # Only the layers' caches: in a pipeline, mlx-lm's backbone writes to the last cache.
            hidden = self.model(inputs, None if cache is None else cache[:n], **embeddings)
            logits = self.logits(hidden)
        return (logits, hidden) if return_hidden else logits

    def logits(self, hidden: mx.array) -> mx.array:
        """The output layer: [B, T, H] -> [B, T, V]."""
        if self._text.args.tie_word_embeddings:
            out: mx.array = self.model.embed_tokens.as_linear(hidden)
            return out
        out, group = self._text.lm_head(hidden), self._text.sharding_group
        return out if group is None else gather_last_axis(out, group)

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
    def _text(self) -> Any:
        """The language model."""
        return getattr(self, "language_model", self)

    @property
    def text_args(self) -> Any:
        """The arguments of the whole language model, also on a rank with a part of it."""
        return self._text.args

    @property
    def vocab_size(self) -> int:
        """The number of token ids. On several ranks ``output_layer`` may have only some of their weights."""
        size: int = self.text_args.vocab_size
        return size

    @property
    def output_layer(self) -> nn.Module:
        """``lm_head``, or the embedding if they are tied."""
        layer: nn.Module = self.model.embed_tokens if self.text_args.tie_word_embeddings else self._text.lm_head
        return layer

    @property
    def head_attention(self) -> nn.Module:
        """The attention of the head's decoder layer."""
        attention: nn.Module = self.mtp.layers[0].self_attn
        return attention

    def draft_logits(self, hidden: mx.array) -> mx.array:
        """The output layer of drafts: the head's hidden states [B, T, H] -> logits of ``lm_head.ids``, or of all [B, T, n]."""
        return self.logits(hidden) if self.drafting.lm_head is None else self.drafting.lm_head(hidden)


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
