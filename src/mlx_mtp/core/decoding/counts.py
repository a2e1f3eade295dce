"""Counts of drafted and accepted tokens of a text, and its speed."""

from dataclasses import dataclass, field
from typing import NamedTuple

from ..pacing.step_times import HEAD


class OfSource(NamedTuple):
    """The drafts of one source and the accepted ones, by position in the window, each [K]."""

    drafted: list[int]
    accepted: list[int]


@dataclass
class DraftCounts:
    """The number of drafts made and accepted, by source and by position in the window.

    Accepted are those that are tokens of the text: a window may go on behind its end. The dictionary is replaced, so that any
    thread can read it.
    """

    by_source: dict[str, OfSource] = field(default_factory=dict)  # "head", or the name of a free source
    source: str = HEAD  # the source of the latest step's drafts
    n_latest: int = 0  # the number of these that were accepted
    n_timed: int = 0  # tokens of the steps that are timed: all but the first, and those that made a trace
    seconds: float = 0.0  # the time of these steps

    def of(self, source: str) -> OfSource:
        return self.by_source.get(source, OfSource([], []))

    def add(self, n_drafted: int, n_accepted: int, source: str = HEAD) -> None:
        self.source, self.n_latest = source, n_accepted
        if source not in self.by_source:
            self.by_source = {**self.by_source, source: OfSource([], [])}
        for numbers, n in zip(self.of(source), (n_drafted, n_accepted)):
            numbers += [0] * (n_drafted - len(numbers))
            for i in range(n):
                numbers[i] += 1

    def retract(self, n: int) -> None:
        """Uncount the last n accepted drafts of the latest step, which are behind a text's end that only its text shows."""
        for i in range(self.n_latest - n, self.n_latest):
            self.of(self.source).accepted[i] -= 1

    @property
    def drafted(self) -> list[int]:
        return self.of(HEAD).drafted

    @property
    def accepted(self) -> list[int]:
        return self.of(HEAD).accepted

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of the timed steps; ``None`` if there are none."""
        return self.n_timed / self.seconds if self.n_timed > 0 else None

    @property
    def n_drafted(self) -> int:
        return sum(sum(drafted) for drafted, _ in self.by_source.values())

    @property
    def n_accepted(self) -> int:
        return sum(sum(accepted) for _, accepted in self.by_source.values())

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens that a verify pass with drafts has yielded."""
        n_steps = sum(sum(drafted[:1]) for drafted, _ in self.by_source.values())
        return 1 + self.n_accepted / n_steps if n_steps > 0 else 1.0
