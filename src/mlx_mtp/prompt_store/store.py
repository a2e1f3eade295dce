"""The store of prefilled prefixes, in memory and on disk."""

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..caches.prompt_cache import make_prompt_cache, open_prompt_cache
from ..caches.single import KVOptions
from ..memory.account import Account
from . import arrays
from .arrays import Format
from .disk_writer import FLUSH, DiskWriter
from .forest import Forest, in_memory
from .shared_folder import SharedFolder
from .stored_files import Files
from .tree import Handle, Node, StoredArrays, Tokens

MAX_DISK_BYTES = 64 * 10**9
MAX_HOURLY_BYTES = 32 * 10**9  # SSDs wear with every write


class Prefix(NamedTuple):
    """A stored prefix of a text.

    Args:
        prompt_cache (List[Any]): A cache that the caller may change.
        n_tokens (int): The number of tokens in it; 0 if nothing is stored.
        handle (Handle, optional): The stored prefix, for ``insert``; ``None`` if nothing is stored.
    """

    prompt_cache: list[Any]
    n_tokens: int
    handle: Handle | None


@dataclass
class Counts:
    """Counts of a store's work.

    Args:
        fetches (int): The number of texts that were looked up.
        hits (int): The number of texts of which a prefix was found.
        tokens (int): The number of tokens of these prefixes.
    """

    fetches: int = 0
    hits: int = 0
    tokens: int = 0


class PromptStore(AbstractContextManager["PromptStore"]):
    """Prompt caches of texts; common prefixes are stored once.

    A text is inserted at each position where others may diverge from it, with a snapshot from which any text with this prefix
    can resume. Fetched arrays equal the inserted ones bit for bit. All methods are thread-safe.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``. With other weights, such as those of an adapter, the store starts empty.
        max_bytes (int, optional): The maximum memory. Default: ``None``, half of the memory that is left of MLX's limit on this
          machine.
        max_snapshots (int, optional): The maximum number of snapshots in memory. Default: ``None``, any number.
        folder (Union[str, Path], optional): A folder for texts that outlive the process; several processes may share it. It is
          written in the background: ``close`` the store to write the ends of all texts. Default: ``None``.
        max_disk_bytes (int): The maximum size of the folder.
        max_hourly_bytes (int): The maximum amount written to the folder in an hour.

    Raises:
        OSError: The folder cannot be used.
    """

    def __init__(
        self,
        model: Any,
        max_bytes: int | None = None,
        max_snapshots: int | None = None,
        *,
        folder: str | Path | None = None,
        max_disk_bytes: int = MAX_DISK_BYTES,
        max_hourly_bytes: int = MAX_HOURLY_BYTES,
    ):
        self.model = model
        self.max_bytes = Account().cache_budget if max_bytes is None else max_bytes
        self.max_snapshots = max_snapshots
        self.counts = Counts()
        self._lock = threading.RLock()
        self._key = model.fingerprint()
        self._forest = Forest()
        self._files = Files(model, self._forest, self._lock)
        if folder is not None:
            self._files.open(SharedFolder(Path(folder).expanduser(), max_disk_bytes, max_hourly_bytes))

    @property
    def disk(self) -> DiskWriter | None:
        """The folder's reader and writer; ``None`` without a folder."""
        return self._files.disk

    def close(self, seconds: float = FLUSH) -> None:
        """Write the rest to disk, for at most this time, and drop all texts."""
        if self.disk is not None:
            self.disk.close(seconds)
            self._files.disk = None
        with self._lock:
            self._files.forget()

    def __exit__(self, *_: Any) -> None:
        self.close()

    def fetch(self, tokens: Sequence[int], kv: KVOptions | None = None) -> Prefix:
        """The longest prefix that the text can be resumed from.

        Args:
            tokens (Sequence[int]): The text. To generate, omit the last token, with which generation begins.
            kv (KVOptions, optional): How keys and values are quantized. Default: ``None``, they are not.
        """
        text, kv = np.asarray(tokens, np.int64), _quantized(kv)
        with self._lock:
            self._check_model()
            self._forest.now += 1
            self.counts.fetches += 1
            self._files.read_index(kv)
            while (found := self._forest.deepest(text, kv)) is not None:
                entries = self._restore(*found, text)
                if entries is not None:
                    return Prefix(entries, found[1].length, weakref.ref(found[1]))
            return Prefix(make_prompt_cache(self.model), 0, None)

    def load(self, tokens: Sequence[int], kv: KVOptions | None = None) -> None:
        """Read the files that ``fetch`` will need for this text into memory, without blocking other threads."""
        if (disk := self.disk) is not None:
            disk.reader.submit(self._load_text, np.asarray(tokens, np.int64), _quantized(kv)).result()

    def n_common(self, tokens: Sequence[int]) -> int:
        """The number of tokens that the text has in common with a stored one: later texts may differ there as well."""
        text = np.asarray(tokens, np.int64)
        with self._lock:
            self._check_model()
            return self._forest.n_common(text)

    def insert(
        self, tokens: Sequence[int], prompt_cache: list[Any], kv: KVOptions | None = None, handle: Handle | None = None
    ) -> Handle | None:
        """Keep the new part of a prompt cache, with a snapshot at its end.

        Args:
            tokens (Sequence[int]): All of the tokens in the cache. A number below 0 stands for a part of an image.
            prompt_cache (List[Any]): A cache of this model, with no generation open on it. It is not changed.
            kv (KVOptions, optional): As in ``fetch``.
            handle (Handle, optional): Of ``fetch``, or of an insertion of the same cache before: up to there, nothing is
              compared. Default: ``None``, the whole cache is compared with what is stored.

        Returns:
            Optional[Handle]: For the next call; ``None`` for no tokens.

        Raises:
            ValueError: The cache belongs to another model, or to other tokens.
        """
        text, kv = np.asarray(tokens, np.int64), _quantized(kv)
        with self._lock:
            self._check_model()
            cache = open_prompt_cache(self.model, list(prompt_cache))
            if cache.n_tokens != len(text):
                raise ValueError(f"The prompt cache is of {cache.n_tokens} tokens, not of these {len(text)}.")
            if len(text) == 0:
                return None
            format = arrays.format_of(self.model, cache, kv)
            node = self._forest.node_of(handle, format, text)
            while (child := self._same_child(node, text, cache, format)) is not None:
                node = child
            if node.length < len(text):
                new = arrays.keys_and_values(cache, format, node.length, len(text))
                node = Node(text[node.length :].copy(), node, self._forest.hold(new))
            if not in_memory(node):
                node.snapshot = self._forest.hold(arrays.states(cache, format))
                node.used = self._forest.now
            handle = weakref.ref(node)
            self.trim_to(self.max_bytes, self.max_snapshots)
        if self.disk is not None:
            self.disk.wake()
        return handle

    def trim_to(self, n_bytes: int, n_snapshots: int | None = None) -> None:
        """Evict the snapshots that save the least prefill for their bytes, until this much is left in memory."""
        with self._lock:
            self._forest.trim_to(n_bytes, n_snapshots)

    @property
    def nbytes(self) -> int:
        """In memory."""
        return self._forest.nbytes

    @property
    def n_snapshots(self) -> int:
        """In memory."""
        with self._lock:
            return sum(map(in_memory, self._forest.nodes()))

    def _check_model(self) -> None:
        if (key := self.model.fingerprint()) != self._key:
            self._key = key
            self._files.forget()

    def _same_child(self, node: Node, text: Tokens, cache: Any, format: Format) -> Node | None:
        """The child with the text's next tokens and equal arrays: rounding differs if a text was prefilled in other chunks."""
        for child in node.next(text):
            new = arrays.keys_and_values(cache, format, child.begin, child.length)
            # Read from its file, but not kept in memory: it may differ.
            stored = child.span.arrays or self._files.read(child, child.span, format)
            if stored is not None and arrays.are_equal(stored, new):
                return child
        return None

    def _restore(self, format: Format, node: Node, text: Tokens) -> list[Any] | None:
        """A prompt cache that ends at a node's snapshot; ``None`` if a file of it is no longer there or damaged."""
        (_, snapshot), *path = parts = _parts(node)
        if not self._files.load_all(parts, format):
            return None
        node.used, node.uses = self._forest.now, node.uses + 1
        self.counts.hits += 1
        self.counts.tokens += node.length
        if self.disk is not None:
            self.disk.touch([stored.name for _, stored in parts if stored.name is not None])
        spans = [stored.arrays for _, stored in path]
        entries = arrays.make_cache(self.model, format, text[: node.length], spans, snapshot.arrays)
        self.trim_to(self.max_bytes, self.max_snapshots)  # the arrays read from disk take memory as well
        return entries

    def _load_text(self, text: Tokens, kv: KVOptions | None) -> None:
        with self._lock:
            self._check_model()
            self._files.read_index(kv)
            if (found := self._forest.deepest(text, kv)) is None:
                return
            format, node = found
            node.used = self._forest.now  # it stays until it is fetched
            parts = _parts(node)
        self._files.load_all(parts, format)
        self.trim_to(self.max_bytes, self.max_snapshots)


def _parts(node: Node) -> list[tuple[Node, StoredArrays]]:
    """The parts of a prompt cache that ends at a node's snapshot: the snapshot, and the spans from the first on."""
    assert node.snapshot is not None
    return [(node, node.snapshot), *((n, n.span) for n in node.path()[1:])]


def _quantized(kv: KVOptions | None) -> KVOptions | None:
    """``None`` where keys and values are not quantized."""
    return None if kv is None or kv.kv_bits is None else kv
