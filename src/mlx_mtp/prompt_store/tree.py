"""A tree of texts. It does not look into the arrays of its nodes.

    root ── "system, tools" ─┬─ "first question" ── "answer" ── "second question"
                 c           │         c               c               c
                             └─ "another question" ── "answer"
                                       c                 c

A node has the tokens between two cuts, at which the prefill of a text paused, and a snapshot (c), from which a text can be
resumed. Two texts share the nodes above the token at which they differ. Nodes are never split: keys and values depend,
by rounding, on the chunks in which they were prefilled.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]  # token ids, and negative numbers for the tokens of images


class StoredArrays:
    """Arrays in memory, in a file, or in both.

    Args:
        arrays (Dict[str, mx.array], optional): The arrays; ``None`` if they are not in memory.
        nbytes (int): Their size.
        name (str, optional): The name of the file.

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
        parent (Node, optional): The node before it; ``None`` for the root.
        span (StoredArrays): The keys and values of its tokens.

    Attributes:
        snapshot (StoredArrays, optional): The states after its last token.
        length (int): The number of tokens from the root to its end.
        used (int): The time at which its snapshot was last used, in requests.
        uses (int): The number of times that its snapshot was used.
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
        """The children whose tokens a text has next, if it begins with this node's text; the longest first."""
        if self.length >= len(tokens):
            return []
        found = self.children.get(int(tokens[self.length]), [])
        found = [c for c in found if np.array_equal(c.tokens, tokens[self.length : c.length])]
        return sorted(found, key=lambda c: -c.length)

    def common(self, tokens: Tokens) -> int:
        """The number of tokens that a text, which begins with this node's, has in common with any text below it."""
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
        """This node, and all nodes below it that are prefixes of the text."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.next(tokens)


Handle = weakref.ref[Node]  # the last node of a stored text; it keeps nothing in memory


def _n_common(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) > 0 else n
