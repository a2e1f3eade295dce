"""Where snapshots are made, and which are kept: sessions of agents on stores of limited size."""

from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.prompt_store import store as module
from mlx_mtp.prompt_store import tree
from mlx_mtp.prompt_store.arrays import Format
from mlx_mtp.prompt_store.store import EVERY, LAST, LINE, choose_cuts, message_ends
from mlx_mtp.prompt_store.tree import _n_common, score
from tests.support.profiles import LONG
from tests.support.prompt_store import n_snapshots

SYSTEM, CALL, RESULT = 6000, 150, 700  # tokens of messages
GB = 10**9


@given(st.lists(st.integers(1, 30_000)), st.integers(1, 30_000), st.integers(0, 30_000), st.integers(1, 5000))
def test_cuts(ends, n_tokens, n_common, every):
    cuts = choose_cuts(ends, n_tokens, n_common, every)
    known = sorted({end for end in ends if end < n_tokens})
    assert cuts == sorted({*cuts})
    assert all(0 < cut < n_tokens for cut in cuts)
    assert {*known[1:][-LAST:]} <= {*cuts}
    assert all(b - a <= every for a, b in zip([0, *cuts], cuts))
    assert n_tokens == 1 or cuts[-1] >= (known[-1] if known else n_tokens - 1)


def test_cuts_of_a_prompt():
    ends = [6000, 6200, 9000, 9100, 9200, 9300, 9400, 9500]
    assert choose_cuts(ends, 9504) == [EVERY, 6000 - LINE, 9200, 9300, 9400, 9500]
    assert choose_cuts([*ends, 30_000], 30_004)[-4:] == [9500 + EVERY * i for i in (3, 4, 5)] + [30_000]
    assert choose_cuts([], 100) == [99]
    # Where it parts from the texts before
    assert choose_cuts([3000, 3200], 3204, 2800) == [2800 - LINE, 3000 - LINE, 3200]
    for n_common in (5, 2990, 3001, 3203):
        assert choose_cuts([3000, 3200], 3204, n_common) == [3000 - LINE, 3200]
    assert choose_cuts([100, 3200], 3204) == [3200]  # a short one saves little
    assert choose_cuts([], 1) == []
    # The ends of messages, by the tokens that begin one; the text begins with one, too
    tokens = [1, 5, 6, 1, 7, 1, 1, 8]
    for opening, message_starts in (([1], [3, 5, 6]), ([1, 7], [3]), ([1, 5], []), ([], [])):
        assert message_ends(tokens, opening) == message_starts
    # They stay where they are as a text grows, or one that is resumed in the middle would not be read as before
    ends = [6000, *(6000 + 900 * i for i in range(1, 40))]
    long = choose_cuts(ends, ends[-1] + 4)
    for i in range(2, len(ends)):
        cuts = choose_cuts(ends[:i], ends[i - 1] + 4)
        assert [c for c in long if c < cuts[0]] == []
        assert {c for c in cuts if c not in long} <= {*ends[max(i - LAST, 0) : i]}


def test_the_snapshot_that_saves_least_goes_first():
    for snapshots, order in [
        ([(300, 1000, 0), (200, 1000, 0), (400, 1000, 0)], [1, 0, 2]),
        ([(300, 1000, 0), (300, 1000, 5), (300, 1000, 2)], [1, 2, 0]),  # what is older
        ([(300, 1000, 5, 9), (300, 1000, 5)], [1, 0]),  # what was not used
        ([(300, 9000, 0), (300, 1000, 0)], [0, 1]),  # what is larger
        ([(300, 1000, 0, 0, True), (300, 1000, 0)], [0, 1]),  # what is on disk
    ]:
        assert sorted(range(len(snapshots)), key=lambda i: score(*snapshots[i])) == order


# A prompt store of numbers of bytes in place of arrays, and sessions on it: what would be read, and what would be held

MIB = 1 << 20
SIZES = {"27B": (64 << 10, 150 * MIB), "35B-A3B": (20 << 10, 63 * MIB)}  # bytes of a token, of a snapshot


@dataclass
class Sizes:
    """In place of ``prompt_store.arrays``."""

    n_token: int
    n_snapshot: int

    def keys_and_values(self, cache, format, begin, end):
        return (end - begin) * self.n_token

    def states(self, cache, format):
        return self.n_snapshot

    format_of = staticmethod(lambda *_: Format(None, True))
    copied = nbytes = staticmethod(lambda n_bytes: n_bytes)
    are_equal = staticmethod(lambda a, b: a == b)
    make_cache = staticmethod(lambda *_: [SimpleNamespace()])


def sized_store(monkeypatch, sizes, max_bytes):
    """A store for a model whose tokens and snapshots take so many bytes."""
    for changed in (module, tree):
        monkeypatch.setattr(changed, "arrays", Sizes(*sizes))
    monkeypatch.setattr(module, "make_prompt_cache", lambda model: [SimpleNamespace()])
    monkeypatch.setattr(module, "open_prompt_cache", lambda model, entries: entries[0])
    return module.PromptStore(SimpleNamespace(fingerprint=lambda: b""), max_bytes)


class Sessions:
    """What clients ask for, and the tokens of all prompts, those not in the store, and those that no text before had."""

    def __init__(self, store):
        self.store, self.ids = store, count(1)
        self.seen: list[np.ndarray] = []
        self.n_prompt = self.n_read = self.n_least = 0
        self.n_beyond: list[int] = []  # by request

    def message(self, n_tokens):
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


def tool_loop(sessions, n_turns, system=None):
    messages = [sessions.message(SYSTEM) if system is None else system, sessions.message(300)]
    for _ in range(n_turns):
        messages = [*messages, sessions.ask(messages, CALL), sessions.message(RESULT)]
        yield messages


def two_agents(sessions):
    assert len([*zip(tool_loop(sessions, 20), tool_loop(sessions, 20))]) == 20


def edit(sessions):
    messages = [*tool_loop(sessions, 10)][-1]
    assert len(messages) == 22
    for _ in range(3):
        messages[18] = sessions.message(RESULT)
        sessions.ask(messages, CALL)


def changing_system(sessions):
    """The time is far above the end of the system's text."""
    system, rest, question = (sessions.message(n) for n in (SYSTEM, SYSTEM // 3, 300))
    for i in range(20):
        hours, minutes = divmod(9 * 60 + 56 + i, 60)
        clock = np.array([*f"{hours:02}:{minutes:02}".encode()])  # each sign is a token
        sessions.ask([np.concatenate([system, clock, rest]), question], CALL)
    # The second request shows where the texts part, four tokens into the time, and reads on from the last cut before.
    assert sessions.n_beyond[1] == SYSTEM + 4 - EVERY
    assert max(sessions.n_beyond[2:]) <= LINE


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("session", [two_agents, edit, changing_system])
def test_sessions_read_little_twice(session, size, monkeypatch):
    """At most 5 % of all tokens more than with a store of everything, with 12 GB."""
    sessions = Sessions(sized_store(monkeypatch, SIZES[size], 12 * GB))
    session(sessions)
    assert sessions.beyond <= 0.05


@pytest.mark.parametrize("size", [*SIZES][: 2 if LONG else 1])
def test_what_is_held_grows_with_the_tokens(size, monkeypatch):
    """84,000 tokens in 60 turns, with no limit: each token's keys and values once."""
    token, snapshot = SIZES[size]
    sessions = Sessions(sized_store(monkeypatch, SIZES[size], 1 << 50))
    store = sessions.store
    for messages in tool_loop(sessions, 60, sessions.message(33_000)):
        n = sum(map(len, messages[:-1]))
        assert store.nbytes == n * token + n_snapshots(store) * snapshot
    assert 80_000 < n < 90_000
    assert n_snapshots(store) <= 2 * 60 + 9 + LAST
    store.trim_to(12 * GB)
    assert store.nbytes <= 12 * GB
    assert store.fetch(sessions.seen[-1])[1] == n  # the end of the session is kept


def test_many_sessions_share_a_system_prompt(monkeypatch):
    """It outlives the sessions that began with it, however short the memory."""
    sessions = Sessions(sized_store(monkeypatch, SIZES["27B"], 3 * GB))
    system = sessions.message(SYSTEM)
    for _ in range(20):
        for _ in tool_loop(sessions, 5, system):
            pass
    assert sessions.beyond < 0.05
