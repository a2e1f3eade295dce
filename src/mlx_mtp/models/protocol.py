"""The interface of the models for the decoding loop."""

from typing import Any, Protocol

from .mixin import MTPModel

__all__ = ["MTPModel", "PassCaches"]


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
