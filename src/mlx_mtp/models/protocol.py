"""What the decoding loop asks of a model: the interface of every model in this package."""

from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..distributed.ranks import Ranks
from .drafting import Drafting
from .mtp import MTPModule


class MTPModel(Protocol):
    """One of mlx-lm's models with its MTP head, such as ``mlx_mtp.models.qwen3_5.Model``."""

    args: Any
    model: Any  # the backbone, with ``embed_tokens``
    drafting: Drafting
    ranks: Ranks | None  # who runs the model together
    vision: Any  # the checkpoint's ``images.vision.Vision``, or None
    head_prefix: str  # of the names of the head's parameters

    @property
    def layers(self) -> list[nn.Module]: ...

    @property
    def mtp(self) -> MTPModule: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def output_layer(self) -> nn.Module: ...

    def __call__(
        self,
        inputs: mx.array,
        cache: list[Any] | None = None,
        *,
        return_hidden: bool = False,
        n_confirmed: int = 0,
        exact: bool = False,
    ) -> Any: ...

    def make_cache(self) -> list[Any]: ...

    def fingerprint(self) -> bytes: ...

    def logits(self, hidden: mx.array) -> mx.array: ...

    def draft_logits(self, hidden: mx.array) -> mx.array: ...

    def parameters(self) -> Any: ...
