"""The store of prefilled prefixes, in memory and on disk."""

import logging
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..core.caches.prompt_cache import make_prompt_cache, open_prompt_cache
from ..core.caches.rows import KVOptions
from ..errors import MTPError
from ..files import MAX_DISK_BYTES
from ..memory import Account, check_device
from . import arrays
from .arrays import Format, Tokens
from .disk import FLUSH, READ_TIMEOUT, Disk, Folder, key_of
from .tree import Forest, Handle, Node, StoredArrays, is_whole

# Where a prompt is cut: at positions where later texts are likely to differ, so that they resume there
LAST = 4  # messages that end in a cut
LINE = 64  # tokens before a position where texts differ: others differ a little earlier, as with a two-digit hour
NEAR = 2 * LINE  # tokens after a cut within which another cut would save little
EVERY = 4096  # the most tokens between two cuts, which an edit in the middle costs at most
# The start of a message in the chat templates of these models: Qwen's and GLM's
OPENINGS = "<|im_start|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"
PREFIX = 2  # tokens before the first message in GLM's


class Prefix(NamedTuple):
    prompt_cache: list[Any]  # the caller may change it
    n_tokens: int  # in it; 0 if nothing is stored
    handle: Handle | None  # for ``insert``; None if nothing is stored


class PromptStore(AbstractContextManager["PromptStore"]):
    """Prompt caches of texts; common prefixes are stored once.

    A text is inserted at each position where others may diverge from it, with a snapshot from which any text with this prefix
    can resume. Fetched arrays equal the inserted ones bit for bit. All methods are thread-safe.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``. With other weights, such as those of an adapter, the store starts empty.
        max_bytes (int, optional): The maximum memory. Default: ``None``, half of the memory that is left of MLX's limit on this
          machine.
        max_snapshots (int, optional): The maximum number of snapshots in memory. Default: ``None``, any number.
        folder (Union[str, Path, Folder], optional): A folder for texts that outlive the process. It has one owner: if another
          process uses it, the store warns, and is in memory alone. It is written in the background: ``close`` the store to
          write the ends of all texts. Several stores of a process can share a ``Folder``. Default: ``None``.
        max_disk_bytes (int): The maximum size of the folder.

    Raises:
        MTPError: mlx-lm runs the model, without drafts.
        OSError: The folder cannot be used.
    """

    def __init__(
        self,
        model: Any,
        max_bytes: int | None = None,
        max_snapshots: int | None = None,
        *,
        folder: str | Path | Folder | None = None,
        max_disk_bytes: int = MAX_DISK_BYTES,
    ):
        if not hasattr(model, "fingerprint"):
            raise MTPError("A prompt store requires drafts: load the model with its head or with copy_drafts=True.")
        self.model = model
        self.max_bytes = Account().cache_budget if max_bytes is None else max_bytes
        self.max_snapshots = max_snapshots
        self._lock = threading.RLock()  # nothing waits for the disk while holding it
        self._forest = Forest()
        self._fingerprint = model.fingerprint()
        self.disk: Disk | None = None  # the threads that write and read the folder
        if isinstance(folder, str | Path):
            folder = open_folder(Path(folder), max_disk_bytes)
        if folder is not None:
            self.disk = Disk(folder, self._forest, self._lock)

    def close(self, seconds: float = FLUSH) -> None:
        """Write the rest to disk, for at most this time and 5 seconds for the last file, and drop all texts."""
        if self.disk is not None:
            self.disk.close(seconds)
            self.disk = None
        with self._lock:
            self._forest.clear()

    def __exit__(self, *_: Any) -> None:
        self.close()

    def fetch(self, tokens: Sequence[int], kv: KVOptions | None = None, timeout: float = READ_TIMEOUT) -> Prefix:
        """The longest prefix that the text can be resumed from.

        Args:
            tokens (Sequence[int]): The text. To generate, omit the last token, with which generation begins.
            kv (KVOptions, optional): How keys and values are quantized. Default: ``None``, they are not.
            timeout (float): As of ``load``, which it calls; 0 for what is in memory alone.
        """
        if timeout > 0:
            self.load(tokens, kv, timeout)
        text = np.asarray(tokens, np.int64)
        kv = _quantized(kv)
        with self._lock:
            self._prepare(kv)
            self._forest.now += 1
            if (found := self._forest.deepest(text, kv, is_whole)) is None:
                return Prefix(make_prompt_cache(self.model), 0, None)
            format, node = found
            snapshot, *spans = (stored for _, stored in _parts(node))
            node.used = self._forest.now
            node.uses = node.uses + 1
            held = [span.arrays for span in spans]
            entries = arrays.make_cache(self.model, format, text[: node.length], held, snapshot.arrays)
        if self.disk is not None:
            self.disk.wake([snapshot, *spans[::-1]])
        return Prefix(entries, node.length, weakref.ref(node))

    def load(self, tokens: Sequence[int], kv: KVOptions | None = None, timeout: float = READ_TIMEOUT) -> None:
        """Read the files that ``fetch`` will need for this text into memory, without blocking other threads.

        Args:
            timeout (float): Seconds to wait for each file. After that the text is as good as not on disk.
        """
        text = np.asarray(tokens, np.int64)
        kv = _quantized(kv)
        disk = self.disk
        if disk is not None and self._first_missing(text, kv) is not None:
            disk.in_reader(lambda: self._load(disk, text, kv), timeout)

    def n_common(self, tokens: Sequence[int]) -> int:
        """The number of tokens that the text has in common with a stored one: later texts may differ there as well."""
        text = np.asarray(tokens, np.int64)
        with self._lock:
            self._prepare(None)
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
            MTPError: The cache belongs to another model, or to other tokens.
            RuntimeError: A pass has failed on the GPU. The texts in memory are dropped, and nothing is written.
        """
        text = np.asarray(tokens, np.int64)
        kv = _quantized(kv)
        with self._lock:
            self._prepare(kv)
            cache = open_prompt_cache(self.model, list(prompt_cache))
            if cache.n_tokens != len(text):
                raise MTPError(f"The prompt cache is of {cache.n_tokens} tokens, not of these {len(text)}.")
            if len(text) == 0:
                return None
            format = arrays.format_of(self.model, cache, kv)
            node = self._forest.node_of(handle, format, text)
            while (child := self._same_child(node, text, cache, format)) is not None:
                node = child
            if node.length < len(text):
                new = arrays.keys_and_values(cache, format, node.length, len(text))
                node = Node(text[node.length :].copy(), node, self._forest.hold(new))
            if not node.snapshot.in_memory:
                node.snapshot = self._forest.hold(arrays.states(cache, format))
                node.used = self._forest.now
            try:
                check_device()  # before another thread writes what the device was to compute
            except RuntimeError:
                self._forest.clear()
                raise
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

    def _prepare(self, kv: KVOptions | None) -> None:
        """Start again if the model's weights have changed, and add the files of these formats to the forest, once."""
        if (fingerprint := self.model.fingerprint()) != self._fingerprint:
            self._fingerprint = fingerprint
            self._forest.clear()
        if self.disk is not None:
            for format in (Format(quantized, head) for quantized in {None, kv} for head in (True, False)):
                if format not in self._forest.keys:
                    key = self._forest.keys[format] = key_of(self.model, format)
                    self._forest.add_files(format, self.disk.folder.of(key))

    def _same_child(self, node: Node, text: Tokens, cache: Any, format: Format) -> Node | None:
        """The child with the text's next tokens and equal arrays: rounding differs if a text was prefilled in other chunks."""
        for child in node.next(text):
            new = arrays.keys_and_values(cache, format, node.length, child.length)
            # One that is on disk alone is not read: if it is equal, both have the same file.
            if child.span.in_memory and arrays.are_equal(child.span.arrays, new):
                return child
        return None

    def _first_missing(self, text: Tokens, kv: KVOptions | None) -> tuple[Node, StoredArrays] | None:
        """The next part to read from disk for a text: the snapshot that ends the longest prefix, and then its spans."""
        with self._lock:
            self._prepare(kv)
            found = self._forest.deepest(text, kv, lambda node: node.snapshot.exists)
            if found is None:
                return None
            found[1].used = self._forest.now  # it stays until it is fetched
            return next(((node, stored) for node, stored in _parts(found[1]) if not stored.in_memory), None)

    def _load(self, disk: Disk, text: Tokens, kv: KVOptions | None) -> None:
        """In the reader: read what is missing of a text, each part once."""
        seen = set()
        while (part := self._first_missing(text, kv)) is not None and id(part[1]) not in seen:
            node, stored = part
            seen.add(id(stored))
            found = disk.read(stored)
            with self._lock:
                is_there = node in self._forest and stored in (node.span, node.snapshot) and not stored.in_memory
                if is_there and found is not None:
                    self._forest.put(stored, found)
                elif is_there and stored is node.span:
                    self._forest.remove(node)
                elif is_there:
                    stored.name = None
        self.trim_to(self.max_bytes, self.max_snapshots)


def open_folder(path: Path, max_bytes: int) -> Folder | None:
    """Open a folder for one or more stores. If another process uses it, warn and return ``None``."""
    try:
        return Folder(path, max_bytes)
    except BlockingIOError as e:
        logging.warning(f"{e} Prompts are kept in memory alone.")
        return None


def _parts(node: Node) -> list[tuple[Node, StoredArrays]]:
    """The parts of a prompt cache that ends at a node's snapshot: the snapshot, and the spans from the first on."""
    return [(node, node.snapshot), *((n, n.span) for n in node.path()[1:])]


def _quantized(kv: KVOptions | None) -> KVOptions | None:
    """``None`` where keys and values are not quantized."""
    return None if kv is None or kv.kv_bits is None else kv


def cuts_of(tokenizer: TokenizerWrapper, tokens: Sequence[int], n_common: int) -> list[int]:
    """The numbers of tokens after which to insert the cache of a prompt into a store with this ``n_common``, in order."""
    openings = [mark for mark in OPENINGS if mark in str(tokenizer.chat_template)]
    marks = [tokenizer.encode(mark, add_special_tokens=False) for mark in openings]
    return choose_cuts([end for mark in marks for end in message_ends(tokens, mark)], len(tokens), n_common)


def message_ends(tokens: Sequence[int], opening: Sequence[int]) -> list[int]:
    """The positions where messages end and the next one begins, by the tokens of one of the ``OPENINGS``."""
    text = np.asarray(tokens)
    n = len(opening)
    if n == 0 or len(text) < n:
        return []
    opens = np.lib.stride_tricks.sliding_window_view(text, n) == np.asarray(opening)
    return [int(i) for i in np.nonzero(opens.all(axis=1))[0] if i > PREFIX]


def choose_cuts(ends: Iterable[int], n_tokens: int, n_common: int = 0, every: int = EVERY) -> list[int]:
    """The positions at which to cut a prompt, given the ends of its messages and where it differs from stored texts."""
    known = sorted({end for end in ends if 0 < end < n_tokens}) or [n_tokens - 1] * (n_tokens > 1)
    wanted = {*(known[1:] or known)[-LAST:]}
    # A line before the end of the system message, which often has the date, and before the place where other texts may differ
    for place in (*known[:1], n_common):
        if place < n_tokens and all(not 0 <= place - cut < NEAR for cut in (0, *wanted)):
            wanted.add(place - LINE)
    cuts = [0]  # at least one token follows each: generation begins with it
    for end in sorted(wanted):
        while end - cuts[-1] > every:
            within = [e for e in known if cuts[-1] < e <= cuts[-1] + every]
            cuts.append(within[-1] if within else cuts[-1] + every)
        if end > cuts[-1]:
            cuts.append(end)
    return cuts[1:]
