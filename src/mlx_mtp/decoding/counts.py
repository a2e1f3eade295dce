"""Counts of drafted and accepted tokens of a text, and its speed."""

from dataclasses import dataclass, field

from ..pacing.step_times import HEAD


@dataclass
class DraftCounts:
    """
    The number of drafts made and accepted, by source and by position in the window.

    Args:
        by_source (Dict[str, Tuple[List[int], List[int]]]): Drafts and accepted drafts of each source: ``"head"``, ``"copies"``,
          ``"grammar"``, or the name of another one in ``drafts/sources.py``.
        source (str): The source of the latest step's drafts.
        n_timed (int): Tokens of the steps that are timed: all but the first, and those that made a trace (``traces.py``).
        seconds (float): The time of these steps.
    """

    by_source: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    source: str = HEAD
    n_timed: int = 0
    seconds: float = 0.0

    def of(self, source: str) -> tuple[list[int], list[int]]:
        """Drafts and accepted drafts of a source, each [K]."""
        return self.by_source.setdefault(source, ([], []))

    def add(self, n_drafted: int, n_accepted: int, source: str = HEAD) -> None:
        """Count a step."""
        self.source = source
        drafted, accepted = self.of(source)
        new = n_drafted - len(drafted)
        drafted += [0] * new
        accepted += [0] * new
        for i in range(n_drafted):
            drafted[i] += 1
            accepted[i] += i < n_accepted

    @property
    def drafted(self) -> list[int]:
        """Drafts of the head."""
        return self.of(HEAD)[0]

    @property
    def accepted(self) -> list[int]:
        """Accepted drafts of the head."""
        return self.of(HEAD)[1]

    @property
    def copied(self) -> list[int]:
        """Drafts copied from the text."""
        return self.of("copies")[0]

    @property
    def copies_accepted(self) -> list[int]:
        return self.of("copies")[1]

    @property
    def forced(self) -> list[int]:
        """Drafts forced by a grammar."""
        return self.of("grammar")[0]

    @property
    def forced_accepted(self) -> list[int]:
        return self.of("grammar")[1]

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of the text, without its first step and steps that made a trace; ``None`` if there is no other step."""
        return self.n_timed / self.seconds if self.n_timed > 0 else None

    @property
    def n_drafted(self) -> int:
        """Drafts of all sources."""
        return sum(sum(drafted) for drafted, _ in self.by_source.values())

    @property
    def n_accepted(self) -> int:
        """Accepted drafts of all sources."""
        return sum(sum(accepted) for _, accepted in self.by_source.values())

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens that a verify pass with drafts has yielded."""
        n_steps = sum(sum(drafted[:1]) for drafted, _ in self.by_source.values())
        return 1 + self.n_accepted / n_steps if n_steps > 0 else 1.0
