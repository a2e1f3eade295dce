"""Copy drafts: where the text's last tokens stood in it before, what followed them is drafted again.

This is prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; Yang et al. 2023, arXiv:2304.04487):
a draft costs no pass of a model, and an answer that edits or quotes its prompt copies whole paragraphs of it. A match is at
least ``N_GRAM`` tokens long. It is followed for as long as the text goes on as it did there, and the longer it is, the likelier
next token is a copy, too:

    ... a b c d e f g ...            a match of a b c d e, then of f, ...
    ... a b c d e  ->  f g ...       the drafts
        <- length ->

Whether a copy would have been right is seen of every token, also of those that were drafted otherwise or not at all. So the acceptance rate of copies is known without trying them.

This module knows nothing of models. All of it runs on the host.
"""

from collections.abc import Sequence
from itertools import islice
from math import prod

import mlx.core as mx

from .depth import MAX_COPY_TOKENS
from .drafter import Drafts
from .rates import Rates

N_GRAM = 5  # tokens that a match begins with: shorter ones are often chance, and take the head's place
LONGEST = 64  # tokens; longer matches are as good


class NGramIndex:
    """A text, and where each of its n-grams ended last."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}  # of an n-gram: the position after it

    def extend(self, tokens: Sequence[int]) -> int | None:
        """Add tokens -> as ``append`` for the last of them."""
        start = max(len(self.text) - N_GRAM + 1, 0)
        self.text += tokens[:-1]
        n_grams = zip(*(islice(self.text, start + i, None) for i in range(N_GRAM)))
        self.ends.update((n_gram, end) for end, n_gram in enumerate(n_grams, start + N_GRAM))
        return self.append(tokens[-1]) if len(tokens) > 0 else None

    def append(self, token: int) -> int | None:
        """Add a token -> the position after the last earlier occurrence of the n-gram that it completes, if any."""
        self.text.append(token)
        if len(self.text) < N_GRAM:
            return None
        n_gram = tuple(self.text[-N_GRAM:])
        end = self.ends.get(n_gram)
        self.ends[n_gram] = len(self.text)
        return end


class CopyDrafter:
    """The text's own repetitions as a source of drafts. It is asked only once ``odds`` says that there are some.

    Args:
        n_tokens (int): The number of tokens in the prompt cache that generation goes on from.
        text (Sequence[int]): The last of these, as far back as they are known.
    """

    def __init__(self, n_tokens: int = 0, text: Sequence[int] = ()):
        self.index = NGramIndex()
        self.start = n_tokens - len(text)  # of the text, in the prompt cache
        self.rates = Rates(LONGEST.bit_length() - N_GRAM.bit_length() + 1)  # by the length of the match: see ``_rate``
        self.at: int | None = None  # where the match goes on: the position of the copy of the next token
        self.length = 0  # tokens of the match
        self.prefill(text)

    @property
    def text(self) -> list[int]:
        return self.index.text

    def text_of(self, n_tokens: int) -> list[int]:
        """The text of a prompt cache of this many tokens; nothing where some of it was not read."""
        n = n_tokens - self.start
        return self.text[:n] if 0 <= n <= len(self.text) else []

    def skip(self, n: int) -> None:
        """Begin a new text behind n tokens that are not known."""
        self.start += len(self.text) + n
        self.index, self.at = NGramIndex(), None

    def prefill(self, tokens: Sequence[int]) -> None:
        """Take a part of the prompt. What the prompt repeats says little of the answer, so it does not count as copies."""
        self._match(self.index.extend(tokens))

    def read(self, tokens: Sequence[int]) -> None:
        """Take decided tokens as the host learns of them."""
        for token in tokens:
            is_copy = self.at is not None and self.text[self.at] == token
            if self.at is not None:
                self.rates.count(self._rank(self.length), is_copy)
            end = self.index.append(token)
            if self.at is not None and is_copy:
                self.at, self.length = self.at + 1, self.length + 1
            else:
                self._match(end)

    def odds(self, n_unread: int) -> list[float]:
        """How likely each copied draft is accepted given that those before it are, [MAX_COPY_TOKENS]; without a match [].

        Args:
            n_unread (int): The number of decided tokens that ``read`` was not given yet. They are taken to be copies, too.
        """
        if self.at is None:
            return []
        rates = [self.rates.estimate[self._rank(self.length + i)] for i in range(n_unread + MAX_COPY_TOKENS)]
        return [prod(rates[: n_unread + 1]), *rates[n_unread + 1 :]]

    def propose(self, k: int, n_unread: int) -> Drafts:
        """k drafts for the tokens after the unread ones."""
        assert self.at is not None
        copy = self.text[self.at : self.at + n_unread + k]
        period = len(self.text) - self.at
        while len(copy) < n_unread + k:
            copy.append(copy[-period])  # at the end of the text the copy goes on in itself
        return Drafts(mx.array(copy[n_unread:], mx.uint32), [None] * k)

    def _match(self, at: int | None) -> None:
        """Follow the match that goes on at a position."""
        self.at, self.length = at, 0
        if at is not None:
            backwards = zip(reversed(self.text[max(at - LONGEST, 0) : at]), reversed(self.text))
            self.length = next((i for i, (a, b) in enumerate(backwards) if a != b), min(at, LONGEST))

    def _rank(self, length: int) -> int:
        """Lengths count as equal from 5 to 7, 8 to 15, 16 to 31, 32 to 63, and from 64 on."""
        return min(length, LONGEST).bit_length() - N_GRAM.bit_length()
