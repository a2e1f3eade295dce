"""How a pass is run: what its layers have to know of it, and no caller of mlx-lm's forward can hand them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .compiled import run
from .drafting import Drafting

MOST_TOKENS = 17  # of a sequence in a pass that is compiled: a decided token and sixteen copies


@dataclass
class Pass:
    """
    Args:
        compiled (bool): Whether layers are compiled. Default: ``False``, they are called as mlx-lm calls them.
        attention_rows (int, optional): The most tokens that attention takes at a time, see ``attention.py``. Default: ``None``,
          all.
        pieces (int, optional): Hand the device what was built so far behind every so many attention layers, while the rest is
          built. Default: ``None``, all at once.
    """

    compiled: bool = False
    attention_rows: int | None = None
    pieces: int | None = None
    n_attended: int = 0  # attention layers that were built

    def call(self, function: Callable[..., Any], module: Any, *inputs: mx.array, n: int = 0) -> Any:
        """``function(module, *inputs, n)``, as ``compiled.run`` says."""
        return run(function, module, *inputs, n=n) if self.compiled else function(module, *inputs, n)

    def count_attention(self, x: mx.array) -> None:
        """Call with the hidden states behind each attention layer."""
        self.n_attended += 1
        if self.pieces is not None and self.n_attended % self.pieces == 0:
            mx.async_eval(x)


def pass_over(T: int, drafting: Drafting, n_confirmed: int, exact: bool) -> Pass:
    """A pass of the backbone over T tokens of each sequence. Prompts and exact windows run as in mlx-lm."""
    if exact or (n_confirmed == 0 and T > 1):
        return Pass()
    rows = drafting.attention_rows if n_confirmed > 0 else None
    return Pass(drafting.compiled and T <= MOST_TOKENS, rows, drafting.pieces)


def pass_of_head(drafting: Drafting, T: int) -> Pass:
    """A pass of the head over T tokens of each sequence."""
    return Pass(drafting.compiled and T <= MOST_TOKENS)


_pass: ContextVar[Pass | None] = ContextVar("pass", default=None)
_OUTSIDE = Pass()  # of a layer that is called by itself


def current_pass() -> Pass:
    return _pass.get() or _OUTSIDE


@contextmanager
def in_pass(this: Pass) -> Iterator[None]:
    """Inside, layers run as this pass says."""
    token = _pass.set(this)
    try:
        yield
    finally:
        _pass.reset(token)
