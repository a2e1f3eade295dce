"""Which snapshot to give up where memory is short: the one whose bytes save the least reading elsewhere.

Many snapshots close to each other save little each, an old text saves nothing until somebody returns to it, and the end
of a text frees its keys and values as well.
"""

from typing import NamedTuple

ON_DISK = 0.1  # what reading from disk takes, of the time of reading the text


class Candidate(NamedTuple):
    """A snapshot in memory.

    Args:
        n_tokens (int): That are read again if it is wanted and not there: those since the snapshot above it.
        n_bytes (int): That its end frees.
        age (int): Requests since it was made or used.
        uses (int): How often it was used.
        on_disk (bool): Whether it can be had from there.
    """

    n_tokens: int
    n_bytes: int
    age: int
    uses: int = 0
    on_disk: bool = False


def score(held: Candidate) -> float:
    """Tokens of reading that a byte of it saves, as likely as it is wanted: often used, and lately."""
    n = held.n_tokens * (ON_DISK if held.on_disk else 1.0)
    return n * (1 + held.uses) / (1 + held.age) / max(held.n_bytes, 1)
