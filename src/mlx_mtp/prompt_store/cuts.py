"""Where to cut the prefill of a prompt: at positions where later texts are likely to differ, so that they resume there."""

from collections.abc import Iterable, Sequence

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

LAST = 4  # messages that end in a cut
LINE = 64  # tokens before a position where texts differ: others differ a little earlier, as with a two-digit hour
NEAR = 2 * LINE  # tokens after a cut within which another cut would save little
EVERY = 4096  # the most tokens between two cuts, which an edit in the middle costs at most
OPENING = "<|im_start|>"  # the start of a message in the chat templates of these models


def cuts_of(tokenizer: TokenizerWrapper, tokens: Sequence[int], n_common: int) -> list[int]:
    """The numbers of tokens after which to insert the cache of a prompt into a store, in order.

    Args:
        tokenizer (TokenizerWrapper): Its chat template defines where messages end.
        n_common (int): The ``n_common`` of the store for this prompt.
    """
    opening = tokenizer.encode(OPENING, add_special_tokens=False) if tokenizer.has_chat_template else []
    return choose_cuts(message_ends(tokens, opening), len(tokens), n_common)


def message_ends(tokens: Sequence[int], opening: Sequence[int]) -> list[int]:
    """The positions where messages end and the next one begins.

    Args:
        tokens (Sequence[int]): A rendered prompt, which ends with the opening of the answer.
        opening (Sequence[int]): The tokens of ``OPENING``: one if it is a special token of the tokenizer.
    """
    text, n = np.asarray(tokens), len(opening)
    if n == 0 or len(text) < n:
        return []
    opens = np.lib.stride_tricks.sliding_window_view(text, n) == np.asarray(opening)
    return [int(i) for i in np.nonzero(opens.all(axis=1))[0] if i > 0]


def choose_cuts(ends: Iterable[int], n_tokens: int, n_common: int = 0, every: int = EVERY) -> list[int]:
    """The positions at which to cut a prompt, in order. At least one token follows each cut: generation begins with it.

    Args:
        ends (Iterable[int]): The ends of its messages. The last ones become cuts; without any, the end of the prompt does.
        n_tokens (int): The number of tokens of the prompt.
        n_common (int): The position where the prompt differs from all stored texts; other texts may differ there, too. A cut is
          made a line before it, and a line before the end of the system message, which often has the date.
        every (int): The most tokens between two cuts. Additional cuts are at the ends of messages where possible.
    """
    known = sorted({end for end in ends if 0 < end < n_tokens}) or [n_tokens - 1] * (n_tokens > 1)
    wanted = {*(known[1:] or known)[-LAST:]}
    for place in (*known[:1], n_common):
        if place < n_tokens and all(not 0 <= place - cut < NEAR for cut in (0, *wanted)):
            wanted.add(place - LINE)
    cuts = [0]
    for end in sorted(wanted):
        while end - cuts[-1] > every:
            within = [e for e in known if cuts[-1] < e <= cuts[-1] + every]
            cuts.append(within[-1] if within else cuts[-1] + every)
        if end > cuts[-1]:
            cuts.append(end)
    return cuts[1:]
