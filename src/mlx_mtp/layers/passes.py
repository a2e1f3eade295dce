"""The configuration of a pass for its layers: a context variable, since mlx-lm's forward pass has no argument for it."""

import copy
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..caches.positions import plain_position
from .attention import on_metal
from .compiled import Compiler
from .drafting import DraftConfig

MOST_TOKENS = 17  # tokens of a sequence in a compiled pass: a decided token and up to sixteen copies
COMPARED = (1, 2, 5, MOST_TOKENS)  # tokens of passes whose bits are compared


@dataclass
class Pass:
    """
    Args:
        compiler (Compiler, optional): Compiles the layers. Default: ``None``, they run as in mlx-lm.
        attention_rows (int, optional): The most queries of an attention call, see ``attention.py``: 0 for all, ``None`` for as
          many as Metal's fused attention takes.
        pieces (int, optional): The number of attention layers after which the graph built so far is submitted to the device,
          while the host builds the rest. Default: ``None``, the whole graph at once.
    """

    compiler: Compiler | None = None
    attention_rows: int | None = 0
    pieces: int | None = None
    n_attended: int = 0  # attention layers built so far
    starts: dict[int, mx.array | None] = field(default_factory=dict)  # results of ``start``, which all layers share

    def call(self, function: Callable[..., Any], module: Any, *inputs: mx.array, **numbers: int) -> Any:
        """``function(module, *inputs, **numbers)``, compiled or not, see ``Compiler.run``."""
        if self.compiler is None:
            return function(module, *inputs, **numbers)
        return self.compiler.run(function, module, *inputs, **numbers)

    def start(self, cache: Any) -> tuple[mx.array, ...]:
        """The position of the first token after a cache, as an array, since a number would be fixed in a trace.

        Empty if positions have three axes.
        """
        offset = cache.offset
        if isinstance(offset, mx.array):
            return (offset,)
        if offset not in self.starts:
            position = plain_position(offset)
            self.starts[offset] = None if position is None else mx.array(position)
        start = self.starts[offset]
        return () if start is None else (start,)

    def count_attention(self, x: mx.array) -> None:
        """Call with the hidden states after each attention layer."""
        self.n_attended += 1
        if self.pieces is not None and self.n_attended % self.pieces == 0:
            mx.async_eval(x)


def pass_over(T: int, drafting: DraftConfig, n_confirmed: int, compiler: Compiler | None) -> Pass:
    """A pass of the backbone over T tokens of each sequence. Prompts run as in mlx-lm."""
    if n_confirmed == 0 and T > 1:
        return Pass()
    rows = drafting.attention_rows if n_confirmed > 0 else 0
    if rows is None and not on_metal():
        rows = 0
    return Pass(_compiler(T, drafting, compiler), rows, drafting.pieces)


def pass_of_head(T: int, drafting: DraftConfig, compiler: Compiler | None) -> Pass:
    """A pass of the head over T tokens of each sequence."""
    return Pass(_compiler(T, drafting, compiler))


def _compiler(T: int, drafting: DraftConfig, compiler: Compiler | None) -> Compiler | None:
    return compiler if drafting.compiled and T <= MOST_TOKENS else None


_pass: ContextVar[Pass | None] = ContextVar("pass", default=None)
_OUTSIDE = Pass()  # for a layer that is called outside ``in_pass``


def current_pass() -> Pass:
    return _pass.get() or _OUTSIDE


class in_pass:
    """A context in which layers run with the configuration of a pass."""

    def __init__(self, this: Pass):
        self.this = this

    def __enter__(self) -> None:
        self.token = _pass.set(self.this)

    def __exit__(self, *_: object) -> None:
        _pass.reset(self.token)


def compiled_differences(model: Any, prompt: mx.array) -> dict[int, float]:
    """The largest difference in any logit between compiled and other passes over n tokens, after a prompt [T].

    The fused operations of a device may round differently.
    """
    caches, compiled = model.make_cache(), {"compiler": Compiler()}
    mx.eval(model(prompt[None], cache=caches), [c.state for c in caches])
    differences = {}
    for n in COMPARED:
        window = mx.repeat(prompt[None, -1:], n, axis=1)
        ours, others = (
            model(window, cache=copy.deepcopy(caches), n_confirmed=int(n > 1), **options).astype(mx.float32)
            for options in (compiled, {})
        )
        differences[n] = float(mx.abs(ours - others).max())
    return differences


def report_differences(differences: dict[int, float]) -> str:
    """The result, in one line."""
    if not any(differences.values()):
        return f"Compiled passes over {', '.join(map(str, differences))} tokens give the same bits as uncompiled ones."
    different = ", ".join(f"{n}: {d:.3g}" for n, d in differences.items())
    return f"Compiled passes round differently here. The largest difference in a logit, by the tokens of a pass: {different}."
