"""The processes that run one model together, and how rank 0 tells the others what it has chosen.

Whatever depends on a clock, a random number, a file or a client is rank 0's choice. The ranks run the same program, so each of
them comes to the same call at the same point.

MLX runs a collective on the stream it is called on, and two that are pending on different streams corrupt each other. So all
of this belongs on the stream that the model runs on: call it within ``with mx.stream(...)``, as the model is called.
"""

import pickle
from typing import Any, TypeVar

import mlx.core as mx

T = TypeVar("T")


class Ranks:
    """
    Args:
        group (mx.distributed.Group): Of two or more processes.
    """

    def __init__(self, group: mx.distributed.Group):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def told(self, numbers: list[float]) -> mx.array:
        """Rank 0's numbers, [n] float32, on every rank. It does not wait: evaluate it with a pass of the model."""
        mine = mx.array(numbers, mx.float32)
        return mx.distributed.all_sum(mine if self.rank == 0 else mx.zeros_like(mine), group=self.group)

    def share(self, value: T) -> T:
        """Rank 0's value, which can be pickled, on every rank. It waits for all of them."""
        data = mx.array(list(pickle.dumps(value)) if self.rank == 0 else [], mx.uint8)
        n = mx.distributed.all_sum(mx.array(data.size), group=self.group).item()
        if self.rank != 0:
            data = mx.zeros(n, mx.uint8)  # type: ignore[arg-type]
        received: Any = mx.distributed.all_sum(data, group=self.group)
        value = pickle.loads(bytes(received))
        return value
