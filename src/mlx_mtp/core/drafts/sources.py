"""Free sources of drafts, which need no pass of a model, as the head does: the text's own repetitions, and a grammar.

To add one, write a class like ``FreeSource``, make it for a text in ``make_free_sources``, and name it in ``SOURCES``. A logits
processor may also have one (``draft_source``), such as the tokens that a grammar forces.

Copy drafts are prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; Yang et al. 2023,
arXiv:2304.04487): if the text's last ``N_GRAM`` tokens occurred before, the tokens that followed them are drafted. A match
continues while the text repeats the earlier passage; the longer it is, the likelier is another copy (docs/develop/depth.md).
"""

from collections.abc import Sequence
from itertools import cycle, islice, takewhile
from math import prod
from typing import Protocol

import mlx.core as mx

from ..pacing import MAX_COPY_TOKENS
from ..pacing.depth import Rates
from ..pacing.step_times import HEAD
from .options import TextOptions

N_GRAM = 5  # the length of a new match; shorter matches are often chance, and replace better drafts of the head
N_REJOIN, NEAR = 2, 32  # the length of a match that rejoins a passage, and the number of tokens to search for it
LONGEST = 64  # longer matches count as this length, since they are not better


# The sources by name: how their tokens are called, of which the first word is short, and their color, of a terminal's.
SOURCES = {
    HEAD: ("drafted by the MTP head", "green"),
    "copies": ("copied from the text", "yellow"),
    "grammar": ("forced by a grammar", "magenta"),
}


def source_of(name: str) -> tuple[str, str]:
    """How a source is shown, as in ``SOURCES``; one that is not there, by its name."""
    return SOURCES.get(name, (name, "cyan"))


class FreeSource(Protocol):
    """A source of drafts that needs no pass of a model.

    Committed tokens that ``observe`` has not received yet are counted by ``n_unobserved``.
    """

    name: str  # its name in ``Plan.source``
    fixed: int | None  # the number of tokens to draft whenever it has drafts; ``None`` lets ``Depth`` choose

    def observe(self, tokens: Sequence[int]) -> None:
        """Observe committed tokens when the host learns them."""

    def acceptance_rates(self, n_unobserved: int) -> list[float]:
        """The probability that each draft is accepted, given that the drafts before it are; empty without drafts."""

    def propose(self, k: int, n_unobserved: int) -> mx.array:
        """The first k of the offered drafts, for the tokens after the unobserved ones, [k]: each has the probability one."""


class PromptLookup:
    """The text's own repetitions as a source. Call ``propose`` only if it offers any.

    Numbers below 0 in the text so far are not copied. Its repetitions are not counted, since the answer may repeat itself more
    or less.
    """

    name = "copies"

    def __init__(self, text: Sequence[int] = (), fixed: int | None = None):
        self.text = [*text]
        self.fixed = fixed
        self.ends: dict[tuple[int, ...], int] = {}  # the index after the last occurrence of each n-gram
        self.n_indexed = 0  # n-grams
        self.rates = Rates(self._bucket(LONGEST) + 1)  # the rates by the length of the match
        self.length = 0  # tokens of the match
        self.followed: int | None = None
        self.lost_at: int | None = None  # the index where the last match was wrong
        self.is_lost = True  # whether to look for a match

    @property
    def at(self) -> int | None:
        """The index of the next token's copy, if the text ends in a match."""
        if self.is_lost:
            self.followed, self.is_lost = self._find(), False
            if self.followed is None and self.lost_at is not None:
                self.followed = self._rejoin(self.lost_at)
            self.length = 0 if self.followed is None else self._match_length(self.followed)
        return self.followed

    def observe(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            at = self.at
            if at is not None:
                is_copy = self.text[at] == token
                self.lost_at = self.lost_at if is_copy else at
                self.rates.count(self._bucket(self.length), is_copy)
                self.followed, self.length, self.is_lost = at + 1, self.length + 1, not is_copy
            else:
                self.is_lost = True
            self.text.append(token)

    def acceptance_rates(self, n_unobserved: int) -> list[float]:
        """Up to [MAX_COPY_TOKENS]. Unobserved tokens are assumed to be copies as well."""
        if self.at is None:
            return []
        n = len(self._copy(self.at, n_unobserved + MAX_COPY_TOKENS))
        if n <= n_unobserved:
            return []
        estimate = self.rates.estimate
        rates = [estimate[self._bucket(self.length + i)] for i in range(n)]
        return [prod(rates[: n_unobserved + 1]), *rates[n_unobserved + 1 :]]

    def propose(self, k: int, n_unobserved: int) -> mx.array:
        assert self.at is not None
        return mx.array(self._copy(self.at, n_unobserved + k)[n_unobserved:], mx.uint32)

    def _find(self) -> int | None:
        """The position after the last earlier occurrence of the text's last n-gram, if any."""
        rest = self.text[self.n_indexed : -1]
        n_grams = zip(*(rest[i:] for i in range(N_GRAM)))
        self.ends.update((n_gram, end) for end, n_gram in enumerate(n_grams, self.n_indexed + N_GRAM))
        self.n_indexed = max(len(self.text) - N_GRAM, 0)
        return self.ends.get(tuple(self.text[-N_GRAM:]))

    def _copy(self, at: int, n: int) -> list[int]:
        """The n tokens from an index on, fewer if an image begins before."""
        copy = [*islice(cycle(self.text[at : at + n]), n)]  # at the end of the text, it continues with its own tokens
        return copy if min(copy) >= 0 else [*takewhile(lambda token: token >= 0, copy)]

    def _match_length(self, at: int) -> int:
        """The number of equal tokens before a position and at the end of the text, up to ``LONGEST``."""
        backwards = zip(self.text[max(at - LONGEST, 0) : at][::-1], self.text[-LONGEST:][::-1])
        return next((i for i, (a, b) in enumerate(backwards) if a != b), min(at, LONGEST))

    def _rejoin(self, lost_at: int) -> int | None:
        """The position after the first occurrence of the text's last tokens after the end of the last match."""
        last = self.text[-N_REJOIN:]
        starts = range(lost_at, min(lost_at + NEAR, len(self.text) - N_REJOIN))
        return next((i + N_REJOIN for i in starts if self.text[i : i + N_REJOIN] == last), None)

    def _bucket(self, length: int) -> int:
        """The bucket of a match: lengths 2 to 3, 4 to 7, 8 to 15, 16 to 31, 32 to 63, and from 64 on."""
        return min(length, LONGEST).bit_length() - N_REJOIN.bit_length()


def make_free_sources(options: TextOptions, text: Sequence[int]) -> dict[str, FreeSource]:
    """Make the free sources of a text whose prompt is prefilled, by name."""
    made = list[FreeSource]()
    if not options.keeps_state:
        made += [] if (n := options.copy_drafts) == "off" else [PromptLookup(text, None if n == "auto" else n)]
        made += [p.draft_source() for p in options.logits_processors or () if hasattr(p, "draft_source")][:1]
    return {source.name: source for source in made}
