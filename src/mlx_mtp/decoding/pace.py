"""How many tokens each step drafts, and what came of them."""

from dataclasses import dataclass, field
from typing import Literal

from .depth import Depth

NumDraftTokens = int | Literal["auto"] | Depth


@dataclass
class DraftCounts:
    """Drafts made and accepted, by position in the window; the latest step's number of drafts."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    depth: int = 0

    def add(self, n_drafted: int, n_accepted: int) -> None:
        self.depth = n_drafted
        new = n_drafted - len(self.drafted)
        self.drafted += [0] * new
        self.accepted += [0] * new
        for i in range(n_drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < n_accepted
