"""The caches of one sequence in a pass: mlx-lm's caches in its prompt cache, updated in place.

They need no mask, so MLX's fused attention applies, and they are not copied. ``rows.py`` has the caches of several sequences.
"""

import copy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, maybe_quantize_kv_cache

from .prompt_cache import PromptCache
from .recurrent import ArraysCache, recurrent_states, restore, rollback, snapshot
from .rows import after_first


@dataclass(frozen=True, kw_only=True)
class KVOptions:
    """The quantization of keys and values, as in mlx-lm's ``generate_step``.

    Args:
        kv_bits (int, optional): Number of bits of a quantized key or value. Default: ``None``, no quantization.
        kv_group_size (int): Group size of the quantization.
        quantized_kv_start (int): The number of tokens at which quantization begins.
    """

    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START


class SingleCache:
    """The caches of one sequence, with the interface of ``protocol.PassCaches``. It may be interrupted at any line.

    Args:
        cache (PromptCache): Updated in place.
        kv (KVOptions): The quantization of keys and values.

    Attributes:
        before_pass (List[Any], optional): The ``recurrent.snapshot`` of the caches before the last pass, until its first token
          is final. It keeps the arrays of recurrent layers, which takes memory but no measurable time.
    """

    def __init__(self, cache: PromptCache, kv: KVOptions):
        self.cache, self.kv = cache, kv
        self.n_tokens = [cache.n_tokens]
        self.before_pass: list[Any] | None = None
        self.n_in_flight = 0  # tokens of the pass in flight
        self.is_rolling_back = False

    @property
    def entries(self) -> list[Any]:
        return self.cache.entries

    @property
    def states(self) -> list[list[Any]]:
        """The arrays of the recurrent layers."""
        return recurrent_states(self.cache.backbone)

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.cache.backbone)

    def start_pass(self, n: int) -> None:
        """Begin a pass over n tokens, and keep a snapshot for ``restore``."""
        self.before_pass, self.n_in_flight = snapshot(self.cache.entries), n

    def keep_pass(self) -> None:
        """End a pass whose tokens are all final, such as a pass over a prompt."""
        self.n_tokens, self.before_pass, self.n_in_flight = [self.n_tokens[0] + self.n_in_flight], None, 0

    def restore(self) -> bool:
        """Undo the last pass if its first token is not final. Return whether it was undone."""
        if self.before_pass is None:
            return False
        restore(self.cache.entries, self.before_pass)
        return True

    def quantize(self) -> None:
        """Quantize keys and values if due, as mlx-lm after every pass."""
        if self.kv.kv_bits is not None:
            caches = self.cache.backbone
            maybe_quantize_kv_cache(caches, **vars(self.kv))
            self.cache.entries[: len(caches)] = caches

    def roll_back(self, kept: list[int]) -> None:
        """Keep the first ``kept[0]`` tokens of the pass in flight. May be called again after an interrupt."""
        if self.n_in_flight > 1:
            again, self.is_rolling_back = self.is_rolling_back, True
            rollback(self.cache.backbone, self.n_tokens[0], kept[0], again)
        if self.n_in_flight > 0:
            # In one statement: after an interrupt, the rollback is either complete or can be repeated.
            self.n_tokens, self.n_in_flight, self.is_rolling_back = [self.n_tokens[0] + kept[0]], 0, False
        self.quantize()

    def extract(self, b: int) -> list[Any]:
        n_tokens = self.n_tokens[b] + min(self.n_in_flight, 1)
        copies: list[Any] = []
        for c in self.cache.backbone:
            if isinstance(c, ArraysCache):
                own: Any = ArraysCache(size=2)
                own.cache = [mx.contiguous(x) for x in after_first(c)]
            else:
                own = copy.copy(c)
                own.keys, own.values = tree_map(lambda x: mx.contiguous(x[..., :n_tokens, :]), (c.keys, c.values))
                own.offset = n_tokens
            copies.append(own)
        return copies
