"""Counts of drafted and accepted tokens of a text, and its speed."""

from dataclasses import dataclass, field


@dataclass
class DraftCounts:
    """
    The number of drafts made and accepted, by position in the window.

    Args:
        drafted (List[int]): Drafts of the head.
        accepted (List[int]): Accepted drafts of the head.
        copied (List[int]): Drafts copied from the text.
        copies_accepted (List[int]): Accepted copies.
        forced (List[int]): Drafts forced by a grammar.
        forced_accepted (List[int]): Accepted drafts of a grammar.
        others (List[int]): Drafts of sources that were added to ``drafts/sources.py``.
        others_accepted (List[int]): Accepted drafts of such sources.
        depth (int): The latest step's number of drafts.
        source (str): The source of the latest step's drafts: ``"head"``, or a name in ``drafts/sources.py``.
        n_timed (int): Tokens of the steps that are timed: all but the first, and those that made a trace (``traces.py``).
        seconds (float): The time of these steps.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    copies_accepted: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    forced_accepted: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    others_accepted: list[int] = field(default_factory=list)
    depth: int = 0
    source: str = "head"
    n_timed: int = 0
    seconds: float = 0.0

    def add(self, n_drafted: int, n_accepted: int, source: str = "head") -> None:
        """Count a step."""
        self.depth, self.source = n_drafted, source
        by_source = {
            "head": (self.drafted, self.accepted),
            "copies": (self.copied, self.copies_accepted),
            "grammar": (self.forced, self.forced_accepted),
        }
        drafted, accepted = by_source.get(source, (self.others, self.others_accepted))
        new = n_drafted - len(drafted)
        drafted += [0] * new
        accepted += [0] * new
        for i in range(n_drafted):
            drafted[i] += 1
            accepted[i] += i < n_accepted

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of the text, without its first step and steps that made a trace; ``None`` if there is no other step."""
        return self.n_timed / self.seconds if self.n_timed > 0 else None

    @property
    def n_drafted(self) -> int:
        """Drafts of all sources."""
        return sum(map(sum, (self.drafted, self.copied, self.forced, self.others)))

    @property
    def n_accepted(self) -> int:
        """Accepted drafts of all sources."""
        return sum(map(sum, (self.accepted, self.copies_accepted, self.forced_accepted, self.others_accepted)))

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens that a verify pass with drafts has yielded."""
        n_steps = sum(sum(drafted[:1]) for drafted in (self.drafted, self.copied, self.forced, self.others))
        return 1 + self.n_accepted / n_steps if n_steps > 0 else 1.0
