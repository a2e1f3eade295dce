"""How passes run on a device."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..pacing import MAX_WINDOW


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
