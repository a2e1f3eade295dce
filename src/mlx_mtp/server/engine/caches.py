"""What earlier requests have read: a prompt store for each model."""

import logging
import time
from collections.abc import Iterator
from typing import Any, Protocol

import mlx.core as mx
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...caches.single import KVOptions
from ...distributed.ranks import Ranks
from ...prompt_store import PromptStore
from ...prompt_store.disk_writer import FLUSH
from ...prompt_store.reader import Reader
from ...prompt_store.store import MAX_DISK_BYTES
from ..options import Options
from ..request import ModelKey, Prompt

# Metrics, and what they say.
HELD = "mlx_mtp_prompt_cache_bytes", "Memory that the prompt cache takes."
WRITTEN = "mlx_mtp_prompt_cache_written_bytes", "Bytes of the prompt cache written to disk."
READ = "mlx_mtp_prompt_cache_read_bytes", "Bytes of the prompt cache read from disk."


class Caches(Protocol):
    def use(self, key: ModelKey, model: Any, tokenizer: Any, max_bytes: int) -> None:
        """This model is loaded now, and all caches may take so many bytes."""

    def release(self) -> None:
        """No model is loaded any more."""

    def load(self, key: ModelKey, tokens: list[int]) -> None:
        """A prompt of this model will be fetched. In any thread: what takes long is done here."""

    def fetch(self, prompt: Prompt) -> tuple[list[Any] | None, int]:
        """The prompt cache to go on from, if there is one, and the tokens in it. Sets where the prompt is cut behind these."""

    def insert(self, prompt: Prompt, tokens: list[int], prompt_cache: list[Any]) -> None:
        """Keep a prompt cache of a prompt, as far as it is read, and of its answer.

        Args:
            tokens (List[int]): All of the tokens in the cache.
        """

    def trim_to(self, n_bytes: int) -> None:
        """Drop what is worth least, until this much is left."""

    def log(self) -> None: ...

    def collect(self) -> Iterator[Metric]:
        """The metrics."""

    def close(self) -> None: ...


class Stores:
    """A prompt store for each model that was loaded: one that is loaded again finds its texts. No request fails for their sake.

    Each rank keeps and gives up what it likes: a text goes on from where all of them can, and is cut where rank 0 says.

    Args:
        args (Options): The server's.
        ranks (Ranks, optional): Who runs the model. Each rank has its own part of the caches.
    """

    def __init__(self, args: Options, ranks: Ranks | None = None):
        self.args, self.ranks = args, ranks
        self.kv = KVOptions(
            kv_bits=args.kv_bits, kv_group_size=args.kv_group_size, quantized_kv_start=args.quantized_kv_start
        )
        self.stores: dict[ModelKey, PromptStore] = {}
        self.store: PromptStore  # of the model that is loaded

    def use(self, key: ModelKey, model: Any, tokenizer: Any, max_bytes: int) -> None:
        """
        Raises:
            OSError: ``--prompt-cache-dir`` cannot be used.
        """
        if key not in self.stores:
            limit = self.args.prompt_cache_disk_bytes
            self.stores[key] = PromptStore(
                model,
                max_bytes,
                self.args.prompt_cache_size,
                folder=self.args.prompt_cache_dir,
                max_disk_bytes=MAX_DISK_BYTES if limit is None else limit,
            )
        self.store = self.stores[key]
        self.store.model, self.store.max_bytes = model, max_bytes
        self.reader = Reader(self.store, tokenizer, self.kv)

    def release(self) -> None:
        self.store.model = None  # its weights make space for those of the next one

    def load(self, key: ModelKey, tokens: list[int]) -> None:
        store = self.stores.get(key)
        if store is None or store.disk is None:
            return
        try:
            store.load(tokens[:-1], self.kv)
        except Exception:  # as where another model is loaded meanwhile
            logging.debug("A text was not read from disk before it is needed.", exc_info=True)

    def fetch(self, prompt: Prompt) -> tuple[list[Any] | None, int]:
        tokens = prompt.tokens
        most = len(tokens) - 1  # generation begins with the last one
        cache, n, n_common = self._fetch(prompt, most)
        while self.ranks is not None:
            known: Any = self.ranks.gather([n, n_common], mx.array(0)).tolist()  # [R, 2]
            n_common, most = int(known[0][1]), int(min(n for n, _ in known))
            if all(n == most for n, _ in known):
                break
            cache, n, n_common = self._fetch(prompt, most)
        prompt.cuts, prompt.n_cached = [cut for cut in self.reader.cuts(tokens, n_common) if cut > n], n
        return cache, n

    def _fetch(self, prompt: Prompt, most: int) -> tuple[list[Any] | None, int, int]:
        """A prompt cache of at most so many tokens, their number, and that of those that the prompt shares with others."""
        try:
            key = prompt.key_of(prompt.tokens)
            cache, n, prompt.handle = self.reader.fetch(key, most)
            return cache, n, self.store.n_common(key)
        except Exception:
            logging.exception("The prompt cache has failed, and a prompt is read from its beginning.")
            return None, 0, 0

    def insert(self, prompt: Prompt, tokens: list[int], prompt_cache: list[Any]) -> None:
        try:
            prompt.handle = self.reader.insert(prompt.key_of(tokens), prompt_cache, prompt.handle)
        except Exception:
            logging.exception("The prompt cache has failed, and a text is not kept.")

    def trim_to(self, n_bytes: int) -> None:
        """The other models' texts go first."""
        for store in sorted(self.stores.values(), key=lambda store: store is self.store):
            store.trim_to(n_bytes - self.nbytes + store.nbytes)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores.values())

    def log(self) -> None:
        n = sum(store.n_snapshots for store in self.stores.values())
        logging.info(f"Prompt cache: {n} snapshots, {self.nbytes / 1e9:.2f} GB")

    def collect(self) -> Iterator[Metric]:
        disks = [store.disk for store in self.stores.copy().values() if store.disk is not None]
        yield GaugeMetricFamily(*HELD, self.nbytes)
        yield CounterMetricFamily(*WRITTEN, sum(disk.bytes_written for disk in disks))
        yield CounterMetricFamily(*READ, sum(disk.bytes_read for disk in disks))

    def close(self) -> None:
        """Write what is left to disk, as far as it takes no longer than ``FLUSH``."""
        deadline = time.monotonic() + FLUSH
        for store in self.stores.values():
            store.close(max(deadline - time.monotonic(), 0))
            store.model = None
