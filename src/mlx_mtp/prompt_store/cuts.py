"""Where the reading of a prompt is cut, so that later texts can be resumed there: where they are likely to part from it."""

from collections.abc import Iterable, Sequence

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

LAST = 4  # messages that end in a cut
LINE = 64  # tokens before a place where texts part: others part a little earlier, as when an hour gets two digits
NEAR = 2 * LINE  # tokens after another cut, where one more would save little
EVERY = 4096  # tokens at most between two cuts, so that an edit in the middle costs no more
OPENING = "<|im_start|>"  # of a message, in the chat templates of these models


def cuts_of(tokenizer: TokenizerWrapper, tokens: Sequence[int], n_common: int) -> list[int]:
    """The numbers of tokens, in order, after which the cache of a prompt is to be inserted into a store.

    Args:
        tokenizer (TokenizerWrapper): Its chat template tells where messages end.
        n_common (int): The number of the prompt's tokens that the store knows, of whatever text: its ``n_common``.
    """
    opening = tokenizer.encode(OPENING, add_special_tokens=False) if tokenizer.has_chat_template else []
    return choose_cuts(message_ends(tokens, opening), len(tokens), n_common)


def message_ends(tokens: Sequence[int], opening: Sequence[int]) -> list[int]:
    """Where messages end: wherever the next one opens.

    Args:
        tokens (Sequence[int]): A prompt as rendered, with the opening of the answer at its end.
        opening (Sequence[int]): The tokens of ``OPENING``, one where the tokenizer knows it.
    """
    text, n = np.asarray(tokens), len(opening)
    if n == 0 or len(text) < n:
        return []
    opens = np.lib.stride_tricks.sliding_window_view(text, n) == np.asarray(opening)
    return [int(i) for i in np.nonzero(opens.all(axis=1))[0] if i > 0]


def choose_cuts(ends: Iterable[int], n_tokens: int, n_common: int = 0, every: int = EVERY) -> list[int]:
    """Where to cut a prompt, in order; each cut leaves at least one token, which generation begins with.

    Args:
        ends (Iterable[int]): Where its messages end: the last ones get a cut. Without any, the end of the prompt gets one.
        n_tokens (int): Of the prompt.
        n_common (int): Where it parts from all texts before: others may part from it there, too. A cut is made a line before,
          and a line before the end of the first message, the system's, where the date often is.
        every (int): The most tokens between two cuts. A cut in between is at the end of a message, if there is one.
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
