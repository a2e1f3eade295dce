"""The interface of the models for the decoding loop."""

from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..distributed.ranks import Ranks
from ..layers.compiled import Compiler
from ..layers.drafting import DraftConfig
from ..layers.mtp import MTPModule


class PassCaches(Protocol):
    """The caches of the sequences in a pass: ``SingleCache`` for one, ``RowsCache`` for several.

    A pass is in flight from ``start_pass`` until ``roll_back``. It runs over a window of tokens of each sequence, and the
    caller passes the number of final tokens to ``roll_back``.

    Attributes:
        entries (List[Any]): The caches for the model's call.
        n_tokens (List[int]): The number of final tokens of each sequence, without those of a pass in flight, [B].
        before_pass (List[Any], optional): The snapshot of the caches before the pass in flight, until its first token is final.
    """

    before_pass: list[Any] | None

    @property
    def entries(self) -> list[Any]: ...

    @property
    def n_tokens(self) -> list[int]: ...

    @property
    def states(self) -> list[list[Any]]:
        """The arrays of the recurrent layers, which a pass in flight computes."""
        ...

    @property
    def nbytes(self) -> int: ...

    def start_pass(self, n: int) -> None:
        """Begin a pass: the next call of the model is over n tokens of each sequence."""
        ...

    def roll_back(self, kept: list[int]) -> None:
        """Keep the first ``kept[b]`` tokens of the pass in flight in sequence b, from 1 on."""
        ...

    def extract(self, b: int) -> list[Any]:
        """Copies of sequence b's caches, one for each layer; with a pass in flight, after its first token."""
        ...


class MTPModel(Protocol):
    """One of mlx-lm's models with its MTP head, such as ``mlx_mtp.models.qwen3_5.Model``."""

    args: Any
    model: Any  # the backbone, with ``embed_tokens``
    drafting: DraftConfig
    ranks: Ranks | None  # the ranks that run the model
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
        compiler: Compiler | None = None,
    ) -> Any: ...

    def make_cache(self) -> list[Any]: ...

    def fingerprint(self) -> bytes: ...

    def logits(self, hidden: mx.array) -> mx.array: ...

    def draft_logits(self, hidden: mx.array) -> mx.array: ...

    def parameters(self) -> Any: ...
