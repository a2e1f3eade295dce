"""The trees of a store, one for each format of prompt caches: their texts, the memory of their arrays, and eviction.

    root ── "system, tools" ─┬─ "first question" ── "answer" ── "second question"
                 c           │         c               c               c
                             └─ "another question" ── "answer"
                                       c                 c

A node has the tokens between two cuts, at which the prefill of a text paused, and a snapshot (c), from which a text can be
resumed. Two texts share the nodes above the token at which they differ. Nodes are never split: keys and values depend,
by rounding, on the chunks in which they were prefilled.

The snapshot whose bytes save the least prefill is evicted first. Evicting the end of a text frees its keys and values as well.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..core.caches.prompt_cache import evaluate
from ..core.caches.rows import KVOptions
from . import arrays
from .arrays import Arrays, Format, Tokens

ON_DISK = 0.1  # the time to read a text's arrays from disk, as a share of the time to prefill it


class File(NamedTuple):
    name: str  # the digest of its bytes
    model: str  # the model's name, see ``key_of``
    parent: str  # the file of the span above a span, or of a snapshot's own span; empty for none
    tokens: Tokens | None  # of a span, [n]; None for a snapshot
    nbytes: int


@dataclass(eq=False)
class StoredArrays:
    """Arrays in memory, in a file, in both, or in neither."""

    arrays: Any  # a dictionary of arrays; None if they are not in memory
    nbytes: int
    name: str | None = None  # of the file
    refused: bool = False  # there is no space for it on disk

    @property
    def in_memory(self) -> bool:
        return self.arrays is not None

    @property
    def exists(self) -> bool:
        return self.in_memory or self.name is not None


class Node:
    """A part of a text: its tokens [n], and their keys and values. The root has no parent."""

    def __init__(self, tokens: Tokens, parent: "Node | None", span: StoredArrays):
        self.tokens = tokens
        self.parent = parent
        self.span = span
        self.snapshot = StoredArrays(None, 0)  # the states after its last token
        self.children: list[Node] = []
        self.used = self.uses = 0  # the time at which its snapshot was last used, in requests, and how often it was
        self.length: int = len(tokens)  # from the root to its end
        if parent is not None:
            self.length += parent.length
            parent.children.append(self)

    def path(self) -> "list[Node]":
        nodes = [self]
        node = self.parent
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def next(self, tokens: Tokens) -> "list[Node]":
        """The children whose tokens a text has next, if it begins with this node's text; the longest first."""
        found = [c for c in self.children if np.array_equal(c.tokens, tokens[self.length : c.length])]
        return sorted(found, key=lambda c: -c.length)

    def walk(self, tokens: Tokens | None = None) -> "Iterator[Node]":
        """This node and all below it, or those below it that are prefixes of a text."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children if tokens is None else node.next(tokens)


Handle = weakref.ref[Node]  # the last node of a stored text; it keeps nothing in memory


class Forest:
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.roots: dict[Format, Node] = defaultdict(lambda: Node(np.zeros(0, np.int64), None, StoredArrays({}, 0)))
        self.keys: dict[Format, str] = {}  # the model's name on disk, by the formats whose files are in the forest
        self.nbytes = 0  # of all arrays in memory
        self.now = 0  # the number of requests so far, which serves as the time

    def nodes(self) -> Iterator[Node]:
        """All nodes except the roots."""
        for root in self.roots.values():
            yield from (node for node in root.walk() if node is not root)

    def __contains__(self, node: Node) -> bool:
        return node.path()[0] in self.roots.values()

    def add_files(self, format: Format, files: Iterable[File]) -> None:
        """Add the files of a folder, each after the one that it continues."""
        nodes = {"": self.roots[format]}
        for file in files:
            stored = StoredArrays(None, file.nbytes, file.name)
            if (parent := nodes.get(file.parent)) is None:  # a damaged header names another text
                continue
            if file.tokens is None:
                parent.snapshot = stored
            else:
                nodes[file.name] = Node(file.tokens, parent, stored)

    def deepest(self, text: Tokens, kv: KVOptions | None, usable: Callable[[Node], bool]) -> tuple[Format, Node] | None:
        """The node of the longest usable snapshot of a text; of several one with the head, then the one used last."""
        found: list[tuple[Format, Node]] = []
        for format, root in self.roots.items():
            if format.kv not in (None, kv):
                continue
            # Caches that are not quantized yet can be used with and without quantization.
            end = kv.quantized_kv_start - 1 if kv is not None and format.kv is None else len(text)
            for node in root.walk(text[: max(end, 0)]):
                if usable(node):
                    found.append((format, node))
        return max(found, key=lambda pair: (pair[1].length, pair[0].head, pair[1].used), default=None)

    def node_of(self, handle: Handle | None, format: Format, text: Tokens) -> Node:
        """The node of a handle if it is still in the tree and a prefix of the text; otherwise the root."""
        root = self.roots[format]
        node = None if handle is None else handle()
        if node is None or node.length > len(text):
            return root
        path = node.path()
        is_prefix = np.array_equal(np.concatenate([n.tokens for n in path]), text[: node.length])
        return node if path[0] is root and is_prefix else root

    def n_common(self, text: Tokens) -> int:
        """The most tokens that a text has in common with a stored one."""
        shared = [n for root in self.roots.values() for n in root.walk(text)]
        lengths = [n.length + _n_common(c.tokens, text[n.length :]) for n in shared for c in n.children]
        return max(lengths, default=0)

    def hold(self, new: Arrays) -> StoredArrays:
        """Put copies of these arrays into memory: a slice would keep its whole array there."""
        copies = {name: mx.contiguous(x) for name, x in new.items()}
        evaluate(copies)  # another thread could not
        self.put(stored := StoredArrays(None, 0), copies)
        return stored

    def put(self, stored: StoredArrays, found: Arrays) -> None:
        stored.arrays, stored.nbytes = found, arrays.nbytes(found)
        self.nbytes += stored.nbytes

    def merge(self, node: Node, twin: Node) -> None:
        """Join a node of the forest with another one that has the same file."""
        for child in twin.children:
            child.parent = node
        node.children += twin.children
        twin.children = []
        if not node.snapshot.exists:
            node.snapshot, twin.snapshot = twin.snapshot, node.snapshot
        self.remove(twin)

    def remove(self, top: Node) -> None:
        """Take a node and all below it out of its tree."""
        for node in top.walk():
            self.nbytes -= sum(part.nbytes for part in (node.span, node.snapshot) if part.in_memory)
        assert top.parent is not None
        top.parent.children.remove(top)
        top.parent = None

    def free(self, nodes: list[Node]) -> None:
        """Free the spans of these nodes, given in order from the leaves up."""
        for node in nodes:
            self.nbytes -= node.span.nbytes
            node.span.arrays = None
            if node.span.name is None:
                self.remove(node)

    def trim_to(self, n_bytes: int, n_snapshots: int | None = None) -> None:
        """Evict the snapshots with the lowest scores, until at most ``n_bytes`` and ``n_snapshots`` are in memory."""
        if self.nbytes > n_bytes:  # first the spans of snapshots that were evicted while the spans were loaded
            needed = {id(n) for node in self.nodes() if node.snapshot.in_memory for n in node.path()}
            self.free([n for n in [*self.nodes()][::-1] if n.span.in_memory and id(n) not in needed])
        held = [node for node in self.nodes() if node.snapshot.in_memory]
        n_most = len(held) if n_snapshots is None else n_snapshots
        while held and (self.nbytes > n_bytes or len(held) > n_most):
            held.remove(least := min(held, key=self._score))
            spare = only_for(least)
            self.nbytes -= least.snapshot.nbytes
            least.snapshot.arrays = None
            self.free(spare)

    def _score(self, node: Node) -> float:
        n_bytes = node.snapshot.nbytes + sum(n.span.nbytes for n in only_for(node))
        on_disk = node.snapshot.name is not None
        n_tokens = node.length - above(node, lambda n: n.snapshot.exists).length
        return score(n_tokens, n_bytes, self.now - node.used, node.uses, on_disk)


def score(n_tokens: int, n_bytes: int, age: int, uses: int = 0, on_disk: bool = False) -> float:
    """The tokens of prefill that a snapshot saves for each byte that its eviction frees, weighted by its age and its uses."""
    return n_tokens * (ON_DISK if on_disk else 1.0) * (1 + uses) / (1 + age) / max(n_bytes, 1)


def is_whole(node: Node) -> bool:
    return node.snapshot.in_memory and all(n.span.in_memory for n in node.path())


def above(node: Node, matches: Callable[[Node], bool]) -> Node:
    """The nearest node above that matches, or the root."""
    return next(n for n in node.path()[-2::-1] if n.parent is None or matches(n))


def only_for(node: Node) -> list[Node]:
    """The nodes whose spans are in memory only for the snapshot of this node, from the leaves up."""
    found: list[Node] = []
    for n in node.path()[:0:-1]:
        others = [c for c in n.children if c not in found and c.span.in_memory]
        if others or not n.span.in_memory or (n is not node and n.snapshot.in_memory):
            break
        found.append(n)
    return found


def _n_common(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    return int(np.argmin(np.append(a[:n] == b[:n], False)))
