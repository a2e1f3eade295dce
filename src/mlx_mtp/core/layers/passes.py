"""How passes run on this device, and the configuration of one: a context variable, since mlx-lm's has no argument for it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..caches.positions import Positions
from ..pacing import MAX_WINDOW
from .compiled import Compiler


@dataclass(frozen=True)
class DevicePasses:
    """The ways to run passes that the test of the device found right: ``model.device``."""

    # The most tokens of a verify pass that attention takes at a time, 0 for all; ``None``: as many as Metal's fused attention
    attention_rows: int | None = None
    compiled: bool = True  # whether passes over a few tokens are
    fused: bool = True  # whether attention of few queries is MLX's fused one
    # Whether the recurrence of steps and windows, and of prompts, is MLX's own; ``None``: where mlx-lm has no kernel of Metal
    native_steps: bool | None = None
    native_prompts: bool | None = None
    # The widest window with right logits, by the bits of keys and values; 0 where a single token's are wrong
    widest: Mapping[int | None, int] = field(default_factory=lambda: {None: MAX_WINDOW})
    same_bits: int | None = None  # the widest window with the bits of plain decoding; ``None`` if unknown

    def max_window(self, kv_bits: int | None) -> int:
        """The most tokens of a window of a text whose keys and values have these bits."""
        return self.widest.get(kv_bits, min(self.widest.values()))


@dataclass
class Pass:
    compiler: Compiler | None = None  # compiles the layers; ``None``: they run as in mlx-lm
    attention_rows: int | None = 0  # this and ``fused`` as in ``DevicePasses``
    fused: bool = True
    native: bool | None = None  # whether the recurrence is MLX's own, as ``DevicePasses.native_steps``
    positions: Positions | None = None  # those of a text with images: the offset of ``MRoPE`` is an index into them
    n_confirmed: int = 0  # tokens before the drafts, which may be rejected; 0: no drafts
    # What all layers share: arrays of ``ids``, and of n-gram embeddings
    arrays: dict[Any, Any] = field(default_factory=dict)

    def call(self, function: Callable[..., Any], module: Any, *inputs: mx.array, **numbers: int | None) -> Any:
        """``function(module, *inputs, **numbers)``, compiled or not, see ``Compiler.run``."""
        if self.compiler is None:
            return function(module, *inputs, **numbers)
        return self.compiler.run(function, module, *inputs, **numbers)

    def position(self, index: int) -> int | None:
        """The position of the token at an index; ``None`` unless this token and all later tokens have plain positions."""
        if (text := self.positions) is None:
            return index
        return index + text.shift if text.are_plain(index) else None

    def ids(self, begin: int, n: int) -> mx.array:
        """The positions of n tokens from an index on, [3, n]."""
        if (begin, n) not in self.arrays:
            assert self.positions is not None
            self.arrays[begin, n] = mx.array(self.positions.ids(begin, n))
        return self.arrays[begin, n]


def on_metal() -> bool:
    return mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)


def pass_over(
    T: int, device: DevicePasses, n_confirmed: int, compiler: Compiler | None, positions: Positions | None
) -> Pass:
    """A pass of the backbone over T tokens of each sequence. Prompts run as in mlx-lm."""
    fused = device.fused or T > MAX_WINDOW
    if n_confirmed == 0 and T > 1:
        return Pass(positions=positions, fused=fused, native=device.native_prompts)
    rows = device.attention_rows if n_confirmed > 0 else 0
    rows = 0 if rows is None and not on_metal() else rows
    native = device.native_steps
    return Pass(_compiler(T, device, compiler), rows, fused, native, positions, n_confirmed)


def pass_of_head(T: int, device: DevicePasses, compiler: Compiler | None, positions: Positions | None = None) -> Pass:
    return Pass(_compiler(T, device, compiler), positions=positions, fused=device.fused or T > MAX_WINDOW)


def _compiler(T: int, device: DevicePasses, compiler: Compiler | None) -> Compiler | None:
    return compiler if device.compiled and T <= MAX_WINDOW else None


_pass: ContextVar[Pass | None] = ContextVar("pass", default=None)


def current_pass() -> Pass:
    return _pass.get() or Pass()


@contextmanager
def in_pass(pass_: Pass) -> Iterator[None]:
    """A context in which layers run with the configuration of a pass."""
    token = _pass.set(pass_)
    try:
        yield
    finally:
        _pass.reset(token)
