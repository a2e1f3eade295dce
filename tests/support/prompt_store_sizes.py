"""A prompt store of numbers of bytes in place of arrays, and sessions on it: what would be read, and what would be held."""

from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace

import numpy as np

from mlx_mtp.prompt_store import forest
from mlx_mtp.prompt_store import store as module
from mlx_mtp.prompt_store.arrays import Format
from mlx_mtp.prompt_store.cuts import choose_cuts
from mlx_mtp.prompt_store.tree import _n_common

MIB = 1 << 20
SIZES = {"27B": (64 << 10, 150 * MIB), "35B-A3B": (20 << 10, 63 * MIB)}  # bytes of a token, of a snapshot
FORMAT = Format(None, True)


@dataclass
class Sizes:
    """In place of ``prompt_store.arrays``."""

    n_token: int
    n_snapshot: int

    def format_of(self, *_):
        return FORMAT

    def keys_and_values(self, cache, format, begin, end):
        return (end - begin) * self.n_token

    def states(self, cache, format):
        return self.n_snapshot

    def copied(self, n_bytes):
        return n_bytes

    nbytes = copied

    def are_equal(self, a, b):
        return a == b

    def make_cache(self, *_):
        return [SimpleNamespace()]


def sized_store(monkeypatch, sizes, max_bytes):
    """A store for a model whose tokens and snapshots take so many bytes."""
    for changed in (module, forest):
        monkeypatch.setattr(changed, "arrays", Sizes(*sizes))
    monkeypatch.setattr(module, "make_prompt_cache", lambda model: [SimpleNamespace()])
    monkeypatch.setattr(module, "open_prompt_cache", lambda model, entries: entries[0])
    return module.PromptStore(SimpleNamespace(fingerprint=lambda: b""), max_bytes)


class Sessions:
    """What clients ask for.

    Attributes:
        n_prompt (int): The tokens of all prompts.
        n_read (int): Those that the store did not have.
        n_least (int): Those that none of the texts before had begun with.
    """

    def __init__(self, store):
        self.store, self.ids = store, count(1)
        self.seen: list[np.ndarray] = []
        self.n_prompt = self.n_read = self.n_least = 0
        self.n_beyond: list[int] = []  # by request

    def message(self, n_tokens):
        """Tokens of a message that no other message has."""
        return np.full(n_tokens, next(self.ids), np.uint32)

    def ask(self, messages, n_answer=0):
        """Read a prompt of these messages, answer with so many tokens -> the answer, as the next prompt may contain it."""
        ends = [int(n) for n in np.cumsum([len(m) for m in messages])]
        prompt = np.concatenate([*messages, np.zeros(4, np.uint32)])  # the opening of the answer
        n = self.store.fetch(prompt[:-1]).n_tokens
        read = len(prompt) - n
        for cut in choose_cuts(ends, len(prompt), self.store.n_common(prompt)):
            if cut > n:
                self._insert(prompt[:cut])
        answer = self.message(n_answer)
        self._insert(np.concatenate([prompt, answer]))
        least = len(prompt) - min(max((_n_common(s, prompt) for s in self.seen), default=0), len(prompt) - 1)
        self.seen.append(np.concatenate([prompt, answer]))
        self.n_prompt, self.n_read, self.n_least = self.n_prompt + len(prompt), self.n_read + read, self.n_least + least
        self.n_beyond.append(read - least)
        return np.concatenate([np.zeros(4, np.uint32), answer])

    def _insert(self, text):
        self.store.insert(text, [SimpleNamespace(n_tokens=len(text), entries=[SimpleNamespace()])])

    @property
    def beyond(self):
        """What was read beyond the least possible, as a share of all tokens."""
        return (self.n_read - self.n_least) / self.n_prompt
