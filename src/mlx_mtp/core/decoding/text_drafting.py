"""What drafts for a text, and how its drafts are accepted."""

from collections.abc import Sequence

from ..drafts.options import TextOptions
from ..drafts.sources import FreeSource, make_free_sources
from ..pacing import MAX_DRAFT_TOKENS
from ..pacing.depth import Offer, Rates
from ..pacing.step_times import HEAD, Plan
from ..sampling.acceptance import make_acceptance
from .counts import DraftCounts


class TextDrafting:
    def __init__(self, options: TextOptions, counts: DraftCounts):
        self.options = options
        self.counts = counts
        self.acceptance = make_acceptance(options.sampler)
        self.rates = Rates(MAX_DRAFT_TOKENS)  # of the head's drafts
        self.free: dict[str, FreeSource] = {}  # by name

    def begin(self, text: Sequence[int]) -> None:
        """Make the free sources, for the text so far."""
        self.free = make_free_sources(self.options, text)

    def fixed(self, source: str) -> int | None:
        """The number of drafts of a source; ``None`` if it is chosen at every step."""
        n = self.options.num_draft_tokens if source == HEAD else self.free[source].fixed
        return n if isinstance(n, int) else None

    def offers(self, limit: int, n_unobserved: int) -> Offer:
        rates = {name: source.acceptance_rates(n_unobserved)[:limit] for name, source in self.free.items()}
        rates[HEAD] = self.rates.estimate[:limit][: self.fixed(HEAD)]
        return {name: own for name, own in rates.items() if own}

    def observe(self, tokens: Sequence[int], plan: Plan, n_accepted: int) -> None:
        """Observe a step: its tokens, and how many of its drafts the model accepted."""
        self.counts.add(plan.k, min(n_accepted, len(tokens)), plan.source)
        for source in self.free.values():
            source.observe(tokens)
