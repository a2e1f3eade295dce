"""Memory: the process's use and limit, and estimates for models and texts from their sizes."""

import ctypes
import logging
import math
import platform
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import psutil
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from .errors import MTPError

GB = 1e9
CACHE_SHARE = 0.5  # of the memory left by the model; the rest is for activations and other programs
GROWTH = 50_000_000  # bytes that Python, threads and traces took while 30 requests ran, see scripts/serve_limited.py
EVERY = 0.05  # seconds between two queries of the system, which are slower than MLX's
WORKING_SET = "max_recommended_working_set_size", "total_memory", "memory_size"  # on Metal, on CUDA, on either
CONTEXT = 2048  # the shortest text that a model must have room for, in tokens
CHUNK = 2048  # tokens of a prompt that one pass prefills, by default
NGRAM_SHARE = 0.6  # of the memory, for a model with its n-gram tables, which are otherwise read from their files
TIGHT = 0.9  # the share of the memory left above which a warning is logged
TEST_TOKENS, TEST_CHUNK, TEST_STATES = 8192, 64, 6  # of the test of the device, see ``checkpoint/checks/self_test.py``
STEP = KVCache.step  # tokens by which caches grow
STATES_AT_ONCE = 4  # recurrent states held at once by a recurrence of many small operations
# Attention of MLX 0.32.4 on Metal that writes no scores to memory (``use_fallback`` in scaled_dot_product_attention.cpp): more
# than 8 queries of these head dimensions; and 1,024 queries or more of head dimension 256 on GPUs with matrix units.
FUSED_HEAD_DIMS = (64, 72, 80, 96, 128)
FEWEST_FUSED = 9
FEWEST_FUSED_256 = 1024

log = logging.getLogger(__name__)


def check_device() -> None:
    """Wait for the passes on the current stream, and raise the error of one that failed, a RuntimeError."""
    mx.synchronize()
    mx.eval(mx.zeros(1) + 1)  # MLX may report an error only when the stream is used again


def total_memory() -> int:
    return int(psutil.virtual_memory().total)


def usable_memory() -> int:
    """MLX's memory limit in bytes: on a Mac, the recommended limit of the GPU; on another GPU, its memory."""
    info = mx.device_info()
    return next((int(info[name]) for name in WORKING_SET if name in info), total_memory())


def gpu_generation() -> tuple[int, str]:
    """The generation of Apple's GPU, such as 13 for M1 and 17 for M5, and a letter for its size; 0 for another device."""
    gpu = re.search(r"applegpu_g(\d+)([a-z]?)", str(mx.device_info().get("architecture", "")))  # such as applegpu_g17s
    return (0, "") if gpu is None else (int(gpu[1]), gpu[2])


def host_memory(process: psutil.Process) -> int:
    """The memory of a process in bytes. On macOS its physical footprint, as in Activity Monitor, from psutil 8.0 on."""
    # The resident memory lacks compressed pages, and counts those of the system's libraries.
    own = process.memory_info_ex() if hasattr(process, "memory_info_ex") else None
    footprint = getattr(own, "phys_footprint", None)
    return int(process.memory_info().rss if footprint is None else footprint)


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
    """The memory used by this process, and the most bytes to hold, by default MLX's limit on this machine.

    MLX's memory is counted twice, by MLX and by the system, since neither count is complete: the system may not attribute a
    GPU's buffers to the process, and MLX does not know the tokenizer, images that are decoded, or Python itself.
    """

    def __init__(self, limit: int | None = None):
        self._process = psutil.Process()
        self._asked = -math.inf
        self._host = self._least_host = self._most_host = 0
        self._host = self._least_host = self.held - mx.get_active_memory() - self.buffers
        self.limit = usable_memory()
        if limit is not None:
            self.restrict(limit)

    def restrict(self, limit: int) -> None:
        """Set another limit, in any thread. MLX frees its buffers before it allocates beyond it."""
        self.limit = limit
        mx.set_memory_limit(max(limit - self._host, 0))

    def expect_growth(self, n_bytes: int = GROWTH) -> None:
        """Reserve this many bytes for Python and the libraries around MLX, reduced by the bytes that they take from now on."""
        self._most_host = self._host + n_bytes

    @property
    def buffers(self) -> int:
        """The bytes that MLX keeps for the next arrays."""
        return mx.get_cache_memory()

    @property
    def held(self) -> int:
        mlx = mx.get_active_memory() + self.buffers
        if (now := time.monotonic()) - self._asked > EVERY:
            self._asked = now
            self._host = max(host_memory(self._process) - mlx, self._least_host)
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
        """Return free buffers to the system."""
        mx.clear_cache()
        if sys.platform == "linux":  # MLX's CPU backend allocates with the C library
            ctypes.CDLL(None).malloc_trim(0)
        self._asked = -math.inf


class Needs(NamedTuple):
    """The bytes that a model and a text need."""

    weights: int  # of the backbone, with embeddings and lm_head
    head: int = 0
    tower: int = 0  # the weights of the vision encoder
    ngrams: int = 0  # the tables of n-gram embeddings, if they are in memory
    caches: int = 0
    chunk: int = 0  # the activations of a pass over the last chunk of a prompt

    @property
    def total(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        parts = [f"{name} {size(n)}" for name, n in zip(self._fields, self) if n > 0]
        return f"{size(self.total)} ({', '.join(parts)})"


def needs_of(model: Any, context: int, chunk: int = CHUNK) -> Needs:
    """The memory of a loaded model with a text of ``context`` tokens, prefilled in chunks of ``chunk``."""
    head = nbytes_of(getattr(model, "mtp", None))
    sizes = sizes_of(model)
    of_chunk = sizes.chunk(min(chunk, context), context)
    ngrams = 0 if model.ngrams is None else sum(table.nbytes for table in model.ngrams.tables.values())
    return Needs(nbytes_of(model) - head, head, ngrams=ngrams, caches=sizes.caches(context), chunk=of_chunk)


def nbytes_of(module: Any) -> int:
    weights: Any = [] if module is None else tree_flatten(module.parameters())
    return sum(w.nbytes for _, w in weights)


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine the memory of a model's caches and activations."""

    value_bytes: int  # of a number in keys, values and activations
    backbone_values: int  # numbers in a token's keys and values, in all attention layers
    head_values: int = 0  # the same in the head
    index_values: int = 0  # numbers in the keys of a token that attention's indexers have, which are never quantized
    state_bytes: int = 0  # of all recurrent layers
    chunk_bytes: int = 0  # of a pass for each token, without attention's scores
    score_bytes: int = 0  # of attention's scores and mask for each pair of a token and one before it
    context_bytes: int = 0  # of a pass over a chunk for each token before its end
    fixed_bytes: int = 0  # of a pass over any number of tokens
    max_scored: int | None = None  # the most tokens of a pass whose scores are in memory; None: all

    def caches(self, n_tokens: int, kv_bits: int | None = None, kv_group_size: int = 64) -> int:
        """The bytes of the caches of a text, whose keys and values in the backbone may be quantized to ``kv_bits``."""
        own: float = self.value_bytes
        if kv_bits is not None:
            own = kv_bits / 8 + 2 * self.value_bytes / kv_group_size  # each group has a scale and a bias
        others = (self.head_values + self.index_values) * self.value_bytes
        return self.state_bytes + int(n_tokens * (self.backbone_values * own + others))

    def caches_of_several(self, lengths: Sequence[int], **kv: Any) -> int:
        """The bytes of the caches of several texts. In a batch each text takes as much as the longest, in whole steps."""
        return len(lengths) * self.caches((max(lengths) // STEP + 1) * STEP, **kv) if lengths else 0

    def chunk(self, n_tokens: int, n_context: int, kv_bits: int | None = None) -> int:
        """The most bytes of the activations of a pass over up to ``n_tokens`` of a prompt, the last of ``n_context``."""
        # A pass over fewer tokens may have scores in memory that a longer one has not; with quantized keys all are.
        n_scored = n_tokens if self.max_scored is None or kv_bits is not None else min(n_tokens, self.max_scored)
        scores = n_scored * n_context * self.score_bytes
        return n_tokens * self.chunk_bytes + scores + n_context * self.context_bytes + self.fixed_bytes

    @property
    def of_test(self) -> int:
        """The most bytes of the test of the device: recurrent states, a pass over some tokens, and keys of the head."""
        keys = TEST_TOKENS * self.head_values * self.value_bytes  # for which MLX allocates a quarter more
        return TEST_STATES * self.state_bytes + keys + keys // 4 + self.chunk(TEST_CHUNK, TEST_CHUNK)


def sizes_of(model: Any, value_bytes: int | None = None) -> Sizes:
    """The sizes of a model with a head or without. With ``value_bytes``, of a number, no weight is read."""
    n = value_bytes or model.layers[0].dtype.size
    recurrent = model.recurrent_layers
    attention = model.attention_layers
    head = [] if model.head_layer is None else [model.head_layer]
    args = model.text_args
    is_metal = mx.metal.is_available()
    state = 0 if is_metal else max((_state_bytes(layer.states[1], n) for layer in recurrent), default=0)
    passes = [_mlp(args, n)]  # the bytes of a token's activations in the parts of a layer
    if recurrent:  # without Metal, the recurrence is computed token by token
        heads, (_, n_inputs) = recurrent[0].heads, recurrent[0].states[0].shape
        values = heads.values * heads.value_size
        passes.append(n * (6 * values + 4 * n_inputs) + (0 if is_metal else state + 18 * values))
    if attention:  # queries with gates, normed and rotated queries, the output before and after gates, keys, values
        heads = attention[0].heads
        passes.append(n * (6 * heads.queries * heads.size + 2 * _row_values(attention[0])))
    return Sizes(
        value_bytes=n,
        backbone_values=sum(_row_values(layer, "keys", "values") for layer in attention),
        head_values=sum(_row_values(layer) for layer in head),
        index_values=sum(_row_values(layer, "index_keys") for layer in attention),
        state_bytes=sum(_state_bytes(own, n) for layer in recurrent for own in layer.states),
        # A layer's input and output, with streams also what mixes them, and the larger of its two parts, which are computed one
        # after the other.
        chunk_bytes=(4 if model.hidden_size > args.hidden_size else 2) * model.hidden_size * n + max(passes),
        score_bytes=max((layer.score_bytes(n) for layer in attention + head), default=0),
        context_bytes=max((layer.context_bytes(n) for layer in attention), default=0),
        fixed_bytes=STATES_AT_ONCE * state,
        max_scored=_max_scored({layer.heads.size for layer in attention + head}),
    )


def _max_scored(head_dims: set[int]) -> int | None:
    """The most queries of a pass whose scores are in memory, given the head dimensions; ``None``: any number."""
    if not mx.metal.is_available():
        return None
    if head_dims.issubset(FUSED_HEAD_DIMS):
        return FEWEST_FUSED - 1
    # MLX uses the matrix units of the GPU from the M5 and macOS 26.2 on (``is_nax_available`` in its device.cpp). Without
    # them, the first chunk of 2,048 tokens or more has no scores in memory either, but the chunks after it do.
    generation, kind = gpu_generation()
    system = [int(n) for n in re.findall(r"\d+", platform.mac_ver()[0])[:2]]
    has_matrix_units = generation >= (18 if kind == "p" else 17) and system >= [26, 2]
    return FEWEST_FUSED_256 - 1 if has_matrix_units and head_dims.issubset((*FUSED_HEAD_DIMS, 256)) else None


def _row_values(layer: Any, *names: str) -> int:
    """The numbers of a token in these arrays of an attention layer's cache, or in all."""
    return sum(heads * size for name, (heads, size) in layer.row_sizes.items() if name in names or not names)


def _state_bytes(state: Any, n: int) -> int:
    return math.prod(state.shape) * (n if state.dtype is None else state.dtype.size)


def _mlp(args: Any, n: int) -> int:
    """The bytes of gate, up and their product; with experts, also of the input, the output and the sorted copy of each."""
    sparse = 0
    if (experts := getattr(args, "num_experts_per_tok", 0)) > 0 and getattr(args, "num_experts", 0):
        sparse = experts * (5 * args.hidden_size + 4 * args.moe_intermediate_size)
        sparse += 3 * args.shared_expert_intermediate_size
    return max(3 * args.intermediate_size, sparse) * n


def check_fits(name: str, needs: Needs, account: Account, advice: str = "") -> None:
    """Raise an MTPError, which ends with ``advice``, if a model does not fit. Log a warning if it barely fits."""
    held = account.held
    left = account.limit - held
    if needs.total > left:
        raise MTPError(
            f"{name} does not fit: it needs {needs}, and of the {size(account.limit)} that this process may hold, {size(held)} "
            f"are in use. {advice}".rstrip()
        )
    if needs.total > TIGHT * left:
        log.warning(
            f"[WARNING] {name} barely fits: it needs {needs}, and {size(left)} are free. Long texts and other programs may "
            "run out of memory."
        )


def size(n_bytes: int) -> str:
    if n_bytes >= GB:
        return f"{n_bytes / GB:.1f} GB"
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e5 else f"{n_bytes / 1e3:.1f} kB"
