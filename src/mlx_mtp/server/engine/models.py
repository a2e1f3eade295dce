"""The models that a server may load, the loaded one, and their prompt caches."""

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...checkpoint.config import check_config, context_length_of
from ...checkpoint.hub import cached_repositories, commit_of, fetch
from ...checkpoint.load import load
from ...checkpoint.reader import CheckpointReader
from ...checkpoint.settings import sampling_defaults
from ...cli.arguments import missing_head_note
from ...core.distributed import Ranks
from ...core.drafts.options import asks_for_copies
from ...core.layers.mtp import has_head
from ...errors import MTPError, is_device_error
from ...files import MAX_DISK_BYTES
from ...prompt_store import PromptStore
from ...prompt_store.disk import FLUSH, READ_TIMEOUT
from ...prompt_store.store import cuts_of, open_folder
from .. import DEFAULT
from ..request import ApiError, Options, Prompt
from .encode import BoundedTokenizer

MAX_TOKENIZERS = 8


class ModelProvider:
    """Loads one of the served models at a time. Tokenizers stay loaded, to tokenize prompts while another model is loaded."""

    def __init__(self, options: Options):
        self.options = options
        folder = Path(options.model)
        self.name = options.served_model_name or (folder.resolve().name if folder.is_dir() else options.model)
        self.served = [self.name, *options.serve_model]
        self.key: str | None = None  # the path or repo of the loaded model
        self.model: Any = None
        self.has_head = False  # whether the loaded model drafts with a head
        self.tokenizer: Any = None
        self.tokenizers: dict[str, BoundedTokenizer] = {}
        self.revisions: dict[str, str | None] = {}  # the commits that were loaded, which later loads repeat

    def resolve(self, name: str) -> str:
        """The path or repo of a request's model, or an ApiError. If only one model is served, any name refers to it."""
        options = self.options
        if options.allow_any_model:
            return options.model if name in (DEFAULT, self.name) else name
        if options.serve_model and name not in (DEFAULT, options.model, self.name, *options.serve_model):
            message = f"The model {name!r} is not served here; GET /v1/models lists the served models."
            raise ApiError(404, message, param="model", code="model_not_found")
        return name if name in options.serve_model else options.model

    @property
    def drafts(self) -> bool:
        """Whether the loaded model drafts, with its head or by copies."""
        return self.has_head or asks_for_copies(self.options.copy_drafts)

    def load(self, key: str) -> None:
        if key == self.key:
            return
        self.reset()
        adapter_path = self.options.adapter_path if key == self.options.model else None
        revision = self.revisions.get(key)
        self.model, tokenizer = load(key, adapter_path=adapter_path, revision=revision, **self.options.load)
        self.revisions[key] = commit_of(fetch(key, revision, weights=()))
        self.has_head = has_head(self.model)
        if (bounded := self.tokenizers.pop(key, None)) is None:  # otherwise grammars may be compiled for it
            if self.options.use_default_chat_template and tokenizer.chat_template is None:
                tokenizer.chat_template = tokenizer.default_chat_template
            if self.options.mtp is None and not self.has_head and (note := missing_head_note(key)) is not None:
                logging.info(note)
            sampling = sampling_defaults(key, self.options.sampling, self.model.ranks)
            logging.info(f"Default sampling: {sampling}")
            vision = self.model.vision if self.model.ranks is None else None
            context = context_length_of(vars(self.model.args))
            bounded = BoundedTokenizer(tokenizer, self.model.vocab_size, context, vision, sampling)
        self.key = key
        self.tokenizer = bounded.tokenizer
        self.tokenizers[key] = bounded
        if len(self.tokenizers) > MAX_TOKENIZERS:
            self.tokenizers.pop(next(iter(self.tokenizers)))

    def reset(self) -> None:
        """Free the loaded model and all vision encoders. Tokenizers stay."""
        self.key = self.model = self.tokenizer = None
        for tokenizer in self.tokenizers.values():
            if tokenizer.vision is not None:
                tokenizer.vision.free()
        gc.collect()
        mx.clear_cache()


def check_files(checkpoint: CheckpointReader) -> None:
    """Raise an error if a model's config or the headers of its files tell that it cannot be loaded."""
    check_config(checkpoint.config, checkpoint.name)
    _ = checkpoint.model_map


def cached_models() -> list[str]:
    """The models in the hub's cache that can be loaded, whose files are read for it."""
    found = set[str]()
    for name, repo in cached_repositories().items():
        for revision in repo.revisions:
            with suppress(MTPError, OSError):
                check_files(CheckpointReader(name, folder=revision.snapshot_path))
                found.add(name)
    return sorted(found)


@contextmanager
def _harmless(instead: str) -> Iterator[None]:
    """A context whose errors are logged, except for the GPU's."""
    try:
        yield
    except Exception as e:
        if is_device_error(e):
            raise
        logging.exception(f"The prompt cache failed: {instead}.")


class Stores:
    """A prompt store for each model, kept while other models are loaded. Only the GPU's errors fail requests.

    Each rank has its own part of the caches, its own eviction and its own folder in ``--prompt-cache-dir``: a prompt resumes at
    the longest prefix that all ranks have, and rank 0 chooses its cuts. An OSError if ``--prompt-cache-dir`` cannot be used.
    """

    def __init__(self, options: Options, ranks: Ranks | None = None):
        self.options = options
        self.ranks = ranks
        self.stores: dict[str, PromptStore] = {}
        self.store: PromptStore  # the loaded model's
        self.folder = None
        if options.prompt_cache_dir is not None:
            limit = options.prompt_cache_disk_bytes
            part = "" if ranks is None else f"rank{ranks.rank}"
            path = Path(options.prompt_cache_dir) / part
            self.folder = open_folder(path, MAX_DISK_BYTES if limit is None else limit)

    def use(self, key: str, model: Any, tokenizer: Any, max_bytes: int) -> None:
        if key not in self.stores:
            self.stores[key] = PromptStore(model, max_bytes, self.options.prompt_cache_size, folder=self.folder)
        self.store = self.stores[key]
        self.store.model = model
        self.store.max_bytes = max_bytes
        self.tokenizer = tokenizer

    def load(self, key: str, prompt: Prompt) -> None:
        """Read a prompt's caches from disk, in any thread, before ``fetch``, which does it if the model is not loaded."""
        if (store := self.stores.get(key)) is not None and store.disk is not None:
            with suppress(Exception):  # such as a change of the loaded model
                store.load(prompt.tokens[:-1], self.options.kv.of_text(0, len(prompt.tokens)))
                prompt.is_read = True

    def fetch(self, prompt: Prompt) -> tuple[list[Any] | None, int]:
        """The prompt cache to resume from, if any, and its number of tokens. Also sets the prompt's cuts after these tokens."""
        tokens = prompt.tokens
        max_tokens = len(tokens) - 1  # generation begins with the last token
        timeout = 0.0 if self.ranks is None and prompt.is_read else READ_TIMEOUT
        while True:
            cache, n, n_common = None, 0, 0  # the last is the number of tokens shared with another prompt
            with _harmless("the whole prompt is prefilled"):
                key = prompt.key_of(tokens)
                kv = self.options.kv.of_text(0, len(tokens))
                cache, n, prompt.handle = self.store.fetch(key[:max_tokens], kv, timeout)
                n_common = self.store.n_common(key)
            if self.ranks is None:
                break
            known: Any = self.ranks.gather([n, n_common], mx.array(0)).tolist()  # [R, 2]
            n_common = int(known[0][1])
            max_tokens = int(min(n for n, _ in known))
            if all(n == max_tokens for n, _ in known):
                break
        prompt.cuts = [cut for cut in cuts_of(self.tokenizer, tokens, n_common) if cut > n]
        prompt.n_cached = n
        return cache, n

    def insert(self, prompt: Prompt, tokens: list[int], prompt_cache: list[Any]) -> None:
        with _harmless("a text is not cached"):
            key = prompt.key_of(tokens)
            kv = self.options.kv.of_text(0, len(prompt.tokens))
            prompt.handle = self.store.insert(key, prompt_cache, kv, prompt.handle)

    def trim_to(self, n_bytes: int) -> None:
        """Evict snapshots until at most this many bytes are left, those of other models first."""
        for store in sorted(self.stores.values(), key=lambda store: store is self.store):
            store.trim_to(n_bytes - self.nbytes + store.nbytes)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores.values())

    def collect(self) -> Iterator[Metric]:
        disks = [store.disk for store in self.stores.copy().values() if store.disk is not None]
        name = "mlx_mtp_prompt_cache"
        cache = "the prompt cache"
        written = sum(disk.bytes_written for disk in disks)
        read = sum(disk.bytes_read for disk in disks)
        yield GaugeMetricFamily(f"{name}_bytes", f"Memory used by {cache}.", self.nbytes)
        yield CounterMetricFamily(f"{name}_written_bytes", f"Bytes of {cache} written to disk.", written)
        yield CounterMetricFamily(f"{name}_read_bytes", f"Bytes of {cache} read from disk.", read)

    def close(self) -> None:
        """Write pending snapshots to disk, for at most ``FLUSH`` seconds."""
        deadline = time.monotonic() + FLUSH
        for store in self.stores.values():
            store.close(max(deadline - time.monotonic(), 0))
            store.model = None
        if self.folder is not None:
            self.folder.close_unused()
