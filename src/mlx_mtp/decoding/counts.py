"""What came of the drafts of a text."""

from dataclasses import dataclass, field


@dataclass
class DraftCounts:
    """
    What came of the drafts, by position in the window.

    Args:
        drafted (List[int]): Drafts of the head.
        accepted (List[int]): Those accepted.
        copied (List[int]): Drafts copied from the text.
        copies_accepted (List[int]): Those accepted.
        depth (int): The latest step's number of drafts.
        source (str): Where they came from: ``"head"`` or ``"copy"``.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    copies_accepted: list[int] = field(default_factory=list)
    depth: int = 0
    source: str = "head"

    def add(self, n_drafted: int, n_accepted: int, copies: bool = False) -> None:
        """Count a step."""
        self.depth, self.source = n_drafted, "copy" if copies else "head"
        drafted, accepted = (self.copied, self.copies_accepted) if copies else (self.drafted, self.accepted)
        new = n_drafted - len(drafted)
        drafted += [0] * new
        accepted += [0] * new
        for i in range(n_drafted):
            drafted[i] += 1
            accepted[i] += i < n_accepted

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens that a verify pass with drafts has yielded."""
        n_steps = sum(self.drafted[:1]) + sum(self.copied[:1])
        return 1 + (sum(self.accepted) + sum(self.copies_accepted)) / n_steps if n_steps > 0 else 1.0
