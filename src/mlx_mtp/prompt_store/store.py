"""Prefixes of texts that were read before, in memory and on disk."""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..models.prompt_cache import make_prompt_cache, open_prompt_cache
from ..models.single import KVOptions
from . import arrays
from .arrays import Arrays, Format
from .disk_writer import FLUSH, DiskWriter, PendingWrite, key_of
from .eviction import Candidate, score
from .memory import cache_budget
from .shared_folder import Entry, Outcome, SharedFolder
from .tree import Node, StoredArrays, Tokens

MAX_DISK_BYTES = 64 * 10**9
MAX_HOURLY_BYTES = 32 * 10**9  # written to disk, which wears
Handle = weakref.ref[Node]  # to where a text was read; it keeps nothing in memory


class Prefix(NamedTuple):
    """A stored prefix of a text.

    Args:
        prompt_cache (List[Any]): The caller's own.
        n_tokens (int): The number of tokens in it; 0 if nothing is stored.
        handle (Handle, optional): Where it is stored, for ``insert``; ``None`` if nothing is.
    """

    prompt_cache: list[Any]
    n_tokens: int
    handle: Handle | None


@dataclass
class Counts:
    """What a store has done.

    Args:
        fetches (int): Texts that were looked up.
        hits (int): Those of which a prefix was found.
        tokens (int): The tokens of these prefixes.
    """

    fetches: int = 0
    hits: int = 0
    tokens: int = 0


class PromptStore:
    """Prompt caches of the texts that a model has read, each part of a text once.

    A text is inserted wherever it may part from others: there it gets a snapshot, from which any text with this beginning is
    resumed. What is fetched is bit for bit what was inserted. Any thread may call any method.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``. With other weights, as those of an adapter, the store begins anew.
        max_bytes (int, optional): The most memory to hold. Default: ``None``, half of what the model leaves of the memory that
          the device recommends to use.
        max_snapshots (int, optional): The most snapshots in memory. Default: ``None``, any number.
        folder (Union[str, Path], optional): Where texts are kept beyond the process; several processes may share it. It is
          written behind: ``close`` the store to have the ends of all texts there. Default: ``None``.
        max_disk_bytes (int): The most that the folder may hold.
        max_hourly_bytes (int): The most that may be written there in an hour.

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
        self.max_bytes = cache_budget(model) if max_bytes is None else max_bytes
        self.max_snapshots = max_snapshots
        self.counts = Counts()
        self._lock = threading.RLock()
        self._key = model.fingerprint()
        self._clear()
        self.disk: DiskWriter | None = None
        if folder is not None:
            self.disk = DiskWriter(
                SharedFolder(Path(folder).expanduser(), max_disk_bytes, max_hourly_bytes),
                self._next_write,
                self._on_written,
            )

    def close(self, seconds: float = FLUSH) -> None:
        """Write what is left to disk, as far as it takes no longer than this, and forget all texts."""
        if self.disk is not None:
            self.disk.close(seconds)
            self.disk = None
        with self._lock:
            self._clear()

    def __enter__(self) -> "PromptStore":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def fetch(self, tokens: Sequence[int], kv: KVOptions | None = None) -> Prefix:
        """The longest prefix that the text can be resumed from.

        Args:
            tokens (Sequence[int]): The text. To generate, leave out the last token, which generation begins with.
            kv (KVOptions, optional): How keys and values are quantized. Default: ``None``, they are not.
        """
        text, kv = np.asarray(tokens, np.int64), _quantized(kv)
        with self._lock:
            self._check_model()
            self._now += 1
            self.counts.fetches += 1
            self._read_index(kv)
            while (found := self._deepest(text, kv)) is not None:
                entries = self._restore(*found, text)
                if entries is not None:
                    return Prefix(entries, found[1].length, weakref.ref(found[1]))
            return Prefix(make_prompt_cache(self.model), 0, None)

    def load(self, tokens: Sequence[int], kv: KVOptions | None = None) -> None:
        """Have in memory what ``fetch`` will need of this text. While files are read, other threads go on.

        Args:
            tokens (Sequence[int]): As in ``fetch``.
            kv (KVOptions, optional): As in ``fetch``.
        """
        if (disk := self.disk) is not None:
            disk.reader.submit(self._load_text, np.asarray(tokens, np.int64), _quantized(kv)).result()

    def n_common(self, tokens: Sequence[int]) -> int:
        """How many tokens the text has in common with any that is held: where it parts from them, others may as well."""
        text = np.asarray(tokens, np.int64)
        with self._lock:
            self._check_model()
            nodes = (node for root in self._roots.values() for node in root.prefixes(text))
            return max((node.common(text) for node in nodes), default=0)

    def insert(
        self, tokens: Sequence[int], prompt_cache: list[Any], kv: KVOptions | None = None, handle: Handle | None = None
    ) -> Handle | None:
        """Keep what is new in a prompt cache, with a snapshot at its end.

        Args:
            tokens (Sequence[int]): All of the tokens in the cache. A number below 0 stands for a part of an image.
            prompt_cache (List[Any]): Of this model, with no generation open on it. It is left as it is.
            kv (KVOptions, optional): As in ``fetch``.
            handle (Handle, optional): Of ``fetch``, or of an insertion of the same cache before: up to there, nothing is
              compared. Default: ``None``, the whole cache is compared with what is stored.

        Returns:
            Optional[Handle]: For the next call; ``None`` for no tokens.

        Raises:
            ValueError: It is another model's, or not of these tokens.
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
            node = self._node_of(handle, format, text)
            while (child := self._same_child(node, text, cache, format)) is not None:
                node = child
            if node.length < len(text):
                node = self._add(node, text[node.length :], arrays.rows(cache, format, node.length, len(text)))
            if not _in_memory(node):
                node.snapshot = self._held(arrays.states(cache, format))
                node.used = self._now
            handle = weakref.ref(node)
            self.trim_to(self.max_bytes, self.max_snapshots)
        if self.disk is not None:
            self.disk.wake()
        return handle

    def trim_to(self, n_bytes: int, n_snapshots: int | None = None) -> None:
        """Give up what is worth least, until this much is left."""
        with self._lock:
            if self.nbytes > n_bytes:
                self._free([n for root in self._roots.values() for n in _needless(root)])
            held = [node for node in self._nodes() if _in_memory(node)]
            n_most = len(held) if n_snapshots is None else n_snapshots
            while held and (self.nbytes > n_bytes or len(held) > n_most):
                least = min(held, key=self._score)
                held.remove(least)
                self._evict(least)

    @property
    def n_snapshots(self) -> int:
        """Those in memory."""
        with self._lock:
            return sum(map(_in_memory, self._nodes()))

    def _clear(self) -> None:
        self._roots: dict[Format, Node] = {}
        self._now = 0  # in requests
        self.nbytes = 0  # in memory
        self._spans: dict[str, Node] = {}  # on disk, by the file
        self._keys: dict[Format, str] = {}
        self._last_entry: dict[Format, int] = {}  # of the index that was read

    def _check_model(self) -> None:
        if (key := self.model.fingerprint()) != self._key:
            self._key = key
            self._clear()

    def _nodes(self) -> Iterator[Node]:
        """All but the roots."""
        for root in self._roots.values():
            yield from (node for node in root.subtree() if node is not root)

    def _root(self, format: Format) -> Node:
        if format not in self._roots:
            self._roots[format] = Node(np.zeros(0, np.int64), None, StoredArrays({}, 0))
        return self._roots[format]

    # Find

    def _deepest(self, text: Tokens, kv: KVOptions | None) -> tuple[Format, Node] | None:
        """The snapshot to resume a text from. At the same length, the head's rows and the one that was used last."""
        best: tuple[Format, Node] | None = None
        for format, root in self._roots.items():
            if format.kv not in (None, kv):
                continue
            # What is not quantized yet serves both.
            end = kv.quantized_kv_start - 1 if kv is not None and format.kv is None else len(text)
            for node in root.prefixes(text[: max(end, 0)]):
                if node.snapshot is not None and (best is None or _rank(format, node) > _rank(*best)):
                    best = format, node
        return best

    def _node_of(self, handle: Handle | None, format: Format, text: Tokens) -> Node:
        """The node of a handle, or the root: above it, the cache's rows are the tree's."""
        root = self._root(format)
        node = None if handle is None else handle()
        if node is None or node.length > len(text):
            return root
        path = node.path()
        is_prefix = np.array_equal(np.concatenate([n.tokens for n in path]), text[: node.length])
        return node if path[0] is root and is_prefix else root

    def _same_child(self, node: Node, text: Tokens, cache: Any, format: Format) -> Node | None:
        """The child that holds the text's next tokens, read alike. Rounding may differ where a text was cut elsewhere."""
        for child in node.next(text):
            rows = arrays.rows(cache, format, child.begin, child.length)
            stored = child.span.arrays or self._read(child, child.span, format)  # of one that differs, nothing is held
            if stored is not None and arrays.are_equal(stored, rows):
                return child
        return None

    def _restore(self, format: Format, node: Node, text: Tokens) -> list[Any] | None:
        """A prompt cache that ends at a node's snapshot; ``None`` if a file of it is no longer there or damaged."""
        (_, snapshot), *path = pieces = _pieces(node)
        if not self._load_all(pieces, format):
            return None
        node.used, node.uses = self._now, node.uses + 1
        self.counts.hits += 1
        self.counts.tokens += node.length
        if self.disk is not None:
            self.disk.touch([piece.name for _, piece in pieces if piece.name is not None])
        spans = [piece.arrays for _, piece in path]
        entries = arrays.make_cache(self.model, format, text[: node.length], spans, snapshot.arrays)
        self.trim_to(self.max_bytes, self.max_snapshots)  # what was read from disk is held as well
        return entries

    # On disk

    def _read_index(self, kv: KVOptions | None) -> None:
        """Add what this process or another one has written since."""
        if self.disk is None:
            return
        for format in {Format(quantized, head) for quantized in (None, kv) for head in (True, False)}:
            for entry in self.disk.entries(self._key_of(format), self._last_entry.get(format, 0)):
                self._last_entry[format] = entry.id
                self._add_entry(self._root(format), entry)

    def _load_text(self, text: Tokens, kv: KVOptions | None) -> None:
        with self._lock:
            self._check_model()
            self._read_index(kv)
            if (found := self._deepest(text, kv)) is None:
                return
            format, node = found
            node.used = self._now  # it stays until it is fetched
            pieces = _pieces(node)
        self._load_all(pieces, format)
        self.trim_to(self.max_bytes, self.max_snapshots)

    def _add_entry(self, root: Node, entry: Entry) -> None:
        parent = self._spans.get(entry.parent, None if entry.parent else root)
        if parent is None or entry.name in self._spans:
            return
        piece = StoredArrays(None, entry.nbytes, entry.name)
        if entry.tokens is not None:
            self._spans[entry.name] = Node(np.frombuffer(entry.tokens, np.int64), parent, piece)
        elif parent.snapshot is None:
            parent.snapshot = piece

    def _key_of(self, format: Format) -> str:
        if format not in self._keys:
            self._keys[format] = key_of(self.model, format)
        return self._keys[format]

    def _load_all(self, pieces: list[tuple[Node, StoredArrays]], format: Format) -> bool:
        """Have a prompt cache's pieces in memory, or none that is of no other use -> whether that was possible."""
        if all(self._load(node, piece, format) for node, piece in pieces):
            return True
        with self._lock:
            for node, _ in pieces[::-1]:
                if node.parent is not None and not _in_memory(node):
                    self._free(_only_for(node))
        return False

    def _load(self, node: Node, stored: StoredArrays, format: Format) -> bool:
        """Have a node's span or snapshot in memory -> whether that was possible."""
        if stored.in_memory:
            return True
        found = self._read(node, stored, format)
        with self._lock:
            # Other threads may have loaded it meanwhile, or given up its node.
            is_there = node.path()[0] in self._roots.values() and stored in (node.span, node.snapshot)
            if is_there and not stored.in_memory and found is not None:
                stored.arrays, stored.nbytes = found, arrays.nbytes(found)
                self.nbytes += stored.nbytes
            return is_there and stored.in_memory

    def _read(self, node: Node, stored: StoredArrays, format: Format) -> Arrays | None:
        """The arrays of a node's span or snapshot in its file. One that is gone or damaged leaves the tree."""
        disk, above, name = self.disk, node.parent, stored.name
        if disk is None or above is None or name is None:
            return None
        is_span = stored is node.span
        parent = (above.span.name or "") if is_span else node.span.name or ""
        found = disk.read(name, self._key_of(format), parent, node.tokens if is_span else None)
        if found is None:
            with self._lock:
                if (
                    node.path()[0] in self._roots.values()
                    and stored in (node.span, node.snapshot)
                    and not stored.in_memory
                ):
                    if is_span:
                        self._remove_below(node)
                    else:
                        node.snapshot = None
        return found

    def _remove_below(self, top: Node) -> None:
        """Take a node and all below it out of the tree."""
        for node in [*top.subtree()][::-1]:
            for piece in (node.span, node.snapshot):
                if piece is not None and piece.in_memory:
                    self.nbytes -= piece.nbytes
            self._spans.pop(node.span.name or "", None)
            node.remove()

    def _next_write(self, is_last: bool) -> PendingWrite | None:
        """What to write next: a snapshot that is worth it, after the spans above it."""
        with self._lock:
            waiting = [n for n in self._nodes() if n.snapshot is not None and n.snapshot.name is None]
            for node in sorted(waiting, key=lambda n: -n.used):
                assert node.snapshot is not None
                if node.snapshot.refused or not (_is_worth_writing(node) or (is_last and not node.children)):
                    continue
                root, *path = node.path()
                format = next(f for f, r in self._roots.items() if r is root)
                above = next((n for n in path if n.span.name is None), None)
                last, stored, parent = (
                    (node, node.snapshot, node) if above is None else (above, above.span, above.parent)
                )
                assert parent is not None
                if not stored.refused:
                    tokens = None if above is None else above.tokens
                    return PendingWrite(
                        last, stored, stored.arrays, tokens, self._key_of(format), parent.span.name or ""
                    )
            return None

    def _on_written(self, write: PendingWrite, outcome: Outcome, name: str) -> None:
        with self._lock:
            if write.node.path()[0] not in self._roots.values():
                return  # it was given up meanwhile
            is_span = write.tokens is not None
            if outcome in (Outcome.WRITTEN, Outcome.THERE):
                write.stored.name = name
                if is_span:
                    self._spans.setdefault(name, write.node)
            elif outcome in (Outcome.NO_SPACE, Outcome.FAILED):
                write.stored.refused = True
            else:
                above = write.node.parent if is_span else write.node
                assert above is not None  # no root is written
                self._not_on_disk(above)

    def _not_on_disk(self, node: Node) -> None:
        """The file of a node's span was dropped: write it again, if it is in memory."""
        if node.parent is None:
            return
        if not node.span.in_memory:
            self._remove_below(node)
            return
        self._spans.pop(node.span.name or "", None)
        node.span.name = None
        if node.snapshot is not None:
            node.snapshot.name = None
            if not node.snapshot.in_memory:
                node.snapshot = None

    # Hold and give up

    def _add(self, parent: Node, tokens: Tokens, rows: Arrays) -> Node:
        return Node(tokens.copy(), parent, self._held(rows))

    def _held(self, new: Arrays) -> StoredArrays:
        own = arrays.copied(new)
        piece = StoredArrays(own, arrays.nbytes(own))
        self.nbytes += piece.nbytes
        return piece

    def _score(self, node: Node) -> float:
        assert node.snapshot is not None
        n_bytes = node.snapshot.nbytes + sum(n.span.nbytes for n in _only_for(node))
        on_disk = node.snapshot.name is not None
        n_tokens = node.length - _above(node, lambda n: n.snapshot is not None).length
        return score(Candidate(n_tokens, n_bytes, self._now - node.used, node.uses, on_disk))

    def _evict(self, node: Node) -> None:
        """Free a snapshot, and the spans that no other one needs."""
        assert node.snapshot is not None
        spare = _only_for(node)
        self.nbytes -= node.snapshot.nbytes
        node.snapshot.arrays = None
        if node.snapshot.name is None:
            node.snapshot = None
        self._free(spare)

    def _free(self, spare: list[Node]) -> None:
        """Free the spans of these nodes, the lowest first."""
        for n in spare:
            self.nbytes -= n.span.nbytes
            n.span.arrays = None
            if n.span.name is None:
                self._remove_below(n)


def _pieces(node: Node) -> list[tuple[Node, StoredArrays]]:
    """What a prompt cache that ends at a node's snapshot is made of: the snapshot, and the spans from the first on."""
    assert node.snapshot is not None
    return [(node, node.snapshot), *((n, n.span) for n in node.path()[1:])]


def _quantized(kv: KVOptions | None) -> KVOptions | None:
    """``None`` where keys and values are not quantized."""
    return None if kv is None or kv.kv_bits is None else kv


def _in_memory(node: Node) -> bool:
    return node.snapshot is not None and node.snapshot.in_memory


def _rank(format: Format, node: Node) -> tuple[int, bool, int]:
    return node.length, format.head, node.used


def _above(node: Node, is_meant: Callable[[Node], bool]) -> Node:
    """The next node above for which this is so, or the root."""
    return next(n for n in node.path()[-2::-1] if n.parent is None or is_meant(n))


def _only_for(node: Node) -> list[Node]:
    """The nodes whose spans are in memory for this one's snapshot alone, the lowest first."""
    found: list[Node] = []
    n: Node | None = node
    while n is not None and n.parent is not None and all(c in found or not c.span.in_memory for c in n.all_children()):
        if not n.span.in_memory or (n is not node and _in_memory(n)):
            break
        found.append(n)
        n = n.parent
    return found


def _needless(root: Node) -> list[Node]:
    """The nodes whose spans are in memory for no snapshot, the lowest first: it was given up while they were loaded."""
    needed = {id(n) for node in root.subtree() if _in_memory(node) for n in node.path()}
    return [n for n in [*root.subtree()][::-1] if n is not root and n.span.in_memory and id(n) not in needed]


def _is_worth_writing(node: Node) -> bool:
    """Whether a snapshot saves more than its bytes would as keys and values: so disk grows with the tokens alone.

    Where texts part, and where one was resumed twice, others will be.
    """
    assert node.snapshot is not None
    above = _above(node, lambda n: n.snapshot is not None and n.snapshot.name is not None)
    n_bytes = (node.length - above.length) * node.span.nbytes / len(node.tokens)
    return n_bytes >= node.snapshot.nbytes or node.uses > 1 or sum(map(len, node.children.values())) > 1
