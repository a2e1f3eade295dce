"""A sequence: a text that is generated, with its options, its prompt cache and its tokens so far."""

from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from ..caches.positions import ImageSpan
from ..caches.prompt_cache import PromptCache
from ..caches.rows import KVOptions
from ..drafts.options import TextOptions
from ..drafts.sources import FreeSource, make_free_sources
from ..pacing import MAX_DRAFT_TOKENS
from ..pacing.depth import Offer, Rates
from ..pacing.step_times import HEAD, Plan
from ..sampling.acceptance import make_acceptance
from .counts import DraftCounts


class PendingEmbeddings(Protocol):
    """Embeddings of a prompt that are computed a piece at a time, such as ``images.prompt.ImageEmbeddings``."""

    array: mx.array  # [T, H], complete once ``advance`` has returned ``True``

    def __len__(self) -> int: ...

    def advance(self, seconds: float) -> bool:
        """Compute for about this time -> whether the array is complete."""
        ...


@dataclass(eq=False)
class Sequence:
    """A text that is generated. The host may not know its last generated tokens yet."""

    cache: PromptCache  # of its tokens, except for those that a pass in flight verifies
    options: TextOptions  # resolved
    kv: KVOptions
    segments: list[list[int]]  # of the prompt that is left; the last is its last token
    counts: DraftCounts
    tokens: list[int] = field(default_factory=list)  # that the host knows: of the prefilled prompt, and generated ones
    embeddings: mx.array | None = None  # [T, H], of the prompt that is left, in place of the tokens'
    pending: PendingEmbeddings | None = None  # computes ``embeddings``
    uid: int = 0
    has_tokens: bool = True  # otherwise only embeddings were given, and ``segments`` has zeros

    def __post_init__(self) -> None:
        assert self.options.max_tokens is not None
        self.max_tokens = self.options.max_tokens  # to generate; negative for no limit
        self.stop = None if self.options.stop_sequences is None else self.options.stop_sequences.matcher()
        # "length", "stop", "removed", or the error of its sampler or a processor
        self.end: str | Exception | None = None
        self.images, n_cached = self.cache.images, self.cache.n_tokens
        self.cached_text = [] if self.tokens else self.cache.text  # before ``tokens``
        self.text_start = n_cached - len(self.cached_text) - len(self.tokens)  # the index of the first known token
        *before, end = [segment for segment in self.segments if segment]
        self.segments = [*before, end[:-1], end[-1:]] if len(end) > 1 else [*before, end]
        self.n_prefilled, self.n_prompt = 0, sum(map(len, self.segments))
        self.kv = self.kv.of_text(n_cached, self.n_prompt)
        self.prompt_end = n_cached + self.n_prompt  # the index after the prompt
        self.n_generated = self.n_observed = 0  # the host knows the latter number of them
        self.context: mx.array | None = None  # [N], for the logits processors
        self.acceptance = make_acceptance(self.options.sampler)
        self.rates = Rates(MAX_DRAFT_TOKENS)  # of the head's drafts
        self.free_sources: dict[str, FreeSource] = {}  # by name

    @property
    def needs_tokens(self) -> bool:
        """Whether the host must know its last token before the next can be chosen."""
        return any(getattr(p, "needs_tokens", False) for p in self.options.logits_processors or ())

    @property
    def n_unobserved(self) -> int:
        """The number of committed tokens that the host does not know yet."""
        return self.n_generated - self.n_observed

    @property
    def is_prefilled(self) -> bool:
        """Whether its prompt is prefilled except for the last token."""
        return len(self.segments) <= 1 and self.pending is None

    def take_prompt(self, n: int) -> None:
        segment, self.n_prefilled = self.segments[0], self.n_prefilled + n
        if self.has_tokens:
            self.tokens += segment[:n]
        else:
            self.cached_text, self.text_start = [], self.cache.n_tokens
        self.segments = [segment[n:], *self.segments[1:]] if n < len(segment) else self.segments[1:]
        if self.embeddings is not None:
            self.embeddings = self.embeddings[n:] if n < len(self.embeddings) else None

    def take_last(self) -> int:
        """Take the token that the sequence joins with: the prompt's last, or the first that was chosen, if any."""
        if self.segments:
            self.tokens += self.segments.pop()
        return self.tokens[-1] if self.tokens else 0

    def start(self) -> None:
        self.free_sources = make_free_sources(self.options, without_images(self.text, self.text_start, self.images))
        if self.options.logits_processors:
            self.context = mx.array(self.tokens, mx.uint32)

    @property
    def text(self) -> list[int]:
        """All tokens that the host knows, from index ``text_start`` on."""
        return [*self.cached_text, *self.tokens]

    def text_of(self, n_tokens: int) -> list[int]:
        n, text = n_tokens - self.text_start, self.text
        return text[:n] if 0 <= n <= len(text) else []

    def fixed(self, source: str) -> int | None:
        """The number of drafts of a source; ``None`` if it is chosen at every step."""
        n = self.options.num_draft_tokens if source == HEAD else self.free_sources[source].fixed
        return n if isinstance(n, int) else None

    def offers(self, limit: int) -> Offer:
        rates = {name: source.acceptance_rates(self.n_unobserved)[:limit] for name, source in self.free_sources.items()}
        rates[HEAD] = self.rates.estimate[:limit][: self.fixed(HEAD)]
        return {name: of_each for name, of_each in rates.items() if of_each}

    def process(self, logits: mx.array, drafts: mx.array) -> mx.array:
        """Apply the logits processors to logits [1, V] of the position after drafts [t]."""
        assert self.context is not None
        tokens = mx.concatenate([self.context, drafts])
        if tokens.size > 0:  # as mlx-lm, which has none where the prompt was given as embeddings
            for processor in self.options.logits_processors or ():
                logits = processor(tokens, logits)
        return logits

    def commit(self, tokens: mx.array, b: int, n: int) -> None:
        """Commit the first n of ``tokens[b]``, of [B, T], which the host may not know yet."""
        self.n_generated += n
        if self.context is not None:
            self.context = mx.concatenate([self.context, tokens[b, :n]])

    def take(self, tokens: list[int], plan: Plan, n_accepted: int) -> list[int]:
        """Add a step's tokens, now that the host knows them -> the tokens up to the one that ends the sequence."""
        n_before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            self.n_observed += 1
            if self.n_observed == self.max_tokens:
                self.end = "length"
            if self.stop is not None and self.stop.advance(token):
                self.end = "stop"
            if self.end is not None:
                break
        taken = self.tokens[n_before:]
        self.counts.add(plan.k, min(n_accepted, len(taken)), plan.source)
        for source in self.free_sources.values():
            source.observe(taken)
        return taken


def without_images(text: list[int], first: int, images: list[ImageSpan]) -> list[int]:
    """Replace each image token of a text, which begins with token ``first``, by a negative number of its own, in place."""
    for image in images:
        for i in range(max(image.start, first), min(image.end, first + len(text))):
            text[i - first] = -1 - i
    return text
