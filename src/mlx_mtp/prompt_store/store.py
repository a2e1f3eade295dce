"""Prefixes of texts that were read before, in memory."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..models.prompt_cache import make_prompt_cache, open_prompt_cache
from . import arrays
from .arrays import Arrays, Format, KVOptions
from .memory import cache_budget
from .thinning import Held, worth
from .tree import Node, Piece, Tokens


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

    A text is inserted wherever it may part from others: there it gets a checkpoint, from which any text with this beginning is
    resumed. What is fetched is bit for bit what was inserted. Any thread may call any method.

    Args:
        model (nn.Module): A model of ``mlx_mtp.load``. With other weights, as those of an adapter, the store begins anew.
        max_bytes (int, optional): The most memory to hold. Default: ``None``, half of what the model leaves of the memory that
          the device recommends to use.
        max_checkpoints (int, optional): The most checkpoints in memory. Default: ``None``, any number.
    """

    def __init__(self, model: Any, max_bytes: int | None = None, max_checkpoints: int | None = None):
        self.model = model
        self.max_bytes = cache_budget(model) if max_bytes is None else max_bytes
        self.max_checkpoints = max_checkpoints
        self.counts = Counts()
        self._lock = threading.RLock()
        self._clear()

    def fetch(self, tokens: Sequence[int], kv: KVOptions | None = None) -> tuple[list[Any], int]:
        """A prompt cache of the longest prefix that the text can be resumed from.

        Args:
            tokens (Sequence[int]): The text. To generate, leave out the last token, which generation begins with.
            kv (Tuple[int, int, int], optional): ``kv_bits``, ``kv_group_size`` and ``quantized_kv_start``, where keys and
              values are quantized. Default: ``None``.

        Returns:
            Tuple[List[Any], int]: The prompt cache, which is the caller's own, and the number of tokens in it.
        """
        text = np.asarray(tokens, np.uint32)
        with self._lock:
            self._check_model()
            self._now += 1
            self.counts.fetches += 1
            found = self._deepest(text, kv)
            if found is None:
                return make_prompt_cache(self.model), 0
            format, node = found
            assert node.checkpoint is not None
            node.used, node.uses = self._now, node.uses + 1
            self.counts.hits += 1
            self.counts.tokens += node.length
            spans = [n.span.arrays for n in node.path()[1:]]
            entries = arrays.make_cache(self.model, format, text[: node.length].tolist(), spans, node.checkpoint.arrays)
            entries[-1].origin = weakref.ref(node)
            return entries, node.length

    def n_common(self, tokens: Sequence[int]) -> int:
        """How many tokens the text has in common with any that is held: where it parts from them, others may as well."""
        text = np.asarray(tokens, np.uint32)
        with self._lock:
            self._check_model()
            nodes = (node for root in self._roots.values() for node in root.prefixes(text))
            return max((node.common(text) for node in nodes), default=0)

    def insert(self, tokens: Sequence[int], prompt_cache: list[Any], kv: KVOptions | None = None) -> None:
        """Keep what is new in a prompt cache, with a checkpoint at its end.

        Args:
            tokens (Sequence[int]): All of the tokens in the cache.
            prompt_cache (List[Any]): Of this model, with no generation open on it. It is left as it is.
            kv (Tuple[int, int, int], optional): As in ``fetch``.

        Raises:
            ValueError: It is another model's, or not of these tokens.
        """
        text = np.asarray(tokens, np.uint32)
        with self._lock:
            self._check_model()
            cache = open_prompt_cache(self.model, list(prompt_cache))
            if cache.n_tokens != len(text):
                raise ValueError(f"The prompt cache is of {cache.n_tokens} tokens, not of these {len(text)}.")
            if len(text) == 0:
                return
            format = arrays.format_of(self.model, cache, kv)
            node = self._origin(cache.entries[-1], format, text)
            while (child := self._same_child(node, text, cache, format)) is not None:
                node = child
            if node.length < len(text):
                node = self._add(node, text[node.length :], arrays.rows(cache, format, node.length, len(text)))
            if node.checkpoint is None:
                node.checkpoint = self._held(arrays.states(cache, format))
                node.used = self._now
            cache.entries[-1].origin = weakref.ref(node)
            self.trim_to(self.max_bytes, self.max_checkpoints)

    def trim_to(self, n_bytes: int, n_checkpoints: int | None = None) -> None:
        """Give up what is worth least, until this much is left."""
        with self._lock:
            held = [node for node in self._nodes() if _in_memory(node)]
            n_most = len(held) if n_checkpoints is None else n_checkpoints
            while held and (self.nbytes > n_bytes or len(held) > n_most):
                least = min(held, key=self._worth)
                held.remove(least)
                self._give_up(least)

    @property
    def n_checkpoints(self) -> int:
        """Those in memory."""
        with self._lock:
            return sum(map(_in_memory, self._nodes()))

    def _clear(self) -> None:
        self._key = self.model.fingerprint()
        self._roots: dict[Format, Node] = {}
        self._now = 0  # in requests
        self.nbytes = 0

    def _check_model(self) -> None:
        if self.model.fingerprint() != self._key:
            self._clear()

    def _nodes(self) -> Iterator[Node]:
        """All but the roots."""
        for root in self._roots.values():
            yield from (node for node in root.subtree() if node is not root)

    # Find

    def _deepest(self, text: Tokens, kv: KVOptions | None) -> tuple[Format, Node] | None:
        """The checkpoint to resume a text from. At the same length, the head's rows and the one that was used last."""
        best: tuple[Format, Node] | None = None
        for format, root in self._roots.items():
            if format.kv not in (None, kv):
                continue
            # What is not quantized yet serves both.
            end = kv[2] - 1 if kv is not None and format.kv is None else len(text)
            for node in root.prefixes(text[: max(end, 0)]):
                if node.checkpoint is not None and (best is None or _rank(format, node) > _rank(*best)):
                    best = format, node
        return best

    def _origin(self, last: Any, format: Format, text: Tokens) -> Node:
        """The node that a prompt cache was resumed from, or the root: above it, the cache's rows are the tree's."""
        root = self._roots.get(format)
        if root is None:
            root = self._roots[format] = Node(text[:0], None, Piece({}, 0))
        node = getattr(last, "origin", lambda: None)()
        if node is None or node.length > len(text):
            return root
        path = node.path()
        is_prefix = np.array_equal(np.concatenate([n.tokens for n in path]), text[: node.length])
        return node if path[0] is root and is_prefix else root

    def _same_child(self, node: Node, text: Tokens, cache: Any, format: Format) -> Node | None:
        """The child that holds the text's next tokens, read alike. Rounding may differ where a text was cut elsewhere."""
        for child in node.next(text):
            if arrays.are_equal(child.span.arrays, arrays.rows(cache, format, child.begin, child.length)):
                return child
        return None

    # Hold and give up

    def _add(self, parent: Node, tokens: Tokens, rows: Arrays) -> Node:
        return Node(tokens.copy(), parent, self._held(rows))

    def _held(self, new: Arrays) -> Piece:
        own = arrays.copied(new)
        piece = Piece(own, arrays.nbytes(own))
        self.nbytes += piece.nbytes
        return piece

    def _worth(self, node: Node) -> float:
        assert node.checkpoint is not None
        above = next(n for n in node.path()[-2::-1] if n.parent is None or n.checkpoint is not None)
        n_bytes = node.checkpoint.nbytes + sum(n.span.nbytes for n in _only_for(node))
        return worth(Held(node.length - above.length, n_bytes, self._now - node.used, node.uses))

    def _give_up(self, node: Node) -> None:
        """Free a checkpoint, and the spans that no other one needs."""
        assert node.checkpoint is not None
        spare = _only_for(node)
        for piece in (node.checkpoint, *(n.span for n in spare)):
            self.nbytes -= piece.nbytes
        node.checkpoint = None
        for n in spare:
            n.remove()


def _in_memory(node: Node) -> bool:
    return node.checkpoint is not None and node.checkpoint.arrays is not None


def _rank(format: Format, node: Node) -> tuple[int, bool, int]:
    return node.length, format.head, node.used


def _only_for(node: Node) -> list[Node]:
    """The nodes that are needed for this one's checkpoint alone, the lowest first."""
    found: list[Node] = []
    n: Node | None = node
    while n is not None and n.parent is not None and all(c in found for c in n.all_children()):
        if n is not node and n.checkpoint is not None:
            break
        found.append(n)
        n = n.parent
    return found
