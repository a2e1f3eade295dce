"""The memory of this process and its limit."""

import ctypes
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import psutil

GB = 1e9
CACHE_SHARE = (
    0.5  # the share of the memory left by the model for caches; the rest is for activations and other programs
)
GROWTH = 50_000_000  # bytes that Python, threads and traces took while 30 requests ran, see scripts/serve_limited.py
EVERY = 0.05  # seconds between two queries of the system, which are slower than MLX's
WORKING_SET = "max_recommended_working_set_size", "total_memory", "memory_size"  # on Metal, on CUDA, on either
SHORT = (
    "Unable to allocate",
    "Insufficient Memory",
    "out of memory",
)  # in the errors of MLX's allocators on Metal and CUDA


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the system has no more memory, which other programs may have taken."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in SHORT)


def total_memory() -> int:
    """The machine's memory in bytes."""
    return int(psutil.virtual_memory().total)


def usable_memory() -> int:
    """MLX's memory limit in bytes: on a Mac, the recommended limit of the GPU; on another GPU, its memory."""
    info = mx.device_info()
    return next((int(info[name]) for name in WORKING_SET if name in info), total_memory())


@contextmanager
def limit_restored_on_error() -> Iterator[None]:
    """A context, or a decorator, that restores MLX's memory limit after an error."""
    before = mx.set_memory_limit(usable_memory())  # MLX tells its limit only when it is set
    mx.set_memory_limit(before)
    try:
        yield
    except BaseException:
        mx.set_memory_limit(before)
        raise


class Account:
    """The memory used by this process, and its limit.

    MLX's memory is counted twice, by MLX and by the system, since neither count is complete: the system may not attribute a
    GPU's buffers to the process, and MLX does not know the tokenizer, images that are decoded, or Python itself.

    Args:
        limit (int, optional): The most bytes to hold. Default: ``None``, MLX's limit on this machine.
    """

    def __init__(self, limit: int | None = None):
        self._process = psutil.Process()
        self._asked = -math.inf
        self._host = self._least_host = self._most_host = 0
        self._host = self._least_host = self.held - self.active - self.buffers
        self.limit = usable_memory()
        if limit is not None:
            self.restrict(limit)

    def restrict(self, limit: int) -> None:
        """Set another limit in bytes, in any thread. MLX frees its buffer cache before it allocates beyond the limit, and a
        server that checks the account before each step observes it from the next step on.
        """
        self.limit = limit
        mx.set_memory_limit(max(limit - self._host, 0))

    def expect_growth(self, n_bytes: int = GROWTH) -> None:
        """Reserve this many bytes for Python and the libraries around MLX, reduced by the bytes that they take from now on.

        Args:
            n_bytes (int): Default: the growth of a server with many requests.
        """
        self._most_host = self._host + n_bytes

    @property
    def active(self) -> int:
        """The bytes of arrays."""
        return mx.get_active_memory()

    @property
    def buffers(self) -> int:
        """The bytes that MLX keeps for the next arrays."""
        return mx.get_cache_memory()

    @property
    def held(self) -> int:
        """All bytes that the process holds."""
        mlx = self.active + self.buffers
        if (now := time.monotonic()) - self._asked > EVERY:
            self._asked = now
            self._host = max(self._process.memory_info().rss - mlx, self._least_host)
        return self._host + mlx

    @property
    def left(self) -> int:
        """The bytes left for arrays; negative if more is held than the limit allows."""
        held = self.held  # first, since it measures _host
        return self.limit - held - max(self._most_host - self._host, 0)

    @property
    def cache_budget(self) -> int:
        """The bytes for prompt caches, including the caches of running requests."""
        return max(int(CACHE_SHARE * self.left), 0)

    def release(self) -> None:
        """Return the free buffers of MLX and of the C library's allocator to the system."""
        mx.clear_cache()
        if sys.platform == "linux":  # MLX's CPU backend allocates with the C library
            ctypes.CDLL(None).malloc_trim(0)
        self._asked = -math.inf
