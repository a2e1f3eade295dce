"""The files of a store: the spans and snapshots in them, how they are read, and which to write next."""

import threading
from typing import Any

import numpy as np

from ..caches.single import KVOptions
from .arrays import Arrays, Format
from .disk_writer import DiskWriter, PendingWrite, key_of
from .forest import Forest, above, in_memory, only_for
from .shared_folder import Entry, Outcome, SharedFolder
from .tree import Node, StoredArrays


class Files:
    """
    Attributes:
        disk (DiskWriter, optional): ``None`` for a store without a folder.
    """

    def __init__(self, model: Any, forest: Forest, lock: "threading.RLock"):
        self.model, self.forest, self._lock = model, forest, lock
        self.disk: DiskWriter | None = None
        self._keys: dict[Format, str] = {}
        self._last_entry: dict[Format, int] = {}  # the number of the last entry of the index that was read

    def open(self, folder: SharedFolder) -> None:
        self.disk = DiskWriter(folder, self.next_write, self.on_written)

    def forget(self) -> None:
        """Forget the forest and the files."""
        self.forest.clear()
        self._keys, self._last_entry = {}, {}

    def key_of(self, format: Format) -> str:
        """The name of the model with a format in the index."""
        if format not in self._keys:
            self._keys[format] = key_of(self.model, format)
        return self._keys[format]

    def read_index(self, kv: KVOptions | None) -> None:
        """Add the files that any process has written since the last call."""
        if self.disk is None:
            return
        for format in {Format(quantized, head) for quantized in (None, kv) for head in (True, False)}:
            for entry in self.disk.entries(self.key_of(format), self._last_entry.get(format, 0)):
                self._last_entry[format] = entry.id
                _add_entry(self.forest, format, entry)

    def load_all(self, parts: list[tuple[Node, StoredArrays]], format: Format) -> bool:
        """Load the parts of a prompt cache into memory, or free the unneeded ones Return whether all are in memory."""
        if all(self._load(node, stored, format) for node, stored in parts):
            return True
        with self._lock:
            for node, _ in parts[::-1]:
                if node.parent is not None and not in_memory(node):
                    self.forest.free(only_for(node))
        return False

    def _load(self, node: Node, stored: StoredArrays, format: Format) -> bool:
        """Load a node's span or snapshot into memory if needed. Return whether it is in memory."""
        if stored.in_memory:
            return True
        found = self.read(node, stored, format)
        with self._lock:
            is_there = self._has(node, stored)
            if is_there and not stored.in_memory and found is not None:
                self.forest.put(stored, found)
            return is_there and stored.in_memory

    def _has(self, node: Node, stored: StoredArrays) -> bool:
        """Whether a span or snapshot is still in the forest: another thread may have removed it."""
        return node in self.forest and stored in (node.span, node.snapshot)

    def read(self, node: Node, stored: StoredArrays, format: Format) -> Arrays | None:
        """Read the arrays of a span or snapshot from its file. Without a sound file, it is removed from the forest."""
        disk, above, name = self.disk, node.parent, stored.name
        if disk is None or above is None or name is None:
            return None
        is_span = stored is node.span
        parent = (above.span.name or "") if is_span else node.span.name or ""
        found = disk.read(name, self.key_of(format), parent, node.tokens if is_span else None)
        if found is None:
            with self._lock:
                if self._has(node, stored) and not stored.in_memory and is_span:
                    self.forest.remove(node)
                elif self._has(node, stored) and not stored.in_memory:
                    node.snapshot = None
        return found

    def next_write(self, is_last: bool) -> PendingWrite | None:
        """The next span or snapshot to write: the spans above the most recently used snapshot worth writing, then the snapshot.

        Args:
            is_last (bool): Whether the store is being closed: then the ends of all texts are written as well.
        """
        with self._lock:
            return self._next_write(is_last)

    def _next_write(self, is_last: bool) -> PendingWrite | None:
        waiting = [node for node in self.forest.nodes() if node.snapshot is not None and node.snapshot.name is None]
        for node in sorted(waiting, key=lambda node: -node.used):
            assert node.snapshot is not None
            if node.snapshot.refused or not (_is_worth_writing(node) or (is_last and not node.children)):
                continue
            root, *path = node.path()
            key = self.key_of(next(format for format, r in self.forest.roots.items() if r is root))
            span = next((n for n in path if n.span.name is None), None)  # the first span that is not on disk
            if span is None:
                return PendingWrite(node, node.snapshot, node.snapshot.arrays, None, key, node.span.name or "")
            assert span.parent is not None
            if not span.span.refused:
                return PendingWrite(span, span.span, span.span.arrays, span.tokens, key, span.parent.span.name or "")
        return None

    def on_written(self, write: PendingWrite, outcome: Outcome, name: str) -> None:
        """Record the outcome of a write and the file's name."""
        with self._lock:
            if write.node not in self.forest:
                return  # it was evicted in the meantime
            is_span = write.tokens is not None
            if outcome in (Outcome.WRITTEN, Outcome.THERE):
                write.stored.name = name
                if is_span:
                    self.forest.by_file.setdefault(name, write.node)
            elif outcome in (Outcome.NO_SPACE, Outcome.FAILED):
                write.stored.refused = True
            else:
                dropped = write.node.parent if is_span else write.node
                assert dropped is not None  # no root is written
                _not_on_disk(self.forest, dropped)


def _add_entry(forest: Forest, format: Format, entry: Entry) -> None:
    """Add a file of the index to the tree of its format."""
    parent = forest.by_file.get(entry.parent, None if entry.parent else forest.root(format))
    if parent is None or entry.name in forest.by_file:
        return
    stored = StoredArrays(None, entry.nbytes, entry.name)
    if entry.tokens is not None:
        forest.by_file[entry.name] = Node(np.frombuffer(entry.tokens, np.int64), parent, stored)
    elif parent.snapshot is None:
        parent.snapshot = stored


def _not_on_disk(forest: Forest, node: Node) -> None:
    """Handle the removal of the file of a node's span: it is written again if it is in memory."""
    if node.parent is None:
        return
    if not node.span.in_memory:
        forest.remove(node)
        return
    forest.by_file.pop(node.span.name or "", None)
    node.span.name = None
    if node.snapshot is not None:
        node.snapshot.name = None
        if not node.snapshot.in_memory:
            node.snapshot = None


def _is_worth_writing(node: Node) -> bool:
    """Whether to write a snapshot: its bytes are at most those of the keys and values since the snapshot on disk above it, so
    that disk use grows with tokens; or texts differ after it or were resumed from it twice, so that others may be as well.
    """
    assert node.snapshot is not None
    last = above(node, lambda n: n.snapshot is not None and n.snapshot.name is not None)
    n_bytes = (node.length - last.length) * node.span.nbytes / len(node.tokens)
    return n_bytes >= node.snapshot.nbytes or node.uses > 1 or sum(map(len, node.children.values())) > 1
