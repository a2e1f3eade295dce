"""A tree of texts. It knows nothing of the arrays that a node has.

    root ── "system, tools" ─┬─ "first question" ── "answer" ── "second question"
                 c           │         c               c               c
                             └─ "another question" ── "answer"
                                       c                 c

A node is the tokens between two places where a text was cut while it was read, and a snapshot (c) is what a text can be
resumed from. Two texts share the nodes above the place where they part. Nodes are never split: the rows of a part that was
read in one go are those of another cut to within rounding only.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]  # ids, and numbers below 0 for what is no token, as a part of an image


class StoredArrays:
    """Arrays in memory, in a file, or in both.

    Args:
        arrays (Dict[str, mx.array], optional): Those in memory.
        nbytes (int): Their size.
        name (str, optional): Of the file.

    Attributes:
        refused (bool): Whether there is no space for it on disk.
    """

    def __init__(self, arrays: Any, nbytes: int, name: str | None = None):
        self.arrays, self.nbytes, self.name = arrays, nbytes, name
        self.refused = False

    @property
    def in_memory(self) -> bool:
        return self.arrays is not None


class Node:
    """A part of a text.

    Args:
        tokens (Tokens): Its own tokens, [n].
        parent (Node, optional): What comes before; ``None`` for the root.
        span (StoredArrays): The rows of its tokens.

    Attributes:
        snapshot (StoredArrays, optional): The states after its last token.
        length (int): The number of tokens up to its end.
        used (int): When its snapshot was last used, in requests.
        uses (int): How often.
    """

    def __init__(self, tokens: Tokens, parent: "Node | None", span: StoredArrays):
        self.tokens, self.parent, self.span = tokens, parent, span
        self.snapshot: StoredArrays | None = None
        self.children: dict[int, list[Node]] = {}  # by their first token
        self.used = self.uses = 0
        self.length: int = len(tokens)
        if parent is not None:
            self.length += parent.length
            parent.children.setdefault(int(tokens[0]), []).append(self)

    @property
    def begin(self) -> int:
        return self.length - len(self.tokens)

    def remove(self) -> None:
        """Take it out of the tree."""
        assert self.parent is not None
        siblings = self.parent.children[int(self.tokens[0])]
        siblings.remove(self)
        if not siblings:
            del self.parent.children[int(self.tokens[0])]
        self.parent = None

    def path(self) -> "list[Node]":
        """The nodes from the root to this one, both included."""
        nodes, node = [self], self.parent
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def all_children(self) -> "Iterator[Node]":
        for siblings in self.children.values():
            yield from siblings

    def next(self, tokens: Tokens) -> "list[Node]":
        """The children with which a text goes on that begins with this node's: the longest first."""
        if self.length >= len(tokens):
            return []
        found = self.children.get(int(tokens[self.length]), [])
        found = [c for c in found if np.array_equal(c.tokens, tokens[self.length : c.length])]
        return sorted(found, key=lambda c: -c.length)

    def common(self, tokens: Tokens) -> int:
        """How many tokens a text that begins with this node's has in common with any text below it."""
        own = tokens[self.length :]
        children = self.children.get(int(own[0]), []) if len(own) > 0 else []
        return self.length + max((_n_common(c.tokens, own) for c in children), default=0)

    def subtree(self) -> "Iterator[Node]":
        """This node and all below it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.all_children()

    def prefixes(self, tokens: Tokens) -> "Iterator[Node]":
        """This node, and those below it with which the text begins."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.next(tokens)


Handle = weakref.ref[Node]  # to where a text was read; it keeps nothing in memory


def _n_common(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) > 0 else n
