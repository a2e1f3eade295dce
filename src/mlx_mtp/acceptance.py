"""Which drafts stand.

Token match: the target's own sampler chooses a token at every position of the window, and a draft stands while it is that
choice. What is emitted is always the sampler's choice given the tokens before it, so the output has the distribution of
plain decoding for any sampler, opaque ones included.
"""

from collections.abc import Sequence


def n_matching(drafts: Sequence[int], choices: Sequence[int]) -> int:
    """The number of leading drafts that are the target's choices at their positions.

    Args:
        drafts (Sequence[int]): k drafts.
        choices (Sequence[int]): The target's choice at each of them, and perhaps one after the last.
    """
    n = 0
    for draft, choice in zip(drafts, choices):
        if draft != choice:
            break
        n += 1
    return n
