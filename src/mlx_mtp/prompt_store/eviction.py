"""Which snapshot is evicted where memory is short: the one whose bytes save the least prefill.

Snapshots close to each other save little each, an old text saves nothing until a request returns to it, and the end of a text
frees its keys and values as well.
"""

from typing import NamedTuple

ON_DISK = 0.1  # the time to read a text's arrays from disk, as a share of its prefill


class Candidate(NamedTuple):
    """A snapshot in memory.

    Args:
        n_tokens (int): The tokens since the snapshot above it, which are prefilled again without it.
        n_bytes (int): The bytes that its eviction frees.
        age (int): Requests since it was made or used.
        uses (int): The number of texts that were resumed from it.
        on_disk (bool): Whether it is on disk, too.
    """

    n_tokens: int
    n_bytes: int
    age: int
    uses: int = 0
    on_disk: bool = False


def score(snapshot: Candidate) -> float:
    """The tokens of prefill that a byte saves, weighted by how often and how lately the snapshot was used."""
    n = snapshot.n_tokens * (ON_DISK if snapshot.on_disk else 1.0)
    return n * (1 + snapshot.uses) / (1 + snapshot.age) / max(snapshot.n_bytes, 1)
