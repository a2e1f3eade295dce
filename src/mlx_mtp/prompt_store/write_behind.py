"""What of a store's trees is written next, and what is known of the files."""

from collections.abc import Callable

import numpy as np

from .arrays import Format
from .disk_writer import PendingWrite
from .forest import Forest, above
from .shared_folder import Entry, Outcome
from .tree import Node, StoredArrays


def add_entry(forest: Forest, format: Format, entry: Entry) -> None:
    """Add a file of the index to the tree of its format."""
    parent = forest.by_file.get(entry.parent, None if entry.parent else forest.root(format))
    if parent is None or entry.name in forest.by_file:
        return
    stored = StoredArrays(None, entry.nbytes, entry.name)
    if entry.tokens is not None:
        forest.by_file[entry.name] = Node(np.frombuffer(entry.tokens, np.int64), parent, stored)
    elif parent.snapshot is None:
        parent.snapshot = stored


def next_write(forest: Forest, key_of: Callable[[Format], str], is_last: bool) -> PendingWrite | None:
    """The span or snapshot to write next: of the snapshots that are worth it the one used last, after the spans above it.

    Args:
        key_of (Callable[[Format], str]): Says by what the index knows a format of the model.
        is_last (bool): Whether the store is being closed: then the ends of all texts are worth it.
    """
    waiting = [node for node in forest.nodes() if node.snapshot is not None and node.snapshot.name is None]
    for node in sorted(waiting, key=lambda node: -node.used):
        assert node.snapshot is not None
        if node.snapshot.refused or not (_is_worth_writing(node) or (is_last and not node.children)):
            continue
        root, *path = node.path()
        key = key_of(next(format for format, r in forest.roots.items() if r is root))
        span = next((n for n in path if n.span.name is None), None)  # the first that is not on disk
        if span is None:
            return PendingWrite(node, node.snapshot, node.snapshot.arrays, None, key, node.span.name or "")
        assert span.parent is not None
        if not span.span.refused:
            return PendingWrite(span, span.span, span.span.arrays, span.tokens, key, span.parent.span.name or "")
    return None


def settle(forest: Forest, write: PendingWrite, outcome: Outcome, name: str) -> None:
    """Note the outcome of a write, and the file's name."""
    if write.node not in forest:
        return  # it was given up meanwhile
    is_span = write.tokens is not None
    if outcome in (Outcome.WRITTEN, Outcome.THERE):
        write.stored.name = name
        if is_span:
            forest.by_file.setdefault(name, write.node)
    elif outcome in (Outcome.NO_SPACE, Outcome.FAILED):
        write.stored.refused = True
    else:
        dropped = write.node.parent if is_span else write.node
        assert dropped is not None  # no root is written
        _not_on_disk(forest, dropped)


def _not_on_disk(forest: Forest, node: Node) -> None:
    """The file of a node's span was dropped: write it again, if it is in memory."""
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
    """Whether a snapshot saves more than its bytes would as keys and values: so disk grows with the tokens alone.

    Where texts part, and where one was resumed twice, others will be.
    """
    assert node.snapshot is not None
    last = above(node, lambda n: n.snapshot is not None and n.snapshot.name is not None)
    n_bytes = (node.length - last.length) * node.span.nbytes / len(node.tokens)
    return n_bytes >= node.snapshot.nbytes or node.uses > 1 or sum(map(len, node.children.values())) > 1
